import { describe, expect, it } from 'vitest';
import { Tensor } from '../../../tensor/tensor.js';
import { devices } from '../../../testing/devices.js';
import { sampledToken, sampleSelection } from './op.js';
import { referenceSample } from './reference.js';

describe.each(devices().filter(({ dtype }) => dtype === 'f32'))('a sample of the selection on $name', ({ device }) => {
  it.each([
    [1000, 2, 16, 128],
    [7, 3, 5, 128],
    [2, 1, 1, 4],
    [1, 2, 4, 8],
  ])('has the rows of the reference for %i tokens, %i groups, %i slots and %i pairs', (tokens, groups, slots, most) => {
    const values = Int32Array.from({ length: tokens * groups * slots }, (_, i) => (i * 7919) % 1009);
    const selected = Tensor.from(device(), values, [tokens, groups, slots], 'i32');
    const sample = sampleSelection(device(), selected, most);
    expect([...sample.read()]).toEqual(referenceSample(values, tokens, groups * slots, most));
    selected.free();
    sample.free();
  });
});

it('pairs end inside the batch', () => {
  expect([0, 63, 127].map((pair) => sampledToken(pair, 128, 129))).toEqual([1, 64, 128]);
});
