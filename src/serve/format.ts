/** Answers in the shapes of the OpenAI API: whole completions, chunks of a stream, log-probabilities. */
import { randomBytes } from 'node:crypto';
import { ID_LENGTH } from '../data/answer-form.js';
import type { StreamDecoder, Tokenizer } from '../data/tokenizer.js';
import { AnswerParser, type AnswerPart, type ParsedAnswer, parseAnswer } from '../infer/answer-parser.js';
import type { FinishReason, PositionLogprobs, RequestUsage } from '../infer/engine/request.js';
import { logprobsAt, type PackedLogprobs } from './logprobs.js';
import type { FinishedReason } from './metrics.js';
import type { Job, Prompt } from './protocol.js';
import type { ChatUsage } from './protocols/translation.js';

/** One position of the text of a choice; the first token of a prompt has no log-probability. */
export interface Position {
  readonly token: number;
  readonly logprobs: PositionLogprobs | null;
}

/** Why a choice ended, as clients are told. */
export type ChoiceFinish = FinishedReason | 'tool_calls';

/** Something new in a choice: text, the tokens behind it, and why it ended. */
export interface ChoiceDelta {
  text: string;
  readonly positions: Position[];
  finish: ChoiceFinish | null;
  /** The stop string that ended it, for protocols that tell it. */
  stop?: string;
}

/** The prompt as the beginning of a text, for `echo`. It may be long. */
export interface Echo {
  readonly text: string;
  readonly tokens: readonly number[] | Int32Array;
  /** The first position has none. */
  readonly logprobs: PackedLogprobs;
}

/** Positions and characters that are formatted in one go. */
const SLICE = { positions: 64, characters: 2 ** 15 };

export function finishedReason(reason: FinishReason): FinishedReason {
  if (reason === 'aborted') return 'abort';
  return reason === 'length' || reason === 'context' ? 'length' : 'stop';
}

function finishOf(finish: ChoiceFinish | null, hasCalls: boolean): ChoiceFinish | null {
  return hasCalls && finish === 'stop' ? 'tool_calls' : finish;
}

/** `reasoningTokens`: null if the answer does not reason. */
export function usageOf(usages: readonly RequestUsage[], n: number, reasoningTokens: number | null): ChatUsage {
  const sum = (of: (usage: RequestUsage) => number, every = 1) =>
    usages.reduce((total, usage, i) => total + (i % every === 0 ? of(usage) : 0), 0);
  // A prompt counts once, however many choices it has.
  const prompt = sum(({ promptTokens }) => promptTokens, n);
  const completion = sum(({ newTokens }) => newTokens);
  return {
    prompt_tokens: prompt,
    completion_tokens: completion,
    total_tokens: prompt + completion,
    prompt_tokens_details: { cached_tokens: sum(({ cachedTokens }) => cachedTokens, n) },
    ...(reasoningTokens === null ? {} : { completion_tokens_details: { reasoning_tokens: reasoningTokens } }),
  };
}

/** Formats the pieces of one choice. */
export class ChoiceFormat {
  readonly #job: Job;
  readonly #index: number;
  readonly #tokenizer: Tokenizer;
  readonly #offsets: StreamDecoder;
  #offset = 0;
  /** Takes the text of a stream apart; null if all of it is the answer. */
  readonly #parser: AnswerParser | null;
  #calls = 0;
  /** Reads the tokens of an answer that may reason, up to the end of the reasoning. */
  #reasoning: AnswerParser | null;
  #reasoningTokens = 0;
  #hasReasoned = false;

  constructor(job: Job, index: number, tokenizer: Tokenizer) {
    this.#reasoning = job.answer?.reasoning ? new AnswerParser(job.answer) : null;
    this.#parser = job.stream && job.answer ? new AnswerParser(job.answer) : null;
    this.#job = job;
    this.#index = index;
    this.#tokenizer = tokenizer;
    this.#offsets = tokenizer.createStreamDecoder();
  }

  /** Whether the answer lists the tokens of the text. */
  get hasPositions(): boolean {
    return this.#job.logprobs !== null || this.#job.returnTokenIds;
  }

  /** Counts a token of the answer: one of the reasoning, if that has not ended. */
  count(text: string): void {
    const parser = this.#reasoning;
    if (!parser) return;
    const parts = parser.push(text);
    this.#hasReasoned ||= parts.some(({ type }) => type === 'reasoning');
    this.#reasoningTokens += 1;
    if (parser.isAnswering) this.#reasoning = null;
  }

