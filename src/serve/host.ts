/**
 * The model behind a server: an engine in this thread (`LocalHost`), or in a worker thread that answers with messages
 * (`WorkerHost`), so that HTTP goes on while a step computes.
 */
import { existsSync } from 'node:fs';
import { isMainThread, type MessagePort, Worker } from 'node:worker_threads';
import { TrefoilError } from '../errors.js';
import { traceText } from '../evaluate/trace.js';
import { writeTrace } from '../evaluate/write-trace.js';
import { createEngine } from '../infer/engine/create.js';
import { type Engine, type EngineOptions, type EngineStats, IDLE_STATS } from '../infer/engine/interface.js';
import { type EngineEvent, type EngineRequest, RequestRefused } from '../infer/engine/request.js';
import type { LoadOptions } from '../infer/load.js';
import { type TextSource, usedVocabulary } from '../infer/text-source.js';
import { kernelOptions } from '../model/kernels.js';
import { type PackedLogprobs, packLogprobs } from './logprobs.js';

/** A request that can be sent to another thread. */
export type HostRequest = Omit<EngineRequest, 'signal' | 'mask'>;

/** An event of a request, or the error that ended it. */
export type HostEvent =
  | Exclude<EngineEvent, { type: 'prompt' }>
  | { readonly type: 'prompt'; readonly logprobs: PackedLogprobs }
  | { readonly type: 'error'; readonly message: string; readonly isBusy: boolean };

/** Facts about the model that the HTTP layer uses. */
export interface ModelInfo {
  /** As `createTokenizer` takes it. */
  readonly tokenizer: string;
  /** Tokens that may be in a prompt are below it. */
  readonly vocabulary: number;
  readonly maxContext: number;
  /** Longest text, prompt included, for which there is memory. */
  readonly maxTokens: number;
  readonly maxBatch: number;
  readonly parameters: number;
}

/** Told when a server starts: the longest requests would only be refused later. */
export function roomWarnings({ maxContext, maxTokens }: Pick<ModelInfo, 'maxContext' | 'maxTokens'>): string[] {
  if (maxTokens >= maxContext) return [];
  return [`memory holds requests of ${maxTokens} of ${maxContext} tokens: lower --max-context, or raise --cache-gb`];
}

/** A text whose trace is to be written to `file`. */
export interface TraceRequest {
  readonly tokens: readonly number[];
  readonly file: string;
  /** The name of the model in the trace. */
  readonly model: string;
}

/** Called with the layers that are done, and how many there are. */
export type TraceProgress = (done: number, layers: number) => void;

/** A model that answers requests. */
export interface ModelHost {
  readonly info: ModelInfo;
  /** Why no request can be answered any more; null while all is well. */
  readonly failure: string | null;
  /** Starts a request. `listener` gets the events of one wake-up at a time. Returns a function that cancels it. */
  submit(request: HostRequest, listener: (events: readonly HostEvent[]) => void): () => void;
  /** Writes the trace of a text in one pass, during which no other request is answered. */
  trace(request: TraceRequest, onProgress: TraceProgress): Promise<void>;
  /** Requests that run and wait now; memory and the prefix cache as of the last events. */
  stats(): EngineStats;
  close(): Promise<void>;
}

/** An engine in this thread. */
export class LocalHost implements ModelHost {
  readonly info: ModelInfo;
  readonly #engine: Engine;
  readonly #source: TextSource;
  /** Events that were not delivered yet. */
  readonly #pending = new Map<(events: readonly HostEvent[]) => void, HostEvent[]>();
  #isScheduled = false;
  readonly #onDelivered: () => void;

  /** `onDelivered` is called after the events of a wake-up went to their listeners. */
  constructor(source: TextSource, options: EngineOptions = {}, onDelivered: () => void = () => {}) {
    this.#engine = createEngine(source, options);
    this.#source = source;
    this.#onDelivered = onDelivered;
    const { model, config } = source;
    this.info = {
      tokenizer: config.data.tokenizer,
      vocabulary: usedVocabulary(source),
      maxContext: this.#engine.maxContext,
      maxTokens: this.#engine.maxTokens,
      maxBatch: this.#engine.maxBatch,
      parameters: model.parameterCount,
    };
  }

