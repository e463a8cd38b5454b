import { afterAll, describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { modelShape } from '../model/shape.js';
import { Tensor } from '../tensor/tensor.js';
import { cpu } from '../testing/devices.js';
import { attentionStatistics, type LayerSample, strictObserver } from './observers.js';

const shape = modelShape(parseConfig({}), 256);
const tensors: Tensor[] = [];
afterAll(() => {
  for (const tensor of tensors) tensor.free();
});

const gates = (values: number[]) => keep(Tensor.from(cpu(), values, [1, values.length / 3, 3]));
const blocks = (values: number[]) => keep(Tensor.from(cpu(), values, [1, 1, values.length], 'i32'));
function keep(tensor: Tensor): Tensor {
  tensors.push(tensor);
  return tensor;
}

describe('strict asserts', () => {
  it('passes valid gates and selections on to the next observer', () => {
    const heard: string[] = [];
    const observer = strictObserver(shape, {
      gates: (layer) => heard.push(`gates ${layer}`),
      selected: (layer) => heard.push(`selected ${layer}`),
    });
    observer.gates!(1, gates([0.2, 0.3, 0.5, 1, 0, 0]));
    observer.selected!(2, blocks([0, 3, 7, -1]));
    expect(heard).toEqual(['gates 1', 'selected 2']);
  });

  it.each([
    [[0.2, 0.3, 0.6], 'are not valid weights'],
    [[1.5, -0.5, 0], 'are not valid weights'],
    [[Number.NaN, 0.5, 0.5], 'are not valid weights'],
  ])('throws at gates %j', (values, message) =>
    expect(() => strictObserver(shape).gates!(0, gates(values))).toThrow(message),
  );

  it.each([
    [[0, 4, 4, -1], 'is not ascending'],
    [[0, 5, 3, 8], 'is not ascending'],
    [[1, 2, 3, 4], 'does not contain block 0'],
  ])('throws at the selection %j', (values, message) =>
    expect(() => strictObserver(shape).selected!(0, blocks(values))).toThrow(message),
  );
});

/** Two sequences of 8 tokens in blocks of 2; the sample has every pair of neighbours. */
const BATCH = { cuSeqlens: Int32Array.from([0, 8, 16]), inputs: new Int32Array(16) };
const SHAPE = { groups: 1, slots: 3, blockSize: 2 };
/** 4 rows; entropy 2 in all; largest gates; one collapsed; shares 1, 2 and 1. */
const GATES = [4, 2, 0.1, 3, 1, 1, 1, 2, 1];

function layer(select: (token: number) => number[]): LayerSample {
  const selection = Array.from({ length: 15 }, (_, pair) => [pair, pair + 1])
    .flat()
    .flatMap((token) => [...select(token), -1, -1, -1].slice(0, 3));
  return { gates: GATES, selection };
}

const own = (token: number) => Math.floor((token % 8) / 2);

it('summarises gates, distances, forced blocks and overlaps by layer', () => {
  const first = layer((token) => [...new Set([0, own(token)])]);
  const second = layer((token) => (own(token) === 3 ? [0, 1, 3] : [...new Set([0, own(token)])]));
  const result = attentionStatistics([first, second], SHAPE, BATCH);
  expect(result).toMatchObject({ entropy: [0.5, 0.5], collapse: [0.25, 0.25], sel: [0.5, 0.5], cmp: [0.25, 0.25] });
  // Tokens 1 to 15: own block 15 times; block 0 at distance 1 (4 tokens), 2 and 3 (8 tokens).
  expect(result.distance[0]).toEqual([15, 4, 8]);
  expect(result.distance[1]).toEqual([15, 4, 12]);
  expect(result.forced[0]).toBe(1);
  expect(result.forced[1]).toBeCloseTo(27 / 31, 4); // block 1 of the last blocks is chosen
  expect(result.layers).toEqual([Number((27 / 31).toFixed(4))]);
  // Token 8 begins a sequence: it is not compared with token 7.
  const moved = 6; // tokens 2, 4, 6 of each sequence have a new own block
  expect(result.neighbours[0]).toBeCloseTo((26 - moved) / 26, 4);
});

it('has no selection statistics for a batch of one token', () => {
  const result = attentionStatistics([{ gates: GATES, selection: [] }], SHAPE, { ...BATCH, inputs: new Int32Array(1) });
  expect(result).toMatchObject({ forced: [0], neighbours: [0], distance: [[]], layers: [] });
});
