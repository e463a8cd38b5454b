import { afterAll, describe, expect, it } from 'vitest';
import { Parameter } from '../tensor/parameter.js';
import { cpu } from '../testing/devices.js';
import { makeBuckets } from './data-parallel.js';

const device = cpu();
const parameters = [[7, 3], [5], [64, 4], [1], [33, 9]].map((shape, i) => new Parameter(device, `p${i}`, shape));

afterAll(() => {
  for (const parameter of parameters) parameter.free();
});

describe.each([1, 2, 3, 5])('buckets for %i ranks', (world) => {
  it.each([1, 1500, 1e9])('of about %i bytes hold every gradient once, the last parameter first', (bytes) => {
    const buckets = makeBuckets(device, parameters, world, bytes);
    const names = buckets.flatMap(({ places }) => places.map(({ parameter }) => parameter.name));
    expect(names).toEqual(['p4', 'p3', 'p2', 'p1', 'p0']);
    expect(buckets).toHaveLength(bytes === 1 ? 5 : bytes === 1e9 ? 1 : 2);
    for (const bucket of buckets) {
      expect(bucket.flat.size).toBe(world * bucket.partSize);
      for (const { offset, size } of bucket.places) {
        expect(offset % 64).toBe(0);
        expect(offset + size).toBeLessThanOrEqual(bucket.flat.size);
      }
    }
    for (const bucket of buckets) bucket.free();
  });

  it('the shares of all ranks are each parameter, once', () => {
    const buckets = makeBuckets(device, parameters, world, 1500);
    for (const bucket of buckets)
      for (const place of bucket.places) {
        let at = 0;
        for (let rank = 0; rank < world; rank++) {
          const { from, to } = bucket.share(place, rank);
          if (to === from) continue;
          expect(from).toBe(at);
          expect(from % 64).toBe(0);
          expect(bucket.view(place, from, to).pointer).toBeGreaterThanOrEqual(bucket.part(rank).pointer);
          at = to;
        }
        expect(at).toBe(place.size);
      }
    for (const bucket of buckets) bucket.free();
  });

  it('a gradient written into a parameter lies in the bucket, and outside again when the bucket is gone', () => {
    const [bucket] = makeBuckets(device, parameters, world, 1e9);
    const { parameter } = bucket.places[1];
    parameter.fillGradient();
    parameter.gradient!.write([3]);
    expect(bucket.view(bucket.places[1]).item()).toBe(3);
    bucket.free();
    expect(parameter.gradient).toBeNull();
    parameter.fillGradient();
    expect(parameter.gradient!.item()).toBe(0);
  });
});
