/** Answers one request for completions: submits its choices, and writes a stream or one JSON value. */
import type { ServerResponse } from 'node:http';
import type { Tokenizer } from '../data/tokenizer.js';
import type { PositionLogprobs, RequestUsage } from '../infer/engine/request.js';
import { ApiError, asApiError } from './errors.js';
import { ChoiceFormat, finishedReason, type Piece, usageOf } from './format.js';
import type { HostEvent, ModelHost } from './host.js';
import type { Metrics } from './metrics.js';
import type { Job } from './protocol.js';
import type { Turns } from './turns.js';

/** Bytes that a client may leave unread before its request is cancelled. */
const MOST_UNREAD = 16 * 2 ** 20;

/** What the log says about a request. */
export interface Outcome {
  readonly usage: object | null;
  readonly finish: readonly string[];
  readonly firstTokenMs: number | null;
}

/** The frame of a token, around its text and its number: most frames of a stream differ in these only. */
interface FrameParts {
  readonly start: string;
  readonly middle: string;
  readonly end: string;
}

/** Stand for the text and the token of a frame whose parts are taken; both appear in it once. */
const ANY_TEXT = '\u0000any text\u0000';
const ANY_TOKEN = 0x7fff_fff1;

interface Choice {
  readonly format: ChoiceFormat;
  /** Of a stream without log-probabilities; null before the first token. */
  parts: FrameParts | null;
  /** Everything so far, for a whole answer. */
  readonly all: Piece;
  usage: RequestUsage | null;
  hasFirst: boolean;
  lastAt: number;
}

export interface AnswerOptions {
  readonly id: string;
  readonly model: string;
  readonly tokenizer: Tokenizer;
  readonly host: ModelHost;
  readonly metrics: Metrics;
  /** When requests go to the model. */
  readonly turns: Turns;
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
  readonly #head: object;
  #unread: string[] = [];
  #unreadBytes = 0;
  #isWaiting = false;
  #isOver = false;
  #left: number;
  #firstTokenMs: number | null = null;
  #wroteAt = performance.now();
  #resolve!: (outcome: Outcome) => void;

