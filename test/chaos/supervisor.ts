/** Keeps a training going: starts it, watches its lines, starts it again when it ended. What disturbs it is in faults.ts. */
import type { ChildProcess } from 'node:child_process';
import { ended, startTrefoil } from '../../src/testing/cli.js';

export interface Ending {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
}

/** Longer than anything a healthy training does between two lines. */
const PATIENCE_MS = 600_000;

/** One life of the trainer. */
export class Life {
  readonly #child: ChildProcess;
  readonly ending: Promise<Ending>;
  /** Steps it has printed. */
  steps = 0;
  stderr = '';
  #isOver = false;
  #onLine = () => {};

  constructor(args: readonly string[], env: Record<string, string>) {
    this.#child = startTrefoil(args, env);
    let rest = '';
    this.#child.stdout!.on('data', (chunk) => {
      rest += chunk;
      const lines = rest.split('\n');
      rest = lines.pop()!;
      this.steps += lines.filter((line) => /^step \d+ /.test(line)).length;
      this.#onLine();
    });
    this.#child.stderr!.on('data', (chunk) => {
      this.stderr += chunk;
    });
    this.ending = ended(this.#child).then((ending) => {
      this.#isOver = true;
      this.#onLine();
      return ending;
    });
  }

  get isOver(): boolean {
    return this.#isOver;
  }

  send(signal: NodeJS.Signals): void {
    this.#child.kill(signal);
  }

  /** At most this many milliseconds, and not beyond its first step: a fast machine must not train for the rest. */
  async starting(milliseconds: number): Promise<void> {
    await Promise.race([pause(milliseconds), this.progress(1)]);
  }

  /** Until it has done `steps` steps, or has ended. */
  async progress(steps: number): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      const timer = setTimeout(() => {
        reject(
          new Error(`no step ${steps} of this life within ${PATIENCE_MS} ms (${this.steps} so far)\n${this.stderr}`),
        );
      }, PATIENCE_MS);
      this.#onLine = () => {
        if (this.steps < steps && !this.#isOver) return;
        clearTimeout(timer);
        resolve();
      };
      this.#onLine();
    });
  }
}

export function pause(milliseconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
