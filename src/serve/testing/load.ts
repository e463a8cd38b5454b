/** A load that runs beside an attack on a server, in a thread of its own. */
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { Worker } from 'node:worker_threads';
import { workerFile } from '../../worker-file.js';

export interface LoadReport {
  /** Streams that were read to their end. */
  readonly streams: number;
  /** Answers of `/health`, and the longest time of one [ms]. */
  readonly checks: number;
  readonly worst: number;
  /** The most that the server's HTTP thread computed in the time of a check [ms]: that of a check with a core of its own. */
  readonly worstOwn: number;
  /** The first few. */
  readonly failures: readonly string[];
}

/** Runs `attack` while the server at `url`, the process `pid`, answers streams and `/health`. */
export async function underLoad<Result>(
  { url, name: model, child: { pid } }: { url: string; name: string; child: { pid?: number | undefined } },
  attack: () => Promise<Result>,
): Promise<{ result: Result; load: LoadReport }> {
  const file = await workerFile(new URL('./load-program.js', import.meta.url));
  const worker = new Worker(file, { workerData: { url, model, pid } });
  try {
    await new Promise((resolve) => setTimeout(resolve, 300));
    const result = await attack();
    worker.postMessage('stop');
    const [load] = (await once(worker, 'message')) as [LoadReport];
    return { result, load };
  } finally {
    await worker.terminate();
  }
}

/** Resident memory of a process [MiB]. */
export function residentMiB(pid: number): number {
  return Number(/^VmRSS:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1]) / 1024;
}
