import { expect, it } from 'vitest';
import { threadMilliseconds, withTimeLimit } from './time-limit.js';

/** Computes for this much processor time. */
function compute(milliseconds: number): string {
  const end = threadMilliseconds() + milliseconds;
  while (threadMilliseconds() < end);
  return 'done';
}

const late = () => 'late';

it('ends what takes longer, and nothing else', () => {
  expect(withTimeLimit(1000, () => compute(1), late)).toBe('done');
  expect(withTimeLimit(20, () => compute(10_000), late)).toBe('late');
  const fail = () => {
    throw new Error('its own');
  };
  expect(() => withTimeLimit(1000, fail, late)).toThrow('its own');
});

it.runIf(process.platform === 'linux')('does not count the time that a thread waits for a processor', () => {
  let attempts = 0;
  const work = () => {
    attempts += 1;
    if (attempts < 3) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 1e6); // no processor
    return compute(5);
  };
  expect(withTimeLimit(30, work, late)).toBe('done');
  expect(attempts).toBeGreaterThanOrEqual(3);
});
