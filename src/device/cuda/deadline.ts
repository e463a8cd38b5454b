/** A limit on a call into a library that blocks this thread and has no limit of its own. */
import { Worker } from 'node:worker_threads';

/** Runs beside the blocked thread; nothing of it can be heard or asked then, so the process ends the hard way. */
const WATCH = `
const { workerData } = require('node:worker_threads');
const { writeSync } = require('node:fs');
const done = new Int32Array(workerData.done);
if (Atomics.wait(done, 0, 0, workerData.ms) === 'timed-out') {
  writeSync(2, workerData.message + '\\n');
  process.kill(process.pid, 'SIGKILL');
}`;

/** Does `work`; after `ms` without an end, prints `message` and kills the process. */
export function withDeadline<T>(ms: number, message: string, work: () => T): T {
  const done = new SharedArrayBuffer(4);
  const worker = new Worker(WATCH, { eval: true, execArgv: [], workerData: { done, ms, message } });
  worker.unref();
  try {
    return work();
  } finally {
    const flag = new Int32Array(done);
    Atomics.store(flag, 0, 1);
    Atomics.notify(flag, 0);
  }
}
