/** The worker of log-thread.ts: encodes records and writes them into files that the training thread has opened. */
import { openSync } from 'node:fs';
import { parentPort, workerData } from 'node:worker_threads';
import { encodeRecord, type LogFormat, openSink } from './log.js';
import { type LogTask, type LogWorkerData, WORDS } from './log-tasks.js';

const { shared, problems } = workerData as LogWorkerData;
const words = new Int32Array(shared);
const onProblem = (message: string): void => problems.postMessage(message);
const files = new Map<number, { readonly sink: ReturnType<typeof openSink>; readonly format: LogFormat }>();

/** In Deno a descriptor is valid only on the thread that opened it. */
const isPerThread = 'Deno' in globalThis;

function perform(task: LogTask): void {
  if (task.kind === 'open') {
    const { opened, format } = task;
    const { path } = opened;
    const descriptor = isPerThread ? openSync(path, format.kind === 'section' ? 'r+' : 'a+') : opened.descriptor;
    files.set(task.file, { sink: openSink({ path, descriptor }, format, { onProblem }), format });
    return;
  }
  const file = files.get(task.file);
  if (file === undefined) throw new Error(`no log file ${task.file} is open`);
  const { sink, format } = file;
  if (task.kind === 'write') {
    sink.write(encodeRecord(format, task.record, task.at));
    Atomics.sub(words, WORDS.queued, 1);
  } else if (task.kind === 'close') {
    sink.close();
    files.delete(task.file);
  } else Atomics.store(words, WORDS.flushed, Number(sink.flush()));
  Atomics.store(words, WORDS.drops + task.file, sink.drops);
}

parentPort!.on('message', (task: LogTask) => {
  perform(task);
  Atomics.add(words, WORDS.done, 1);
  Atomics.notify(words, WORDS.done);
});
