/**
 * Reads the bodies of requests. Nothing that a body holds may keep the HTTP thread busy: there only short bodies and lists of
 * tokens are read, whose time is known. All others are read in a thread with limits of time and memory: large ones, chats and
 * texts for a foreign tokenizer, which are read by programs of the model's author, and schemas.
 */
import { isBuiltInTokenizer } from '../data/tokenizers/built-in.js';
import { type ErrorDetail, HttpError, tooBusy } from '../http/error.js';
import { LimitExceeded, LimitedWorker } from '../limited-worker.js';
import { parseBody } from './body.js';
import type { ModelInfo } from './host.js';
import { type Job, LONG_TEXT, type OnAccepted, PARSERS, type ParsedValues, type ServedModel } from './protocol.js';

/** Bodies up to this size are read at once unless they hold what may take long [bytes]. */
const QUICK_BODY = 2 ** 15;
/** The same for bodies that are a list of tokens but for `QUICK_BODY` bytes. */
const QUICK_TOKENS = 2 ** 21;
const SECONDS = 10;
const MEBIBYTES = 512;
const IDLE_SECONDS = 600;
/** Bodies that may wait for the thread. */
const MAX_TASKS = 64;

type Kind = keyof ParsedValues;

/** Settings of the thread. */
export interface ReaderSettings {
  readonly id: string;
  readonly info: ModelInfo;
  readonly chatTemplate?: string;
}

/** A body for the thread. */
export interface ReadTask {
  readonly kind: Kind;
  readonly body: Uint8Array;
}

/** The answer of the thread to a body. */
export type ReadAnswer =
  | { readonly value: ParsedValues[Kind] }
  | { readonly refused: { readonly status: number; readonly message: string; readonly detail: ErrorDetail } };

export class RequestReader {
  readonly #model: ServedModel;
  readonly #worker: LimitedWorker<ReadTask, ReadAnswer, Job>;
  readonly #isForeign: boolean;

  constructor(model: ServedModel, chatTemplate: string | undefined) {
    const { id, info } = model;
    const data: ReaderSettings = { id, info, ...(chatTemplate === undefined ? {} : { chatTemplate }) };
    const program = new URL('./request-worker.js', import.meta.url);
    const limits = { seconds: SECONDS, mebibytes: MEBIBYTES, idleSeconds: IDLE_SECONDS };
    this.#model = model;
    this.#worker = new LimitedWorker({ program, data, ...limits });
    this.#isForeign = !isBuiltInTokenizer(info.tokenizer);
  }

  /** Throws an `HttpError` that says what is wrong with the body. `bytes` are read or copied before this returns. */
  async read<K extends Kind>(kind: K, bytes: Buffer, onAccepted: OnAccepted = () => {}): Promise<ParsedValues[K]> {
    const body = parseBody(bytes, QUICK_BODY, QUICK_TOKENS);
    if (body !== undefined && this.#isQuick(body)) return PARSERS[kind](body, this.#model, onAccepted);
    if (this.#worker.tasks >= MAX_TASKS)
      throw tooBusy('too many large requests are being read: try again later', 'too_many_large_requests');
    let refusal: unknown = null;
    const accept = (job: Job) => {
      try {
        onAccepted(job);
      } catch (error) {
        refusal = error;
      }
    };
    const answer = await this.#worker.run({ kind, body: new Uint8Array(bytes) }, accept).catch((error: unknown) => {
      if (!(error instanceof LimitExceeded)) throw error;
      throw new HttpError(400, `the request cannot be read: ${error.message}`, { code: 'request_too_expensive' });
    });
    if (refusal !== null) throw refusal;
    if ('value' in answer) return answer.value as ParsedValues[K];
    throw new HttpError(answer.refused.status, answer.refused.message, answer.refused.detail);
  }

  close(): void {
    void this.#worker.close();
  }

  /** Whether the body holds neither a chat nor a schema nor more than a short text. */
  #isQuick(body: unknown): boolean {
    if (typeof body !== 'object' || body === null) return true; // refused
    if (['messages', 'input', 'response_format'].some((name) => name in body)) return false;
    const { prompt } = body as { readonly prompt?: unknown };
    if (typeof prompt === 'string') return !this.#isForeign && prompt.length <= LONG_TEXT;
    const isTexts = Array.isArray(prompt) && prompt.some((one) => typeof one === 'string');
    return !isTexts;
  }
}
