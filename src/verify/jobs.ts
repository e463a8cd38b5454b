/**
 * Checks in several processes at once. On a GPU most of the time of `verify` is one thread of the host that compiles kernels
 * for one shape after the other and computes references.
 */
import { type ChildProcess, fork } from 'node:child_process';
import { existsSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { fileURLToPath } from 'node:url';
import type { Device } from '../device/device.js';
import { unfinishedRow, type VerifyCheck, type VerifyRow } from './check.js';
import type { FromJob, JobOptions, ToJob } from './job.js';

const JOB = new URL('./job.js', import.meta.url);
const MAX_JOBS = 16;
/** GPU memory of a job: the largest check of `--full`, with a context of the driver. */
const BYTES_OF_A_JOB = 9 * 2 ** 30;

/** Processes that check this device by default: one on a CPU, whose kernels use all cores. */
export function defaultJobs(device: Device): number {
  // Trefoil that runs from its TypeScript sources has no compiled program for a process.
  if (device.kind === 'cpu' || !existsSync(JOB)) return 1;
  const total = 'totalBytes' in device ? Number(device.totalBytes) : 0;
  return Math.max(1, Math.min(MAX_JOBS, availableParallelism(), Math.floor(total / BYTES_OF_A_JOB)));
}

/**
 * The rows of `checks`, in their order, computed by `jobs` processes. `checks` are those of `checksFor` with the same options;
 * every process makes its own. Calls `onRow` after each check. A process that dies fails the check it was at.
 */
export async function verifyInProcesses(
  checks: readonly VerifyCheck[],
  jobs: number,
  options: JobOptions,
  onRow: (row: VerifyRow, done: number) => void = () => {},
): Promise<VerifyRow[]> {
  const rows: VerifyRow[] = [];
  // From the end, where the longest ones are: what is left for the last process is then short.
  const waiting = [...checks.keys()];
  let done = 0;
  const finish = (index: number, row: VerifyRow) => {
    rows[index] = row;
    done += 1;
    onRow(row, done);
  };
  const work = async () => {
    const process = new Job();
    let index = waiting.pop();
    try {
      await process.ask(options);
      for (; index !== undefined; index = waiting.pop()) finish(index, (await process.ask(index)) as VerifyRow);
    } catch (error) {
      if (index !== undefined) finish(index, unfinishedRow(checks[index], options.device, (error as Error).message));
    } finally {
      process.end();
    }
  };
  // A process that died is replaced; each replacement has finished a check, so this ends.
  while (waiting.length > 0) await Promise.all(Array.from({ length: Math.min(jobs, waiting.length) }, work));
  return rows;
}

class Job {
  readonly #child: ChildProcess;
  readonly #ended: Promise<never>;

  constructor() {
    this.#child = fork(fileURLToPath(JOB), [], { stdio: ['ignore', 'ignore', 'inherit', 'ipc'] });
    this.#ended = new Promise((_, reject) => {
      this.#child.once('error', reject);
      this.#child.once('exit', (code, signal) =>
        reject(new Error(`its process ended with ${signal ?? `code ${code}`}`)),
      );
    });
    this.#ended.catch(() => {}); // also if nothing is asked any more
  }

  ask(message: ToJob): Promise<FromJob> {
    const answer = new Promise<FromJob>((resolve, reject) => {
      this.#child.once('message', resolve);
      this.#child.send(message, (error) => error && reject(error));
    });
    return Promise.race([answer, this.#ended]);
  }

  end(): void {
    if (this.#child.connected) this.#child.disconnect();
  }
}
