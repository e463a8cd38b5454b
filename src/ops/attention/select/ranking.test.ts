/** Ranking of blocks on the CPU: importances given, with blocks of one token (l = d = l' = 1). */
import { expect, it } from 'vitest';
import { Tensor } from '../../../tensor/tensor.js';
import { cpuMs } from '../../../testing/cpu-time.js';
import { cpu } from '../../../testing/devices.js';
import { randomNumbers } from '../../../testing/random.js';
import type { SelectionRule } from '../shape.js';
import { selectionArguments } from './op.js';
import { topBlocks } from './reference.js';
import { ranking } from './testing/choose.js';

function choose(importance: Float32Array, count: number, forced: SelectionRule = {}): { blocks: number[]; ms: number } {
  const device = cpu();
  const probability = Tensor.from(device, importance, [importance.length]);
  const out = Tensor.empty(device, [count], 'i32');
  const kernel = device.kernels(ranking);
  const sparse = { l: 1, d: 1, lSel: 1, nSel: count, w: 1, ...forced };
  const words = selectionArguments(sparse);
  const ms = cpuMs(() => kernel.choose_blocks(probability, out, importance.length - 1, ...words));
  const blocks = [...out.read()];
  probability.free();
  out.free();
  return { blocks, ms };
}

const padded = (blocks: number[], count: number) => [...blocks, ...new Array(count - blocks.length).fill(-1)];

const CASES: readonly [string, (index: number, noise: number) => number][] = [
  ['different', (_, noise) => noise],
  ['equal', () => 0.25],
  ['ascending', (i) => i],
  ['descending', (i) => 1 / (1 + i)],
  ['of three values', (i) => i % 3],
  ['NaN in part', (i, noise) => (i % 2 ? Number.NaN : noise)],
];

it.each(CASES)('takes the greatest, and the lower index among equals: importances are %s', (_, value) => {
  for (const [length, count] of [
    [5, 4],
    [100, 16],
    [1000, 3],
    [3000, 500],
  ]) {
    const noise = randomNumbers(3);
    const importance = Float32Array.from({ length }, (_, i) => value(i, noise()));
    const ranked = importance.map((x) => (Number.isNaN(x) ? -1 : x)); // NaN ranks last
    const own = { initBlocks: 0, localBlocks: 1 };
    const chunked: SelectionRule[] = count % 2 === 0 ? [{ ...own, selection: 'chunked' }] : [];
    for (const forced of [{}, own, { initBlocks: 2, localBlocks: 1 }, ...chunked])
      expect(choose(importance, count, forced).blocks, `${count} of ${length}, ${JSON.stringify(forced)}`).toEqual(
        padded(topBlocks(ranked, count, forced), count),
      );
  }
});

it.each(CASES.slice(1, 3))('is not quadratic in the number of blocks and slots: importances are %s', (_, value) => {
  const time = (length: number) => {
    const importance = Float32Array.from({ length }, (_, i) => value(i, 0));
    return Math.min(...Array.from({ length: 5 }, () => choose(importance, length / 8).ms));
  };
  time(4096); // compiles
  // Sixteen times the blocks and slots: a quadratic ranking takes at least 256 times as long.
  expect(time(262_144) / time(16_384)).toBeLessThan(100);
});
