/** A program of a `LimitedWorker` for its test. */
import { workerData } from 'node:worker_threads';
import { TrefoilError, UsageError } from '../errors.js';
import { answerTasks } from '../limited-worker.js';

let count = 0;

answerTasks<string, unknown, string>((task, note) => {
  count += 1;
  if (task === 'count') return count;
  if (task === 'data') return workerData;
  if (task === 'notes') for (const letter of 'ab') note(letter);
  if (task === 'usage') throw new UsageError('a: is wrong');
  if (task === 'expected') throw new TrefoilError('the disk is full');
  if (task === 'defect') throw new RangeError('a defect');
  if (task === 'exit') process.exit(3);
  if (task === 'regexp') return /^(a+)+$/.test(`${'a'.repeat(40)}!`);
  if (task === 'loop') for (;;) count += 0;
  if (task === 'memory') {
    const all: number[][] = [];
    for (;;) all.push(new Array(1000).fill(all.length));
  }
  return task;
});
