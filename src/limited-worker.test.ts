import { afterEach, describe, expect, it } from 'vitest';
import { TrefoilError, UsageError } from './errors.js';
import { LimitExceeded, LimitedWorker } from './limited-worker.js';

const program = new URL('./testing/limited-program.js', import.meta.url);
let worker: LimitedWorker<string, unknown, string>;
const open = (seconds = 60, more: object = {}) => {
  worker = new LimitedWorker({ program, seconds, mebibytes: 64, data: 'given', ...more });
  return worker;
};

afterEach(() => worker.close());

describe('a limited worker', () => {
  it('answers tasks in their order, with notes, data and the classes of errors', async () => {
    const { run } = open();
    const call = run.bind(worker);
    expect(await Promise.all(['count', 'count', 'count'].map((task) => call(task)))).toEqual([1, 2, 3]);
    expect(await call('data')).toBe('given');
    const notes: string[] = [];
    await call('notes', (note) => notes.push(note));
    expect(notes).toEqual(['a', 'b']);
    await expect(call('usage')).rejects.toThrow(new UsageError('a: is wrong'));
    await expect(call('expected')).rejects.toThrow(new TrefoilError('the disk is full'));
    await expect(call('defect')).rejects.toThrow(/RangeError: a defect/);
    expect(await call('count')).toBe(9); // still the same thread
  });

  it.each(['loop', 'regexp'])('ends a task over its time, and answers the next one: %s', async (task) => {
    open(0.3);
    const [late, next] = [worker.run(task), worker.run('count')];
    await expect(late).rejects.toThrow('it takes more than 0.3 s');
    await expect(late).rejects.toBeInstanceOf(LimitExceeded);
    expect(await next).toBe(1); // a new thread
  });

  it('ends a task over its memory, and one that ends the thread', async () => {
    open();
    const [large, next] = [worker.run('memory'), worker.run('count')];
    await expect(large).rejects.toThrow('it needs more than 64 MiB');
    expect(await next).toBe(1);
    await expect(worker.run('exit')).rejects.toThrow('the thread ended before its task');
    expect(await worker.run('count')).toBe(1);
  });

  it('ends its thread when it is idle, and its tasks when it is closed', async () => {
    open(60, { idleSeconds: 0.05 });
    expect(await worker.run('count')).toBe(1);
    await expect.poll(() => worker.run('count').then((count) => new Promise((resolve) => setTimeout(resolve, 200, count)))).toBe(1); // biome-ignore format: one line
    const late = expect(worker.run('loop')).rejects.toThrow('the worker was closed');
    await worker.close();
    await late;
    await expect(worker.run('count')).rejects.toThrow('the worker was closed');
  });
});