  /** Tokens of the reasoning with its tags; null if the answer cannot have any. */
  get reasoningTokens(): number | null {
    if (!this.#job.answer?.reasoning) return null;
    return this.#hasReasoned ? this.#reasoningTokens : 0;
  }

  echo({ tokens, text }: Prompt, logprobs: PackedLogprobs): Echo {
    return { text: text ?? this.#tokenizer.decode(tokens), tokens, logprobs };
  }

  /** The JSON of a choice of a whole answer: the echo, then `rest`. */
  *whole(echo: Echo | null, rest: ChoiceDelta, prompt: Prompt): Generator<string> {
    const { kind, answer } = this.#job;
    const parsed = answer ? parseAnswer(answer, rest.text) : null;
    const text = (echo?.text ?? '') + (parsed?.content ?? rest.text);
    const slices = () => this.#slices(echo, rest.positions);
    yield `{"index":${this.#index},"logprobs":`;
    if (this.#job.logprobs === null) yield 'null';
    else yield* this.#columns(slices);
    const hasCalls = parsed !== null && parsed.calls.length > 0;
    yield `,"finish_reason":${JSON.stringify(finishOf(rest.finish, hasCalls))},`;
    if (this.#job.translated && rest.stop !== undefined) yield `"stop_reason":${JSON.stringify(rest.stop)},`;
    yield kind === 'chat' ? '"message":{"role":"assistant","content":' : '"text":';
    if (hasCalls && text.trim() === '') yield 'null';
    else yield* textPieces(text);
    if (parsed) yield* this.#others(parsed);
    if (kind === 'chat') yield ',"refusal":null}';
    if (this.#job.returnTokenIds) {
      yield ',"token_ids":';
      yield* listPieces(slices(), (slice) => slice.map(({ token }) => token));
      yield ',"prompt_token_ids":';
      yield* listPieces(tokenSlices(prompt.tokens), (slice) => Array.from(slice));
    }
    yield '}';
  }

  /** Reasoning and calls of a whole message. */
  *#others({ reasoning, calls }: ParsedAnswer): Generator<string> {
    if (reasoning !== '') {
      yield ',"reasoning_content":';
      yield* textPieces(reasoning);
    }
    for (const [i, call] of calls.entries()) {
      const id = JSON.stringify(this.#callId());
      yield `${i === 0 ? ',"tool_calls":[' : ','}{"id":${id},"type":"function","function":{"name":`;
      yield `${JSON.stringify(call.name)},"arguments":`;
      yield* textPieces(call.arguments);
      yield '}}';
    }
    if (calls.length > 0) yield ']';
  }

  /** Templates that write ids into the text take short ones. */
  #callId(): string {
    const { calls } = this.#job.answer ?? { calls: null };
    const isShort = [calls?.middle, calls?.between, calls?.end].some((texts) => (texts?.length ?? 1) > 1);
    const random = randomBytes(12).toString('hex');
    return isShort ? random.slice(0, ID_LENGTH) : `call_${random}`;
  }

  /** The first choice of a chat stream. */
  role(): object {
    const delta = { role: 'assistant', content: '' };
    return { index: this.#index, delta, logprobs: null, finish_reason: null };
  }

  /** Choices of a stream for the echo: slices of its text, each with as many of its positions. */
  *echoChunks(echo: Echo): Generator<object> {
    const slices = this.hasPositions ? this.#slices(echo, []) : [].values();
    const left = Math.ceil(echo.text.length / SLICE.characters);
    const count = Math.max(left, this.hasPositions ? Math.ceil(echo.tokens.length / SLICE.positions) : 0);
    for (let i = 0; i < count; i++) {
      const cut = (at: number) => Math.round((at * echo.text.length) / count);
      const text = echo.text.slice(wholeCharacter(echo.text, cut(i)), wholeCharacter(echo.text, cut(i + 1)));
      yield* this.chunks({ text, positions: slices.next().value ?? [], finish: null });
    }
  }

  /** Choices of a stream; a chat ends with an empty delta. */
  chunks(piece: ChoiceDelta): object[] {
    const ids = this.#job.returnTokenIds ? { token_ids: piece.positions.map(({ token }) => token) } : {};
    const logprobs = this.#logprobs(piece);
    if (this.#job.kind === 'completion')
      return [{ index: this.#index, text: piece.text, logprobs, finish_reason: piece.finish, ...ids }];
    const chunks: object[] = [];
    const add = (delta: object, i: number) =>
      chunks.push({
        index: this.#index,
        delta,
        logprobs: i === 0 ? logprobs : null,
        finish_reason: null,
        ...(i === 0 ? ids : {}),
      });
    const deltas = this.#parser
      ? this.#deltas(this.#parser, piece)
      : piece.text === ''
        ? []
        : [{ content: piece.text }];
    if (deltas.length === 0 && piece.positions.length > 0) deltas.push({ content: '' });
    deltas.forEach(add);
    const finish = finishOf(piece.finish, this.#calls > 0);
    const stop = this.#job.translated && piece.stop !== undefined ? { stop_reason: piece.stop } : {};
    if (finish) chunks.push({ index: this.#index, delta: {}, logprobs: null, finish_reason: finish, ...stop });
    return chunks;
  }

  #deltas(parser: AnswerParser, { text, finish }: ChoiceDelta): object[] {
    const parts = parser.push(text);
    if (finish) parts.push(...parser.end());
    return parts.map((part) => this.#delta(part));
  }

  /** The first delta of a call has its name, those after it pieces of the arguments. */
  #delta(part: AnswerPart): object {
    if (part.type === 'content') return { content: part.text };
    if (part.type === 'reasoning') return { reasoning_content: part.text };
    if (part.type === 'arguments')
      return { tool_calls: [{ index: this.#calls - 1, function: { arguments: part.text } }] };
    const call = { id: this.#callId(), type: 'function', function: { name: part.name, arguments: '' } };
    this.#calls += 1;
    return { tool_calls: [{ index: this.#calls - 1, ...call }] };
  }

  /** The positions of an echo and those after it. */
  *#slices(echo: Echo | null, rest: readonly Position[]): Generator<Position[]> {
    const { length } = echo?.tokens ?? [];
    for (let from = 0; echo && from < length; from += SLICE.positions)
      yield Array.from({ length: Math.min(SLICE.positions, length - from) }, (_, k) => ({
        token: echo.tokens[from + k],
        logprobs: from + k === 0 ? null : logprobsAt(echo.logprobs, from + k - 1),
      }));
    for (let from = 0; from < rest.length; from += SLICE.positions) yield rest.slice(from, from + SLICE.positions);
  }

  /** Log-probabilities of a whole answer: each field by all slices. */
  *#columns(slices: () => Generator<Position[]>): Generator<string> {
    const fields = Object.entries(this.#fields());
    for (const [i, [name, values]] of fields.entries()) {
      yield `${i === 0 ? '{' : ','}"${name}":`;
      yield* listPieces(slices(), values);
    }
    yield this.#job.kind === 'chat' ? ',"refusal":null}' : '}';
  }

  #logprobs({ positions }: ChoiceDelta): object | null {
    if (this.#job.logprobs === null) return null;
    const fields = Object.entries(this.#fields()).map(([name, values]) => [name, values(positions)]);
    return { ...Object.fromEntries(fields), ...(this.#job.kind === 'chat' ? { refusal: null } : {}) };
  }

  /** The fields with log-probabilities, each a list that follows the positions. */
  #fields(): Record<string, (positions: readonly Position[]) => unknown[]> {
    if (this.#job.kind === 'chat') return { content: (positions) => this.#content(positions) };
    return {
      tokens: (positions) => positions.map(({ token }) => this.#name(token)),
      token_logprobs: (positions) => positions.map(({ logprobs }) => logprobs?.logprob ?? null),
      top_logprobs: (positions) => positions.map(({ logprobs }) => this.#top(logprobs)),
      text_offset: (positions) =>
        positions.map(({ token }) => {
          const at = this.#offset;
          this.#offset += this.#offsets.push(token).length;
          return at;
        }),
    };
  }

  #content(positions: readonly Position[]): unknown[] {
    const entry = ({ token, logprob }: { token: number; logprob: number }) => {
      const name = this.#name(token);
      const isText = !name.startsWith(ID_PREFIX);
      return { token: name, logprob, bytes: isText ? [...Buffer.from(name, 'utf8')] : null };
    };
    return positions.flatMap(({ logprobs }) =>
      logprobs ? [{ ...entry(logprobs), top_logprobs: logprobs.top.map(entry) }] : [],
    );
  }

  /** The token itself is listed as well, as a client compares it with the best. */
  #top(logprobs: PositionLogprobs | null): object | null {
    if (!logprobs) return null;
    const { top, token } = logprobs;
    const all = top.some((one) => one.token === token) ? top : [...top, logprobs];
    return Object.fromEntries(all.map((one) => [this.#name(one.token), one.logprob]));
  }

  /** The text of a token, or `token_id:N` where it has none of its own, such as a part of a character. */
  #name(token: number): string {
    const text = this.#tokenizer.decode([token]);
    return text === '' || text.includes('\uFFFD') ? `${ID_PREFIX}${token}` : text;
  }
}

const ID_PREFIX = 'token_id:';

/** A JSON text in pieces. Half a surrogate pair is escaped, so a piece may end anywhere. */
function* textPieces(text: string): Generator<string> {
  yield '"';
  for (let at = 0; at < text.length; at += SLICE.characters)
    yield JSON.stringify(text.slice(at, at + SLICE.characters)).slice(1, -1);
  yield '"';
}

/** A JSON list in pieces, one for each slice. */
function* listPieces<T>(slices: Iterable<T>, values: (slice: T) => unknown[]): Generator<string> {
  yield '[';
  let separator = '';
  for (const slice of slices) {
    const list = JSON.stringify(values(slice)).slice(1, -1);
    if (list === '') continue;
    yield separator + list;
    separator = ',';
  }
  yield ']';
}

function* tokenSlices(tokens: readonly number[] | Int32Array): Generator<readonly number[] | Int32Array> {
  for (let from = 0; from < tokens.length; from += SLICE.positions) yield tokens.slice(from, from + SLICE.positions);
}

/** `at`, or the next place if that is inside a surrogate pair. */
function wholeCharacter(text: string, at: number): number {
  const isInside = /[\udc00-\udfff]/.test(text[at] ?? '') && /[\ud800-\udbff]/.test(text[at - 1] ?? '');
  return isInside ? at + 1 : at;
}
