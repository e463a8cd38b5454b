import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { exchange, type Part } from './timeline.js';

const part = (seconds: number, bytes: number): Part => ({ name: '', seconds, bytes });

describe('by hand', () => {
  const parts = [part(1, 100), part(2, 100)];

  it('buckets are ready at 0.5, 1, 2 and 3 s; fast ones leave the last exposed', () => {
    const { buckets, communication, exposed } = exchange(parts, 50, () => 0.1);
    expect(buckets).toBe(4);
    expect(communication).toBeCloseTo(0.4, 12);
    expect(exposed).toBeCloseTo(0.1, 12);
  });

  it('slow ones queue: sent at 0.5, 1.5, 2.5 and 3.5, done at 4.5', () => {
    expect(exchange(parts, 50, () => 1).exposed).toBeCloseTo(1.5, 12);
  });

  it('a bucket may span two parts: full at 1.4 s, the rest at 3 s', () => {
    const sent: number[] = [];
    const { exposed } = exchange(parts, 120, (bytes) => {
      sent.push(bytes);
      return bytes / 50;
    });
    expect(sent).toEqual([120, 80]);
    // 1.4 + 2.4 = 3.8, then 1.6
    expect(exposed).toBeCloseTo(2.4, 12);
  });

  it('gradients that come all at once at the end are wholly exposed', () => {
    expect(exchange([part(5, 0), part(0, 300)], 100, () => 1).exposed).toBeCloseTo(3, 12);
  });

  it('nothing to send, nothing exposed', () => {
    expect(exchange(parts, 50, () => 0).exposed).toBe(0);
    expect(exchange([part(1, 0)], 50, () => 1)).toEqual({ buckets: 0, communication: 0, exposed: 0 });
  });
});

describe('always', () => {
  const parts = fc.array(
    fc.record({
      name: fc.constant(''),
      seconds: fc.double({ min: 0, max: 1, noNaN: true }),
      bytes: fc.integer({ min: 0, max: 10_000 }),
    }),
    { minLength: 1, maxLength: 12 },
  );
  const bucket = fc.integer({ min: 1, max: 5000 });
  const seconds = fc.double({ min: 0, max: 0.01, noNaN: true });

  it('sends every byte once, in buckets no larger than asked for', () => {
    fc.assert(
      fc.property(parts, bucket, (list, size) => {
        const sent: number[] = [];
        const { buckets } = exchange(list, size, (bytes) => {
          sent.push(bytes);
          return 0;
        });
        const total = list.reduce((sum, { bytes }) => sum + bytes, 0);
        expect(sent.reduce((sum, bytes) => sum + bytes, 0)).toBe(total);
        expect(Math.max(0, ...sent)).toBeLessThanOrEqual(size);
        expect(buckets).toBe(Math.ceil(total / size));
      }),
    );
  });

  it('exposes no more than is sent, and no less than what the backward pass cannot hold', () => {
    fc.assert(
      fc.property(parts, bucket, seconds, (list, size, each) => {
        const { communication, exposed } = exchange(list, size, () => each);
        const backward = list.reduce((sum, part) => sum + part.seconds, 0);
        expect(exposed).toBeLessThanOrEqual(communication + 1e-9);
        expect(exposed).toBeGreaterThanOrEqual(communication - backward - 1e-9);
        expect(exposed).toBeGreaterThanOrEqual(0);
      }),
    );
  });

  it('a slower wire never exposes less', () => {
    fc.assert(
      fc.property(parts, bucket, seconds, (list, size, each) => {
        const slow = exchange(list, size, () => 2 * each).exposed;
        expect(slow).toBeGreaterThanOrEqual(exchange(list, size, () => each).exposed - 1e-9);
      }),
    );
  });
});
