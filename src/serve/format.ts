/** Answers in the shapes of the OpenAI API: whole completions, chunks of a stream, log-probabilities. */
import type { StreamDecoder, Tokenizer } from '../data/tokenizer.js';
import type { PositionLogprobs, RequestUsage } from '../infer/engine/request.js';
import type { FinishReason } from '../infer/generate.js';
import type { FinishedReason } from './metrics.js';
import type { Job, Prompt } from './protocol.js';

/** One position of the text of a choice; the first token of a prompt has no log-probability. */
interface Position {
  readonly token: number;
  readonly logprobs: PositionLogprobs | null;
}

/** Something new in a choice: text, the tokens behind it, and why it ended. */
export interface Piece {
  text: string;
  readonly positions: Position[];
  finish: FinishedReason | null;
}

export function finishedReason(reason: FinishReason): FinishedReason {
  if (reason === 'aborted') return 'abort';
  return reason === 'length' || reason === 'context' ? 'length' : 'stop';
}

export function usageOf(usages: readonly RequestUsage[], n: number): object {
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
  };
}

/** Formats the pieces of one choice. */
export class ChoiceFormat {
  readonly #job: Job;
  readonly #index: number;
  readonly #tokenizer: Tokenizer;
  readonly #offsets: StreamDecoder;
  #offset = 0;

  constructor(job: Job, index: number, tokenizer: Tokenizer) {
    this.#job = job;
    this.#index = index;
    this.#tokenizer = tokenizer;
    this.#offsets = tokenizer.createStreamDecoder();
  }

  get prompt(): Prompt {
    return this.#job.prompts[Math.floor(this.#index / this.#job.n)];
  }

  /** The prompt as the beginning of the text, for `echo`. */
  echo(logprobs: readonly PositionLogprobs[]): Piece {
    const { tokens, text } = this.prompt;
    const logprobsAt = (i: number) => (i === 0 ? null : (logprobs[i - 1] ?? null));
    const positions = Array.from(tokens, (token, i) => ({ token, logprobs: logprobsAt(i) }));
    return { text: text ?? this.#tokenizer.decode(tokens), positions, finish: null };
  }

  /** The choice of a whole answer. */
  whole(piece: Piece): object {
    const shared = { index: this.#index, logprobs: this.#logprobs(piece), finish_reason: piece.finish };
    if (this.#job.kind === 'completion') return { ...shared, text: piece.text, ...this.#ids(piece, true) };
    return { ...shared, message: { role: 'assistant', content: piece.text, refusal: null }, ...this.#ids(piece, true) };
  }

  /** The first choice of a chat stream. */
  role(): object {
    const delta = { role: 'assistant', content: '' };
    return { index: this.#index, delta, logprobs: null, finish_reason: null };
  }

  /** Choices of a stream; a chat ends with an empty delta. */
  chunks(piece: Piece): object[] {
    const ids = this.#ids(piece, false);
    const logprobs = this.#logprobs(piece);
    if (this.#job.kind === 'completion')
      return [{ index: this.#index, text: piece.text, logprobs, finish_reason: piece.finish, ...ids }];
    const chunks: object[] = [];
    if (piece.text !== '' || piece.positions.length > 0)
      chunks.push({ index: this.#index, delta: { content: piece.text }, logprobs, finish_reason: null, ...ids });
    if (piece.finish) chunks.push({ index: this.#index, delta: {}, logprobs: null, finish_reason: piece.finish });
    return chunks;
  }

  #ids({ positions }: Piece, isWhole: boolean): object {
    if (!this.#job.returnTokenIds) return {};
    const token_ids = positions.map(({ token }) => token);
    return isWhole ? { token_ids, prompt_token_ids: Array.from(this.prompt.tokens) } : { token_ids };
  }

  #logprobs({ positions }: Piece): object | null {
    if (this.#job.logprobs === null) return null;
    return this.#job.kind === 'chat' ? this.#chatLogprobs(positions) : this.#completionLogprobs(positions);
  }

  #chatLogprobs(positions: readonly Position[]): object {
    const entry = ({ token, logprob }: { token: number; logprob: number }) => {
      const name = this.#name(token);
      const isText = !name.startsWith(ID_PREFIX);
      return { token: name, logprob, bytes: isText ? [...Buffer.from(name, 'utf8')] : null };
    };
    const content = positions.flatMap(({ logprobs }) =>
      logprobs ? [{ ...entry(logprobs), top_logprobs: logprobs.top.map(entry) }] : [],
    );
    return { content, refusal: null };
  }

  #completionLogprobs(positions: readonly Position[]): object {
    const offsets = positions.map(({ token }) => {
      const at = this.#offset;
      this.#offset += this.#offsets.push(token).length;
      return at;
    });
    return {
      tokens: positions.map(({ token }) => this.#name(token)),
      token_logprobs: positions.map(({ logprobs }) => logprobs?.logprob ?? null),
      top_logprobs: positions.map(({ logprobs }) => {
        if (!logprobs) return null;
        // The token itself is listed as well, as a client compares it with the best.
        const all = [
          ...logprobs.top,
          ...(logprobs.top.some(({ token }) => token === logprobs.token) ? [] : [logprobs]),
        ];
        return Object.fromEntries(all.map(({ token, logprob }) => [this.#name(token), logprob]));
      }),
      text_offset: offsets,
    };
  }

  /** The text of a token, or `token_id:N` where it has none of its own, such as a part of a character. */
  #name(token: number): string {
    const text = this.#tokenizer.decode([token]);
    return text === '' || text.includes('\uFFFD') ? `${ID_PREFIX}${token}` : text;
  }
}

const ID_PREFIX = 'token_id:';
