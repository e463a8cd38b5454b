/** Runs hostile cases in a process that is ended when one hangs. */
import { type ChildProcess, fork } from 'node:child_process';
import { once } from 'node:events';
import { dirname } from 'node:path';
import { fileURLToPath } from 'node:url';
import { trefoilMain } from '../../src/testing/cli.js';
import { cpuSeconds, procAbsence } from '../../src/testing/cpu-time.js';

interface Answer {
  readonly code: number | string | null;
  readonly stdout: string;
  readonly stderr: string;
  readonly cpu: number;
  readonly seconds: number;
}

/** How a case ended. */
export type Ending = 'works' | 'one line' | 'hangs' | 'dies' | 'wrong';

export interface Verdict {
  readonly ending: Ending;
  /** Processor seconds of the longest command. */
  readonly seconds: number;
  /** The reason of a bad ending. */
  readonly detail: string;
}

/** Limit of processor time; a machine whose cores are all busy needs more of the clock's. */
const LIMIT_S = 2;
/** A process hangs if it has used this much processor time, */
const HANG_CPU_S = 30;
/** or none in this time of the clock. */
const IDLE_MS = 30_000;
const LOOK_MS = 500;

/** Starts the process anew after each that had to be ended. */
export class Victim {
  #child: ChildProcess | null = null;
  /** The program: `TREFOIL_DIST`, or the built one. */
  readonly #dist = process.env['TREFOIL_DIST'] ?? dirname(dirname(trefoilMain()));

  /** Every command must end with 0, or with one clean line; `secret` must not be in the output. */
  async judge(lines: readonly (readonly string[])[], secret: string): Promise<Verdict> {
    const answers = await this.#run(lines);
    if (typeof answers === 'string') return { ending: answers, seconds: HANG_CPU_S, detail: answers };
    const seconds = Math.max(...answers.map(({ cpu }) => cpu));
    for (const [i, { code, stdout, stderr }] of answers.entries()) {
      // The text that a model writes is passed on as it is.
      const shown = lines[i][0] === 'generate' ? stderr : stdout + stderr;
      const problem = problemOf(code, shown, stderr, secret);
      if (problem) return { ending: 'wrong', seconds, detail: `${problem}: ${JSON.stringify(stderr.slice(0, 300))}` };
    }
    if (seconds > LIMIT_S) return { ending: 'hangs', seconds, detail: `${seconds.toFixed(1)} s` };
    return { ending: answers.every(({ code }) => code === 0) ? 'works' : 'one line', seconds, detail: '' };
  }

  async #run(lines: readonly (readonly string[])[]): Promise<readonly Answer[] | 'hangs' | 'dies'> {
    if (!this.#child) {
      const program = fileURLToPath(new URL('child.mjs', import.meta.url));
      this.#child = fork(program, [this.#dist], { execArgv: ['--max-old-space-size=2048'], stdio: 'ignore' });
      await once(this.#child, 'message');
    }
    const child = this.#child;
    let timer: NodeJS.Timeout | undefined;
    const hang = new Promise<'hangs'>((resolve) => {
      const cpuOf = () => (procAbsence ? performance.now() / 1000 : cpuSeconds(child.pid!));
      const begin = cpuOf();
      let [used, movedAt] = [begin, performance.now()];
      timer = setInterval(() => {
        if (child.exitCode !== null || child.signalCode !== null) return;
        const now = cpuOf();
        if (now > used) [used, movedAt] = [now, performance.now()];
        if (used - begin > HANG_CPU_S || performance.now() - movedAt > IDLE_MS) resolve('hangs');
      }, LOOK_MS);
    });
    const over = new AbortController();
    const gone = once(child, 'exit', { signal: over.signal }).then(() => 'dies' as const);
    const answered = once(child, 'message', { signal: over.signal }).then(([value]) => value as Answer[]);
    for (const promise of [gone, answered]) promise.catch(() => {}); // the slower one is aborted
    child.send({ lines, env: {} });
    const result = await Promise.race([answered, gone, hang]);
    over.abort();
    clearInterval(timer);
    if (typeof result === 'string') this.close();
    return result;
  }

  close(): void {
    this.#child?.kill('SIGKILL');
    this.#child = null;
  }
}

function problemOf(code: Answer['code'], output: string, stderr: string, secret: string): string | null {
  if (output.includes(secret)) return 'shows a file of the user';
  if (/[^\P{Cc}\n\t]/u.test(output)) return 'control characters';
  if (code === 0) return null;
  if (typeof code !== 'number') return `${code}`;
  if (stderr.includes('internal error')) return 'internal error';
  if (stderr.length > 3000) return `${stderr.length} characters`;
  const lines = stderr
    .trimEnd()
    .split('\n')
    .filter((line) => line.startsWith('trefoil: '));
  if (code !== 1 && (lines.length !== 1 || !stderr.trimEnd().endsWith(lines[0]))) return 'not one line';
  return null;
}

/** The table by class: | class | cases | work | one line | neither | slowest | */
export function table(verdicts: readonly (Verdict & { readonly kind: string })[]): string {
  const kinds = [...new Set(verdicts.map(({ kind }) => kind))];
  const rows = kinds.map((kind) => {
    const own = verdicts.filter((one) => one.kind === kind);
    const count = (...endings: Ending[]) => own.filter(({ ending }) => endings.includes(ending)).length;
    const slowest = Math.max(...own.map(({ seconds }) => seconds)).toFixed(1);
    return `| ${[kind, own.length, count('works'), count('one line'), count('hangs'), count('dies'), count('wrong'), `${slowest} s`].join(' | ')} |`;
  });
  return [
    '| class | folders | work | one line | hang | die | wrong | slowest |',
    '|---|---|---|---|---|---|---|---|',
    ...rows,
  ].join('\n');
}
