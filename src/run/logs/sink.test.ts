import { expect, test } from 'vitest';
import { Sink, type SinkTarget } from './log-file.js';

/** A target that fails on demand, with a clock that the test moves. */
class Target implements SinkTarget {
  readonly path = '/run/log';
  content = '';
  appends = 0;
  closed = false;
  failure: Error | undefined;
  time = 0;
  readonly now = (): number => this.time;

  append(bytes: Uint8Array): void {
    this.appends++;
    if (this.failure) throw this.failure;
    this.content += Buffer.from(bytes).toString();
  }

  sync(): void {
    if (this.failure) throw this.failure;
  }

  close(): void {
    this.closed = true;
  }
}

function record(text: string): Uint8Array {
  return Buffer.from(`${text}\n`);
}

test('a working target gets each record immediately', () => {
  const target = new Target();
  const sink = new Sink(target, { now: target.now });
  sink.write(record('a'));
  expect(target.content).toBe('a\n');
  sink.write(record('b'));
  expect([target.content, target.appends, sink.drops]).toEqual(['a\nb\n', 2, 0]);
  expect(sink.flush()).toBe(true);
});

test('records of an outage are written in order when it is over, with one message at each end', () => {
  const target = new Target();
  const problems: string[] = [];
  const sink = new Sink(target, { now: target.now, onProblem: (text) => problems.push(text) });
  target.failure = new Error('/run/log: cannot append: no space left');
  for (let i = 0; i < 100; i++) sink.write(record(`r${i}`));
  expect(target.appends).toBe(1);
  expect(problems).toHaveLength(1);
  target.time += 1_000;
  sink.write(record('still failing'));
  expect(target.appends).toBe(2);
  target.failure = undefined;
  target.time += 2_000;
  sink.write(record('last'));
  expect(target.content).toBe(`${Array.from({ length: 100 }, (_, i) => `r${i}\n`).join('')}still failing\nlast\n`);
  expect(sink.drops).toBe(0);
  expect(problems).toHaveLength(2);
  expect(problems[0]).toContain('no space left');
  expect(problems[1]).toBe('/run/log: writing again, 0 records were lost');
});

test('the pause between attempts grows to at most 30 s', () => {
  const target = new Target();
  target.failure = new Error('full');
  const sink = new Sink(target, { now: target.now });
  for (; target.time < 600_000; target.time += 100) sink.write(record('x'));
  expect(target.appends).toBeGreaterThan(20);
  expect(target.appends).toBeLessThan(30);
});

test('records beyond the memory limit are dropped, oldest first, and counted', () => {
  const target = new Target();
  const sink = new Sink(target, { now: target.now, maxPendingBytes: 9 });
  target.failure = new Error('full');
  for (const text of ['aa', 'bb', 'cc', 'dd', 'ee']) sink.write(record(text));
  expect(sink.drops).toBe(2);
  target.failure = undefined;
  expect(sink.flush()).toBe(true);
  expect(target.content).toBe('cc\ndd\nee\n');
});

test('closing during an outage counts what is lost', () => {
  const target = new Target();
  const problems: string[] = [];
  const sink = new Sink(target, { now: target.now, onProblem: (text) => problems.push(text) });
  target.failure = new Error('full');
  sink.write(record('a'));
  sink.write(record('b'));
  expect(sink.flush()).toBe(false);
  sink.close();
  expect([sink.drops, target.closed]).toEqual([2, true]);
  expect(problems).toEqual([expect.stringContaining('full'), '/run/log: 2 records were lost']);
});
