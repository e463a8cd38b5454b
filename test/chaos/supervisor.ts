/** Keeps a training going: starts it, watches its lines, starts it again when it ended. What disturbs it is in faults.ts. */
import type { ChildProcess } from 'node:child_process';
import { closeSync, existsSync, openSync, readFileSync } from 'node:fs';
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

  /** `unheard`: a file in place of the pipe of stdout; steps are then counted in the log of the run. */
  constructor(args: readonly string[], env: Record<string, string>, unheard?: { stdout: string; log: string }) {
    if (unheard) this.#child = this.#startUnheard(args, env, unheard);
    else {
      this.#child = startTrefoil(args, env);
      let rest = '';
      this.#child.stdout!.on('data', (chunk) => {
        rest += chunk;
        const lines = rest.split('\n');
        rest = lines.pop()!;
        this.steps += stepsIn(lines);
        this.#onLine();
      });
    }
    this.#child.stderr!.on('data', (chunk) => {
      this.stderr += chunk;
    });
    this.ending = ended(this.#child).then((ending) => {
      this.#isOver = true;
      this.#onLine();
      return ending;
    });
  }

  #startUnheard(
    args: readonly string[],
    env: Record<string, string>,
    { stdout, log }: Record<'stdout' | 'log', string>,
  ) {
    const logged = () => (existsSync(log) ? stepsIn(readFileSync(log, 'utf8').split('\n')) : 0);
    const before = logged();
    const descriptor = openSync(stdout, 'w');
    const child = startTrefoil(args, env, ['ignore', descriptor, 'pipe']);
    closeSync(descriptor);
    const timer = setInterval(() => {
      this.steps = logged() - before;
      this.#onLine();
    }, 50);
    child.once('close', () => clearInterval(timer));
    return child;
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

function stepsIn(lines: readonly string[]): number {
  return lines.filter((line) => /^step \d+ /.test(line)).length;
}

export function pause(milliseconds: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}