  get failure(): string | null {
    return this.#engine.failure;
  }

  submit(request: HostRequest, listener: (events: readonly HostEvent[]) => void): () => void {
    const fail = (error: unknown) => {
      const isBusy = error instanceof RequestRefused && error.reason === 'busy';
      if (!(error instanceof TrefoilError)) console.error(error); // a defect: its details belong to the terminal
      // Only messages that were written for people leave the server.
      const message = error instanceof TrefoilError ? error.message : 'the model failed';
      this.#push(listener, { type: 'error', message, isBusy });
    };
    const sink = {
      push: (event: EngineEvent) =>
        this.#push(
          listener,
          event.type === 'prompt' ? { type: event.type, logprobs: packLogprobs(event.logprobs) } : event,
        ),
      end: (error: unknown = null) => {
        if (error !== null) fail(error);
      },
    };
    try {
      return this.#engine.listen(request, sink);
    } catch (error) {
      fail(error);
      return () => {};
    }
  }

  async trace({ tokens, file, model: name }: TraceRequest, onProgress: TraceProgress): Promise<void> {
    const { model, tokenizer, config } = this.#source;
    const onLayer = (done: number) => onProgress(done, model.shape.nLayers);
    const trace = traceText(model, tokens, kernelOptions(config), onLayer);
    const pieces = tokens.map((token) => tokenizer.decode([token]));
    writeTrace(file, model, trace, { model: name, step: null, pieces });
  }

  /** Prepares for the first request (`Engine.warmUp`). */
  warmUp(): Promise<void> {
    return this.#engine.warmUp();
  }

  stats(): EngineStats {
    return this.#engine.stats();
  }

  close(): Promise<void> {
    return this.#engine.close();
  }

  /** The events of a step are pushed in one go: they are delivered together after it. */
  #push(listener: (events: readonly HostEvent[]) => void, event: HostEvent): void {
    const events = this.#pending.get(listener);
    if (events) events.push(event);
    else this.#pending.set(listener, [event]);
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    queueMicrotask(() => {
      this.#isScheduled = false;
      const all = [...this.#pending];
      this.#pending.clear();
      for (const [to, events] of all) to(events);
      this.#onDelivered();
    });
  }
}

/** Messages to the worker, and from it. */
export type ToWorker =
  /** The prompt is apart: a typed array is copied much faster than an array. */
  | {
      readonly type: 'submit';
      readonly id: number;
      readonly prompt: Int32Array;
      readonly request: Omit<HostRequest, 'prompt'>;
    }
  | { readonly type: 'cancel'; readonly id: number }
  | { readonly type: 'trace'; readonly id: number; readonly request: TraceRequest }
  | { readonly type: 'close' };
export type FromWorker =
  | {
      readonly type: 'ready';
      readonly info: ModelInfo;
      readonly warnings: readonly string[];
      readonly describe: string;
    }
  | { readonly type: 'refused'; readonly message: string; readonly exitCode: number }
  | {
      readonly type: 'events';
      /** Requests that got nothing but tokens: id, token and text of each. Such flat lists are cheap to copy. */
      readonly tokens: readonly (number | string)[];
      readonly events: readonly (readonly [id: number, events: readonly HostEvent[]])[];
      readonly stats: EngineStats;
      readonly failure: string | null;
    }
  | { readonly type: 'tracing'; readonly id: number; readonly done: number; readonly layers: number }
  /** `error` is null if the file was written. */
  | { readonly type: 'traced'; readonly id: number; readonly error: string | null };

