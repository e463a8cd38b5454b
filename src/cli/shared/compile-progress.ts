/** Reports the compilation of kernels on stderr: a live line on a terminal, a line every few seconds elsewhere. */
import { Worker } from 'node:worker_threads';
import type { CompileProgress } from '../../device/kernel-cache.js';
import { LiveLine } from '../../live-line.js';
import type { Stream } from './io.js';

export class CompileProgressLine implements CompileProgress {
  readonly #line: LiveLine;
  readonly #stream: Stream & { readonly fd?: number };
  #stopSeconds: (() => void) | null = null;

  constructor(stream: Stream, clock?: () => number) {
    this.#stream = stream;
    this.#line = new LiveLine(stream, { everyMs: 10_000, isEager: true, ...(clock && { clock }) });
  }

  begin(kernel: string, compiled: number, total: number | null): void {
    const count = total === null ? `${compiled + 1}` : `${compiled + 1} of at most ${total}`;
    const text = `compiling kernels, once per machine: ${count} (${kernel})`;
    this.#stopSeconds?.();
    this.#line.show(text);
    if (this.#line.isLive && this.#stream.fd !== undefined)
      this.#stopSeconds = showSeconds(text, this.#stream.fd, this.#stream.columns || 80);
  }

  /** Other output may follow, so the line is cleared after each kernel. */
  end(): void {
    this.#stopSeconds?.();
    this.#stopSeconds = null;
    this.#line.clear();
  }
}

/** `cell`: 0 = asked to stop, 1 = is writing. */
const SECONDS = `
  const { writeSync } = require('node:fs');
  const { text, fd, columns, cell } = require('node:worker_threads').workerData;
  for (let seconds = 1; Atomics.wait(cell, 0, 0, 1000) === 'timed-out'; seconds++) {
    Atomics.store(cell, 1, 1);
    const end = ', ' + seconds + ' s';
    if (Atomics.load(cell, 0) === 0) writeSync(fd, '\\r\\x1b[K' + text.slice(0, columns - 1 - end.length) + end);
    Atomics.store(cell, 1, 0);
    Atomics.notify(cell, 1);
  }`;

/**
 * Counts seconds behind the line from a thread: this one waits for the compiler, which takes up to ten seconds for one
 * kernel. Returns how to stop; nothing is written after that.
 */
function showSeconds(text: string, fd: number, columns: number): () => void {
  const cell = new Int32Array(new SharedArrayBuffer(8));
  new Worker(SECONDS, { eval: true, execArgv: [], workerData: { text, fd, columns, cell } }).unref();
  return () => {
    Atomics.store(cell, 0, 1);
    Atomics.notify(cell, 0);
    Atomics.wait(cell, 1, 1, 1000);
  };
}