  constructor(response: ServerResponse, job: Job, options: AnswerOptions) {
    this.#response = response;
    this.#job = job;
    this.#options = options;
    const count = job.prompts.length * job.n;
    this.#left = count;
    this.#choices = Array.from({ length: count }, (_, index) => ({
      format: new ChoiceFormat(job, index, options.tokenizer),
      parts: null,
      all: { text: '', positions: [], finish: null },
      usage: null,
      hasFirst: false,
      lastAt: this.#startedAt,
    }));
    const object = job.kind === 'chat' ? 'chat.completion' : 'text_completion';
    this.#head = {
      id: options.id,
      object: job.stream && job.kind === 'chat' ? `${object}.chunk` : object,
      created: Math.floor(Date.now() / 1000),
      model: options.model,
    };
    this.done = new Promise((resolve) => {
      this.#resolve = resolve;
    });
  }

  start(headers: Readonly<Record<string, string>>): void {
    this.#response.on('close', () => this.#finish());
    this.#response.on('drain', () => {
      this.#isWaiting = false;
      this.#flush();
    });
    if (this.#job.stream) {
      this.#response.writeHead(200, {
        ...headers,
        'content-type': 'text/event-stream',
        'cache-control': 'no-cache',
        'x-accel-buffering': 'no', // nginx would hold the events back
      });
      // The first byte leaves at once, whatever the engine is doing.
      if (this.#job.kind === 'chat') this.#send(this.#choices.flatMap(({ format }) => this.#frame([format.role()])));
      else this.#send([': accepted\n\n']);
    } else for (const [name, value] of Object.entries(headers)) this.#response.setHeader(name, value);
    this.#options.turns.add(() => this.#submit());
  }

  #submit(): void {
    const { host } = this.#options;
    if (this.#isOver) return; // the client is gone
    try {
      for (const [index, choice] of this.#choices.entries())
        this.#cancels.push(host.submit(this.#job.request(index), (events) => this.#take(choice, events)));
    } catch (error) {
      this.#fail(asApiError(error)); // a text whose tokens do not fit
    }
  }

  /** A comment if nothing was written for `seconds`, so that proxies and people know the stream is alive. */
  keepAlive(seconds: number): void {
    if (this.#job.stream && performance.now() - this.#wroteAt >= seconds * 1000) this.#send([': keep-alive\n\n']);
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
    if (this.#job.stream && this.#job.logprobs === null && events.every(({ type }) => type === 'token')) {
      this.#count(choice, events);
      this.#send([this.#tokenFrame(choice, events)]);
      return;
    }
    const piece: Piece = { text: '', positions: [], finish: null };
    const frames: string[] = [];
    for (const event of events) {
      if (event.type === 'error') {
        this.#fail(new ApiError(event.isBusy ? 429 : 500, event.message));
        return;
      }
      if (event.type === 'progress') frames.push(...this.#progress(event));
      else if (event.type === 'prompt') this.#echo(choice, piece, event.logprobs);
      else if (event.type === 'token') {
        piece.text += event.text;
        if (this.#job.logprobs !== null || this.#job.returnTokenIds)
          piece.positions.push({ token: event.token, logprobs: event.logprobs ?? null });
      } else {
        piece.text += event.text;
        piece.finish = finishedReason(event.finishReason);
      }
    }
    this.#count(choice, events);
    this.#join(choice, piece);
    if (this.#job.stream && (piece.text !== '' || piece.positions.length > 0 || piece.finish))
      frames.push(...choice.format.chunks(piece).flatMap((chunk) => this.#frame([chunk])));
    if (piece.finish) this.#left -= 1;
    if (this.#left > 0) this.#send(frames);
    else this.#end(frames);
  }

  /** One frame for tokens alone, as `chunks` and `#frame` make it. */
  #tokenFrame(choice: Choice, events: readonly HostEvent[]): string {
    const { returnTokenIds } = this.#job;
    choice.parts ??= this.#frameParts(choice);
    const { start, middle, end } = choice.parts;
    let text = '';
    const ids: number[] = [];
    for (const event of events) {
      if (event.type !== 'token') continue;
      text += event.text;
      if (returnTokenIds) ids.push(event.token);
    }
    if (text === '' && !returnTokenIds) return '';
    return `${start}${JSON.stringify(text)}${middle}${ids.join()}${end}`;
  }

  #frameParts({ format }: Choice): FrameParts {
    const positions = this.#job.returnTokenIds ? [{ token: ANY_TOKEN, logprobs: null }] : [];
    const [chunk] = format.chunks({ text: ANY_TEXT, positions, finish: null });
    const [frame] = this.#frame([chunk]);
    const [start, rest] = frame.split(JSON.stringify(ANY_TEXT));
    const [middle, end = ''] = rest.split(String(ANY_TOKEN));
    return { start, middle, end };
  }

  #echo({ format }: Choice, piece: Piece, logprobs: readonly PositionLogprobs[]): void {
    if (!this.#job.echo) return;
    const prompt = format.echo(logprobs);
    piece.text += prompt.text;
    if (this.#job.logprobs !== null || this.#job.returnTokenIds) piece.positions.push(...prompt.positions);
  }

  #join({ all }: Choice, piece: Piece): void {
    all.finish = piece.finish ?? all.finish;
    if (this.#job.stream) return; // already written
    all.text += piece.text;
    all.positions.push(...piece.positions);
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

  #progress({ total, cached, processed }: Extract<HostEvent, { type: 'progress' }>): string[] {
    if (!this.#job.stream || !this.#job.returnProgress) return [];
    const seconds = (performance.now() - this.#startedAt) / 1000;
    const read = processed - cached;
    const left = read > 0 ? Math.round(1000 * (seconds / read) * (total - processed)) / 1000 : null;
    const prompt_progress = { total, cached, processed, seconds_left: left };
    return [`data: ${JSON.stringify({ ...this.#head, choices: [], prompt_progress })}\n\n`];
  }

  #frame(choices: readonly object[], more: object = {}): string[] {
    const usage = this.#job.includeUsage ? { usage: null } : {};
    return [`data: ${JSON.stringify({ ...this.#head, choices, ...usage, ...more })}\n\n`];
  }

  #end(frames: string[]): void {
    const usage = usageOf(this.#usages(), this.#job.n);
    if (this.#job.stream) {
      if (this.#job.includeUsage) frames.push(...this.#frame([], { usage }));
      this.#send([...frames, 'data: [DONE]\n\n'], true);
    } else {
      const choices = this.#choices.map(({ format, all }) => format.whole(all));
      this.#response.setHeader('content-type', 'application/json');
      this.#response.end(JSON.stringify({ ...this.#head, choices, usage }));
    }
  }

  #fail(error: ApiError): void {
    this.cancel();
    if (this.#job.stream) this.#send([`data: ${JSON.stringify(error.body)}\n\n`, 'data: [DONE]\n\n'], true);
    else {
      this.#response.writeHead(error.status, { 'content-type': 'application/json' });
      this.#response.end(JSON.stringify(error.body));
    }
    this.#isOver = true;
  }

  #usages(): RequestUsage[] {
    return this.#choices.flatMap(({ usage }) => (usage ? [usage] : []));
  }

  /** One write per call, none while the client does not read. */
  #send(frames: readonly string[], isLast = false): void {
    if (this.#isOver) return;
    if (isLast) this.#isOver = true;
    if (frames.some((frame) => frame !== '')) this.#wroteAt = performance.now();
    this.#unread.push(...frames);
    this.#unreadBytes += frames.reduce((total, { length }) => total + length, 0);
    if (this.#unreadBytes > MOST_UNREAD) {
      this.#response.destroy(); // `close` follows and cancels
      return;
    }
    this.#flush();
  }

  #flush(): void {
    if (this.#isWaiting || this.#response.destroyed) return;
    const text = this.#unread.join('');
    this.#unread = [];
    this.#unreadBytes = 0;
    if (text !== '') this.#isWaiting = !this.#response.write(text);
    if (this.#isOver && this.#job.stream && !this.#isWaiting && !this.#response.writableEnded) this.#response.end();
  }

  /** The response was sent, or the client is gone: what is still running is cancelled. */
  #finish(): void {
    this.#isOver = true;
    this.cancel();
    const usages = this.#usages();
    this.#resolve({
      usage: usages.length > 0 ? usageOf(usages, this.#job.n) : null,
      finish: this.#choices.map(({ all }) => all.finish ?? 'abort'),
      firstTokenMs: this.#firstTokenMs,
    });
  }
}
