/** Live traces for the reader view: the model goes through a text once, and what it read can be asked for by token and block. */
import { randomUUID } from 'node:crypto';
import { mkdtempSync, rmSync } from 'node:fs';
import type { ServerResponse } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { TrefoilError, UsageError } from '../errors.js';
import { TraceFile } from '../evaluate/trace-file.js';
import { asHttpError, HttpError, tooBusy } from '../http/error.js';
import { EventStream, eventFrame } from '../http/event-stream.js';
import type { ModelHost } from './host.js';

/** Traces that are kept; the oldest one is dropped. */
const MAX_TRACES = 4;

export class Readings {
  readonly #host: ModelHost;
  readonly #model: string;
  readonly #traces = new Map<string, TraceFile>();
  #isReading = false;

  /** `model`: its name in the API. */
  constructor(host: ModelHost, model: string) {
    this.#host = host;
    this.#model = model;
  }

  /** Streams the progress by layers as events, then the id of the trace. */
  async stream(tokens: readonly number[], response: ServerResponse): Promise<void> {
    if (this.#isReading) throw tooBusy('the model is reading another text: try again later', 'reader_busy');
    this.#isReading = true;
    const stream = new EventStream(response);
    const send = (value: object) => stream.send(eventFrame(JSON.stringify(value)));
    send({ progress: { done: 0, layers: null } });
    try {
      const trace = await this.#read(tokens, (done, layers) => send({ progress: { done, layers } }));
      send({ trace, tokens: tokens.length });
    } catch (error) {
      // Most messages of the model are about the text or the model, such as dense attention.
      send((error instanceof TrefoilError ? new HttpError(400, error.message) : asHttpError(error)).body);
    } finally {
      this.#isReading = false;
      stream.end();
    }
  }

  /** The answer to `ID`, `ID/token/I` or `ID/block/B`. */
  answer([id = '', ...rest]: readonly string[]): object {
    try {
      const answer = this.#traces.get(id)?.answer(rest);
      if (answer !== undefined) return answer;
    } catch (error) {
      if (error instanceof UsageError) throw new HttpError(400, error.message);
      throw error;
    }
    throw new HttpError(404, 'there is no such trace; only the last few are kept', { code: 'unknown_trace' });
  }

  close(): void {
    for (const file of this.#traces.values()) file.close();
    this.#traces.clear();
  }

  async #read(tokens: readonly number[], onProgress: (done: number, layers: number) => void): Promise<string> {
    const folder = mkdtempSync(join(tmpdir(), 'trefoil-trace-'));
    try {
      const file = join(folder, 'trace.safetensors');
      await this.#host.trace({ tokens, file, model: this.#model }, onProgress);
      const id = randomUUID();
      this.#traces.set(id, new TraceFile(file));
      const [oldest] = this.#traces;
      if (this.#traces.size > MAX_TRACES) {
        oldest[1].close();
        this.#traces.delete(oldest[0]);
      }
      return id;
    } finally {
      // The open file stays readable, and nothing of the text is left when the process ends.
      rmSync(folder, { recursive: true, force: true });
    }
  }
}
