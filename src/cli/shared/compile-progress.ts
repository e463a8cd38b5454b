/** Reports the compilation of kernels on stderr: a live line on a terminal, a line every few seconds elsewhere. */
import type { CompileProgress } from '../../device/kernel-cache.js';
import { LiveLine } from '../../live-line.js';
import type { Stream } from './io.js';

export class CompileProgressLine implements CompileProgress {
  readonly #line: LiveLine;

  constructor(stream: Stream, clock?: () => number) {
    this.#line = new LiveLine(stream, { everyMs: 10_000, isEager: true, ...(clock && { clock }) });
  }

  begin(kernel: string, compiled: number, total: number | null): void {
    const count = total === null ? `${compiled + 1}` : `${compiled + 1} of at most ${total}`;
    this.#line.show(`compiling kernels, once per machine: ${count} (${kernel})`);
  }

  /** Other output may follow, so the line is cleared after each kernel. */
  end(): void {
    this.#line.clear();
  }
}
