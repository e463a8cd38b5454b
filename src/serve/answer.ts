/** Answers one request for completions: submits its choices, and writes a stream or one JSON value. */
import type { ServerResponse } from 'node:http';
import type { Tokenizer } from '../data/tokenizer.js';
import { sendError, sendJson } from '../http/answer.js';
import { asHttpError, HttpError, tooBusy } from '../http/error.js';
import { commentFrame, EventStream, eventFrame } from '../http/event-stream.js';
import { PieceWriter } from '../http/piece-writer.js';
import type { RequestUsage } from '../infer/engine/request.js';
import { type ChoiceDelta, ChoiceFormat, type Echo, finishedReason, usageOf } from './format.js';
import type { HostEvent, ModelHost } from './host.js';
import type { PackedLogprobs } from './logprobs.js';
import type { Metrics } from './metrics.js';
import { type Job, type Prompt, requestOf } from './protocol.js';
import { MessagesTranslation } from './protocols/messages.js';
import { ResponsesTranslation } from './protocols/responses.js';
import type { ChatChoice, ChatUsage, Translation } from './protocols/translation.js';
import type { Turns } from './turns.js';

/** Fields of the log about a request. */
export interface Outcome {
  readonly usage: object | null;
  readonly finish: readonly string[];
  readonly firstTokenMs: number | null;
  /** The error that ended it; null if none did. */
  readonly error: HttpError | null;
}

interface Choice {
  readonly format: ChoiceFormat;
  readonly index: number;
  /** For a whole answer. */
  echo: Echo | null;
  /** While a stream writes it. */
  isEchoing: boolean;
  /** Everything after the echo so far, for a whole answer. */
  readonly all: ChoiceDelta;
  usage: RequestUsage | null;
  hasFirst: boolean;
  lastAt: number;
}

/** Tokens and log-probabilities that an answer may list, and characters of its texts, to be written in one go. */
const SMALL_ANSWER = { listed: 2 ** 12, characters: 2 ** 16 };
/** Time after which a stream whose client sends nothing more is written to again, to learn whether it is still read [ms]. */
const PROBE_MS = 50;

export interface AnswerOptions {
  readonly id: string;
  readonly model: string;
  readonly tokenizer: Tokenizer;
  readonly host: ModelHost;
  readonly metrics: Metrics;
  /** When requests go to the model. */
  readonly turns: Turns;
  /** The body of an error in the form of the route. */
  readonly errorBody: (error: HttpError) => object;
}

function translationOf(job: Job, { id, model }: AnswerOptions, created: number): Translation | null {
  if (!job.translated) return null;
  const { protocol, echoed } = job.translated;
  const request = { id, model, created, promptTokens: job.promptTokens, echoed };
  return protocol === 'responses' ? new ResponsesTranslation(request) : new MessagesTranslation(request);
}

export class Answer {
  /** Resolves when the response has ended or its client is gone. */
  readonly done: Promise<Outcome>;
  readonly #response: ServerResponse;
  readonly #job: Job;
  readonly #options: AnswerOptions;
  readonly #choices: Choice[];
  readonly #cancels: (() => void)[] = [];
  readonly #startedAt = performance.now();
  /** The fields that all JSON values of the answer begin with, formatted once: they are most of a frame. */
  readonly #head: string;
  /** Writes the answer in another protocol; null for OpenAI's completions and chats. */
  readonly #translation: Translation | null;
  /** Where a stream is written; null for an answer of one JSON value. */
  #stream: EventStream | null = null;
  #prompts: readonly Prompt[] = [];
  #isOver = false;
  /** Whether a part of a whole answer may be written. */
  #isEnding = false;
  #left: number;
  #firstTokenMs: number | null = null;
  #error: HttpError | null = null;
  #resolve!: (outcome: Outcome) => void;

