import { describe, expect, it } from 'vitest';
import fc from '../testing/properties.js';
import { exchange, type ModelPart } from './timeline.js';

const part = (seconds: number, ...gradients: number[]): ModelPart => ({ name: '', seconds, gradients });

describe('by hand', () => {
  const parts = [part(1, 50, 50), part(2, 50, 50)];

  it('buckets are ready at 0.5, 1, 2 and 3 s; fast ones leave the last exposed', () => {
    const { buckets, communication, exposed } = exchange(parts, 50, () => 0.1);
    expect(buckets).toBe(4);
    expect(communication).toBeCloseTo(0.4, 12);
    expect(exposed).toBeCloseTo(0.1, 12);
  });

  it('slow ones queue: sent at 0.5, 1.5, 2.5 and 3.5, done at 4.5', () => {
    expect(exchange(parts, 50, () => 1).exposed).toBeCloseTo(1.5, 12);
  });

  it('a bucket may span two parts: full at 2 s, the rest at 3 s', () => {
    const sent: number[] = [];
    const { exposed } = exchange(parts, 160, (bytes) => {
      sent.push(bytes);
      return bytes / 50;
    });
    expect(sent).toEqual([150, 50]);
    // 2 + 3 = 5, then 1
    expect(exposed).toBeCloseTo(3, 12);
  });

  it('a gradient larger than a bucket is alone in one, and small ones do not wait for it', () => {
    const sent: number[] = [];
    const { exposed } = exchange([part(1, 10, 10, 200), part(1, 10)], 50, (bytes) => {
      sent.push(bytes);
      return bytes / 100;
    });
    expect(sent).toEqual([20, 200, 10]);
    // at 1/11 and 1 s: 1 + 2 = 3, then 0.1
    expect(exposed).toBeCloseTo(1.1, 12);
  });

  it('gradients that come all at once at the end are wholly exposed', () => {
    expect(exchange([part(5), part(0, 100, 100, 100)], 100, () => 1).exposed).toBeCloseTo(3, 12);
  });

  it('nothing to send, nothing exposed', () => {
    expect(exchange(parts, 50, () => 0).exposed).toBe(0);
    expect(exchange([part(1)], 50, () => 1)).toEqual({ buckets: 0, communication: 0, exposed: 0 });
  });
});

describe('always', () => {
  const parts = fc.array(
    fc.record({
      name: fc.constant(''),
      seconds: fc.double({ min: 0, max: 1, noNaN: true }),
      gradients: fc.array(fc.integer({ min: 1, max: 10_000 }), { maxLength: 6 }),
    }),
    { minLength: 1, maxLength: 12 },
  );
  const bucket = fc.integer({ min: 1, max: 5000 });
  const seconds = fc.double({ min: 0, max: 0.01, noNaN: true });

  it('sends every byte once, in buckets no larger than asked for unless a gradient is', () => {
    fc.assert(
      fc.property(parts, bucket, (list, size) => {
        const sent: number[] = [];
        const { buckets } = exchange(list, size, (bytes) => {
          sent.push(bytes);
          return 0;
        });
        const all = list.flatMap(({ gradients }) => gradients);
        const sum = (bytes: readonly number[]) => bytes.reduce((total, one) => total + one, 0);
        expect(sum(sent)).toBe(sum(all));
        for (const bytes of sent) expect(bytes <= size || all.includes(bytes)).toBe(true);
        expect(buckets).toBeGreaterThanOrEqual(Math.ceil(sum(all) / Math.max(size, ...all)));
        expect(buckets).toBeLessThanOrEqual(all.length);
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