/** Settings with which the worker loads a model. */
export interface WorkerSettings {
  readonly model: string;
  readonly device: 'auto' | 'cpu' | 'cuda';
  readonly threads?: number;
  readonly precision?: 'fp32' | 'bf16';
  readonly weights?: LoadOptions['weights'];
  readonly adapter?: string;
  readonly engine: EngineOptions;
}

interface PendingTrace {
  readonly onProgress: TraceProgress;
  /** Without a message the trace was written. */
  readonly end: (error: string | null) => void;
}

/** An engine in a worker thread. */
export class WorkerHost implements ModelHost {
  readonly info: ModelInfo;
  readonly #worker: Worker;
  readonly #listeners = new Map<number, (events: readonly HostEvent[]) => void>();
  readonly #traces = new Map<number, PendingTrace>();
  /** Events that arrived since the last delivery. */
  readonly #arrived = new Map<number, HostEvent[]>();
  #isScheduled = false;
  #stats = IDLE_STATS;
  #failure: string | null = null;
  #lastId = 0;

  /** Loads the model in a new thread. Throws the error of the load. */
  static async start(settings: WorkerSettings, say: (line: string) => void): Promise<WorkerHost> {
    const file = new URL('./model-worker.js', import.meta.url);
    if (!existsSync(file)) throw new Error('the worker of the server is part of the built package: npm run build');
    const worker = new Worker(file, { workerData: settings });
    const first = await new Promise<FromWorker>((resolve, reject) => {
      worker.once('message', resolve);
      worker.once('error', reject);
    });
    if (first.type === 'refused') throw new TrefoilError(first.message, first.exitCode);
    if (first.type !== 'ready') throw new Error(`the worker began with ${first.type}`);
    for (const warning of [...first.warnings, ...roomWarnings(first.info)]) say(`warning: ${warning}`);
    say(first.describe);
    return new WorkerHost(worker, first.info);
  }

  private constructor(worker: Worker, info: ModelInfo) {
    this.#worker = worker;
    this.info = info;
    worker.on('message', (message: FromWorker) => this.#receive(message));
    worker.on('error', (error) => {
      if (!(error instanceof TrefoilError)) console.error(error);
      this.#fail(error instanceof TrefoilError ? error.message : 'the model failed');
    });
    worker.on('exit', () => this.#fail('the model has ended'));
  }

  get failure(): string | null {
    return this.#failure;
  }

  submit(request: HostRequest, listener: (events: readonly HostEvent[]) => void): () => void {
    this.#lastId += 1;
    const id = this.#lastId;
    this.#listeners.set(id, listener);
    const { prompt, ...rest } = request;
    // Copied, not transferred: the first buffer that is detached undoes the compilation of all code on typed arrays.
    this.#send({
      type: 'submit',
      id,
      prompt: prompt instanceof Int32Array ? prompt : new Int32Array(prompt),
      request: rest,
    });
    return () => this.#send({ type: 'cancel', id });
  }

  trace(request: TraceRequest, onProgress: TraceProgress): Promise<void> {
    this.#lastId += 1;
    const id = this.#lastId;
    return new Promise((resolve, reject) => {
      const end = (error: string | null) => (error === null ? resolve() : reject(new TrefoilError(error)));
      this.#traces.set(id, { onProgress, end });
      this.#send({ type: 'trace', id, request });
    });
  }

  /** A request that was submitted since the last message runs from the next step on, if there is a place for it. */
  stats(): EngineStats {
    const { running, waiting } = this.#stats;
    const open = this.#listeners.size;
    const places = waiting > 0 ? 0 : this.info.maxBatch - running;
    const started = Math.min(open, running + Math.min(places, Math.max(0, open - running - waiting)));
    return { ...this.#stats, running: started, waiting: open - started };
  }

  async close(): Promise<void> {
    if (this.#failure !== null) {
      await this.#worker.terminate(); // alive, but its engine takes no request any more
      return;
    }
    await new Promise<void>((resolve) => {
      this.#worker.once('exit', () => resolve());
      this.#send({ type: 'close' });
    });
  }

  #send(message: ToWorker): void {
    this.#worker.postMessage(message);
  }