  constructor(response: ServerResponse, job: Job, options: AnswerOptions) {
    this.#response = response;
    this.#job = job;
    this.#options = options;
    this.#left = job.choices;
    this.#choices = Array.from({ length: job.choices }, (_, index) => ({
      format: new ChoiceFormat(job, index, options.tokenizer),
      index,
      echo: null,
      isEchoing: false,
      all: { text: '', positions: [], finish: null },
      usage: null,
      hasFirst: false,
      lastAt: this.#startedAt,
    }));
    const created = Math.floor(Date.now() / 1000);
    this.#translation = translationOf(job, options, created);
    const object = job.kind === 'chat' ? 'chat.completion' : 'text_completion';
    const head = {
      id: options.id,
      object: job.stream && job.kind === 'chat' ? `${object}.chunk` : object,
      created,
      model: options.model,
    };
    this.#head = JSON.stringify(head).slice(1, -1);
    this.done = new Promise((resolve) => {
      this.#resolve = resolve;
    });
  }

  /** Sends the beginning of a stream: the first byte leaves at once, whatever the engine is doing. */
  start(headers: Readonly<Record<string, string>>): void {
    const { socket } = this.#response.req;
    const probe = () => this.#probe();
    socket.on('end', probe);
    if (socket.readableEnded) setImmediate(probe);
    this.#response.on('close', () => {
      socket.off('end', probe);
      this.#guarded(() => this.#finish());
    });
    if (!this.#job.stream) {
      for (const [name, value] of Object.entries(headers)) this.#response.setHeader(name, value);
      return;
    }
    this.#stream = new EventStream(this.#response, headers);
    if (this.#translation) {
      this.#stream.send(this.#translation.begin());
      return;
    }
    this.#stream.send(
      this.#job.kind === 'chat'
        ? this.#choices.map(({ format }) => this.#frame([format.role()])).join('')
        : commentFrame('accepted'),
    );
  }

  /** Gives the requests to the model. */
  submit(prompts: readonly Prompt[]): void {
    this.#prompts = prompts;
    this.#options.turns.add(() => this.#submit());
  }

  #submit(): void {
    if (this.#isOver) return; // the client is gone
    this.#guarded(() => {
      for (const choice of this.#choices)
        this.#cancels.push(
          this.#options.host.submit(requestOf(this.#job, this.#prompts, choice.index), (events) =>
            this.#guarded(() => this.#take(choice, events)),
          ),
        );
    });
  }

  /** An error in what is done for this answer ends this answer, and nothing else. */
  #guarded(work: () => void): void {
    try {
      work();
    } catch (error) {
      this.fail(error);
    }
  }

  /**
   * The client sends no more. It may read on; if it is gone, the system says so after something was sent. Nothing is sent
   * in the course of a whole answer, so that counts as gone.
   */
  #probe(): void {
    if (!this.#stream) this.#response.destroy();
    this.keepAlive(0);
    setTimeout(() => this.keepAlive(0), PROBE_MS).unref();
  }

  /** Shows that a stream is alive if nothing was sent for `seconds`. */
  keepAlive(seconds: number): void {
    this.#stream?.keepAlive(seconds);
  }

  /** Ends the request with what there is. */
  cancel(): void {
    for (const cancel of this.#cancels) cancel();
  }

  #take(choice: Choice, events: readonly HostEvent[]): void {
    if (this.#isOver) {
      this.#count(choice, events);
      return;
    }
    const piece: ChoiceDelta = { text: '', positions: [], finish: null };
    let frames = '';
    for (const event of events) {
      if (event.type === 'error') {
        this.fail(event.isBusy ? tooBusy(event.message, 'queue_full') : new HttpError(500, event.message));
        return;
      }
      if (event.type === 'progress') frames += this.#progress(event);
      else if (event.type === 'prompt') {
        this.#stream?.send(frames);
        frames = '';
        if (this.#job.echo) this.#echo(choice, event.logprobs);
      } else if (event.type === 'token') {
        piece.text += event.text;
        choice.format.count(event.text);
        if (choice.format.hasPositions) piece.positions.push({ token: event.token, logprobs: event.logprobs ?? null });
      } else {
        piece.text += event.text;
        piece.finish = finishedReason(event.finishReason);
        if (event.stop !== undefined) piece.stop = event.stop;
      }
    }
    this.#count(choice, events);
    this.#join(choice, piece);
    if (this.#stream && (piece.text !== '' || piece.positions.length > 0 || piece.finish)) {
      // In the order of the text: an echo may still be on its way.
      if (choice.isEchoing) this.#stream.sendAll(this.#frames(() => choice.format.chunks(piece)));
      else for (const chunk of choice.format.chunks(piece)) frames += this.#frame([chunk]);
    }
    if (piece.finish) this.#left -= 1;
    if (this.#left > 0) this.#stream?.send(frames);
    else this.#end(frames);
  }

  #echo(choice: Choice, logprobs: PackedLogprobs): void {
    const { format, index } = choice;
    const echo = format.echo(this.#prompts[Math.floor(index / this.#job.n)], logprobs);
    if (!this.#stream) {
      choice.echo = echo;
      return;
    }
    choice.isEchoing = true;
    this.#stream.sendAll(
      this.#frames(function* () {
        yield* format.echoChunks(echo);
        choice.isEchoing = false;
      }),
    );
  }

  *#frames(chunks: () => Iterable<object>): Generator<string> {
    for (const chunk of chunks()) yield this.#frame([chunk]);
  }

  #join({ all }: Choice, piece: ChoiceDelta): void {
    all.finish = piece.finish ?? all.finish;
    if (piece.stop !== undefined) all.stop = piece.stop;
    if (this.#job.stream) return; // already written
    all.text += piece.text;
    for (const position of piece.positions) all.positions.push(position);
  }

  #count(choice: Choice, events: readonly HostEvent[]): void {
    const { metrics } = this.#options;
    const now = performance.now();
    const tokens = events.filter(({ type }) => type === 'token').length;
    if (tokens > 0) {
      const seconds = (now - choice.lastAt) / 1000;
      if (choice.hasFirst) metrics.tokens(tokens, seconds);
      else metrics.firstToken(seconds);
      this.#firstTokenMs ??= now - this.#startedAt;
      choice.hasFirst = true;
      choice.lastAt = now;
    }
    for (const event of events)
      if (event.type === 'end') {
        choice.usage = event.usage;
        metrics.end(finishedReason(event.finishReason), event.usage, (now - this.#startedAt) / 1000);
      }
  }

  #progress({ total, cached, processed }: Extract<HostEvent, { type: 'progress' }>): string {
    if (!this.#job.stream || !this.#job.returnProgress || this.#translation) return '';
    const seconds = (performance.now() - this.#startedAt) / 1000;
    const read = processed - cached;
    const left = read > 0 ? Math.round(1000 * (seconds / read) * (total - processed)) / 1000 : null;
    const prompt_progress = { total, cached, processed, seconds_left: left };
    return eventFrame(this.#json({ choices: [], prompt_progress }));
  }

  #frame(choices: readonly object[], more: object = {}): string {
    if (this.#translation) return choices.map((choice) => this.#translation?.chunk(choice as ChatChoice)).join('');
    const usage = this.#job.includeUsage ? { usage: null } : {};
    return eventFrame(this.#json({ choices, ...usage, ...more }));
  }

  /** The head and these fields as one object. */
  #json(fields: { readonly choices: readonly object[]; readonly [name: string]: unknown }): string {
    return `{${this.#head},${JSON.stringify(fields).slice(1)}`;
  }

  #end(frames: string): void {
    const isAborted = this.#choices.some(({ all }) => all.finish === 'abort');
    if (this.#translation && isAborted) {
      // Other protocols know no such end, and their clients would read arguments that are cut.
      this.fail(new HttpError(503, 'the server stops, and ended the answer'));
      return;
    }
    const usage = this.#usage();
    if (this.#stream) {
      if (this.#translation) frames += this.#translation.end(usage);
      this.#endStream(frames + (this.#job.includeUsage ? this.#frame([], { usage }) : ''));
      return;
    }
    this.#isEnding = true;
    if (this.#translation) {
      const text = [...this.#choices[0].format.whole(null, this.#choices[0].all, this.#prompts[0])].join('');
      sendJson(this.#response, this.#translation.whole(JSON.parse(text) as ChatChoice, usage));
      return;
    }
    const pieces = this.#whole(usage);
    const characters = this.#choices.reduce(
      (sum, { echo, all }) => sum + all.text.length + (echo?.text.length ?? 0),
      0,
    );
    if (this.#job.listed <= SMALL_ANSWER.listed && characters <= SMALL_ANSWER.characters) {
      sendJson(this.#response, [...pieces].join(''));
      return;
    }
    this.#response.setHeader('content-type', 'application/json');
    const writer = new PieceWriter(this.#response);
    writer.add(pieces);
    writer.end();
  }

  /** The JSON of a whole answer. */
  *#whole(usage: object): Generator<string> {
    yield `{${this.#head},"choices":[`;
    for (const { format, index, echo, all } of this.#choices) {
      if (index > 0) yield ',';
      yield* format.whole(echo, all, this.#prompts[Math.floor(index / this.#job.n)]);
    }
    yield `],"usage":${JSON.stringify(usage)}}`;
  }

  /** Ends the answer with an error. The details of a defect go to the terminal. */
  fail(reason: unknown): void {
    const error = asHttpError(reason);
    this.#error = error;
    try {
      this.cancel();
      if (this.#isOver || this.#isEnding) this.#response.destroy();
      else if (this.#stream) this.#endStream(this.#translation?.fail(error) ?? eventFrame(JSON.stringify(error.body)));
      else sendError(this.#response.req, this.#response, error, this.#options.errorBody(error));
    } catch (second) {
      console.error(second);
      this.#response.destroy();
    }
    this.#isOver = true;
  }

  #endStream(frames: string): void {
    this.#isOver = true;
    this.#stream?.send(frames + (this.#translation ? '' : eventFrame('[DONE]')));
    this.#stream?.end();
  }

  /** The tokens of the choices that ended. */
  #usage(): ChatUsage {
    const usages = this.#choices.flatMap(({ usage }) => (usage ? [usage] : []));
    const reasoning = this.#choices.flatMap(({ format: { reasoningTokens: of } }) => (of === null ? [] : [of]));
    const reasoningTokens = reasoning.length === 0 ? null : reasoning.reduce((sum, one) => sum + one);
    return usageOf(usages, this.#job.n, reasoningTokens);
  }

  /** The response was sent, or the client is gone: what is still running is cancelled. */
  #finish(): void {
    this.#resolve({
      usage: this.#choices.some(({ usage }) => usage) ? this.#usage() : null,
      finish: this.#choices.map(({ all }) => all.finish ?? 'abort'),
      firstTokenMs: this.#firstTokenMs,
      error: this.#error,
    });
    this.#isOver = true;
    this.cancel();
  }
}
