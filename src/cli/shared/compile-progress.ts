/** Reports the compilation of kernels on stderr: a live line on a terminal, a line every few seconds elsewhere. */
import type { CompileProgress } from '../../device/kernel-cache.js';
import type { Stream } from './io.js';

const TERMINAL_WIDTH = 80;
const EVERY_MS = 10_000;

export class CompileProgressLine implements CompileProgress {
  readonly #stream: Stream;
  readonly #clock: () => number;
  #reported = Number.NEGATIVE_INFINITY;

  constructor(stream: Stream, clock: () => number = () => performance.now()) {
    this.#stream = stream;
    this.#clock = clock;
  }

  begin(kernel: string, compiled: number, total: number | null): void {
    const count = total === null ? `${compiled + 1}` : `${compiled + 1} of at most ${total}`;
    const text = `compiling kernels, once per machine: ${count} (${kernel})`;
    if (this.#stream.isTTY) {
      const { columns = TERMINAL_WIDTH } = this.#stream as { columns?: number };
      this.#stream.write(`\r\x1b[K${text.slice(0, columns - 1)}`);
    } else if (this.#clock() - this.#reported >= EVERY_MS) {
      this.#reported = this.#clock();
      this.#stream.write(`${text}\n`);
    }
  }

  /** Other output may follow, so the line is cleared after each kernel. */
  end(): void {
    if (this.#stream.isTTY) this.#stream.write('\r\x1b[K');
  }
}