  #receive(message: FromWorker): void {
    if (message.type === 'tracing') this.#traces.get(message.id)?.onProgress(message.done, message.layers);
    if (message.type === 'traced') {
      this.#traces.get(message.id)?.end(message.error);
      this.#traces.delete(message.id);
    }
    if (message.type !== 'events') return;
    this.#stats = message.stats;
    this.#failure ??= message.failure;
    const { tokens, events } = message;
    for (let i = 0; i < tokens.length; i += 3)
      this.#add(tokens[i] as number, { type: 'token', token: tokens[i + 1] as number, text: tokens[i + 2] as string });
    for (const [id, all] of events) for (const event of all) this.#add(id, event);
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    // After all messages that are there: a server that is slower than the model writes several tokens at once.
    setImmediate(() => this.#deliver());
  }

  #add(id: number, event: HostEvent): void {
    const events = this.#arrived.get(id);
    if (events) events.push(event);
    else this.#arrived.set(id, [event]);
  }

  #deliver(): void {
    this.#isScheduled = false;
    const arrived = [...this.#arrived];
    this.#arrived.clear();
    for (const [id, events] of arrived) {
      const listener = this.#listeners.get(id);
      const last = events[events.length - 1];
      if (last.type === 'end' || last.type === 'error') this.#listeners.delete(id);
      listener?.(events);
    }
  }

  #fail(message: string): void {
    this.#failure ??= message;
    this.#deliver();
    const listeners = [...this.#listeners.values()];
    this.#listeners.clear();
    for (const { end } of this.#traces.values()) end(message);
    this.#traces.clear();
    for (const listener of listeners) listener([{ type: 'error', message, isBusy: false }]);
  }
}

/** Runs an engine for the thread at the other end of `port`, until it says `close`. */
export async function serveThread(
  port: MessagePort,
  source: TextSource,
  engine: EngineOptions,
  ready: Omit<Extract<FromWorker, { type: 'ready' }>, 'type' | 'info'>,
): Promise<void> {
  if (isMainThread) throw new Error('serveThread runs in a worker');
  let tokens: (number | string)[] = [];
  let others: [number, readonly HostEvent[]][] = [];
  const send = (message: FromWorker) => port.postMessage(message);
  const host = new LocalHost(source, engine, () => {
    send({ type: 'events', tokens, events: others, stats: host.stats(), failure: host.failure });
    tokens = [];
    others = [];
  });
  await host.warmUp();
  const cancels = new Map<number, () => void>();
  port.on('message', (message: ToWorker) => {
    if (message.type === 'cancel') cancels.get(message.id)?.();
    else if (message.type === 'submit') {
      const { id, request } = message;
      const cancel = host.submit({ ...request, prompt: message.prompt }, (events) => {
        const plain = events.flatMap((event) =>
          event.type === 'token' && !event.logprobs ? [id, event.token, event.text] : [],
        );
        if (plain.length === 3 * events.length) tokens.push(...plain);
        else others.push([id, events]);
        const last = events[events.length - 1];
        if (last.type === 'end' || last.type === 'error') cancels.delete(id);
      });
      cancels.set(id, cancel);
    } else if (message.type === 'trace') {
      const { id, request } = message;
      const progress: TraceProgress = (done, layers) => send({ type: 'tracing', id, done, layers });
      host.trace(request, progress).then(
        () => send({ type: 'traced', id, error: null }),
        (error: unknown) => {
          if (!(error instanceof TrefoilError)) console.error(error); // a defect: its details belong to the terminal
          send({ type: 'traced', id, error: error instanceof TrefoilError ? error.message : 'the model failed' });
        },
      );
    } else
      void host.close().then(() => {
        source.model.free();
        port.close();
      });
  });
  send({ type: 'ready', info: host.info, ...ready });
}
