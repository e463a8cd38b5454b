/** The worker of log-thread.ts: writes records into files whose descriptors the training thread has opened. */
import { openSync } from 'node:fs';
import { parentPort, workerData } from 'node:worker_threads';
import { AppendFile, InPlaceFile, Sink } from './log-file.js';
import { type LogTask, type LogWorkerData, WORDS } from './log-tasks.js';

const { shared, problems } = workerData as LogWorkerData;
const words = new Int32Array(shared);
const onProblem = (message: string): void => problems.postMessage(message);
const files = new Map<number, Sink | InPlaceFile>();

/** In Deno a descriptor is valid only on the thread that opened it. */
const isPerThread = 'Deno' in globalThis;

function perform(task: LogTask): void {
  if (task.kind === 'open') {
    const { path } = task;
    const descriptor = isPerThread ? openSync(path, task.mode === 'append' ? 'a+' : 'r+') : task.descriptor;
    const target = task.mode === 'append' ? new Sink(new AppendFile(path, descriptor), { onProblem }) : null;
    files.set(task.file, target ?? new InPlaceFile(path, descriptor, onProblem));
    return;
  }
  const file = files.get(task.file);
  if (file === undefined) throw new Error(`no log file ${task.file} is open`);
  if (task.kind === 'write') {
    file.write(task.bytes);
    Atomics.sub(words, WORDS.queuedRecords, 1);
    Atomics.sub(words, WORDS.queuedBytes, task.bytes.length);
  } else if (task.kind === 'close') {
    file.close();
    files.delete(task.file);
  } else Atomics.store(words, WORDS.flushed, Number(file.flush()));
  Atomics.store(words, WORDS.drops + task.file, file.drops);
}

parentPort!.on('message', (task: LogTask) => {
  perform(task);
  Atomics.add(words, WORDS.done, 1);
  Atomics.notify(words, WORDS.done);
});
