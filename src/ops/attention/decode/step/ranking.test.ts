/** The top-k selection of a decode step, on the thread emulator. */
import { expect, it } from 'vitest';
import { Tensor } from '../../../../tensor/tensor.js';
import { cpuMs } from '../../../../testing/cpu-time.js';
import { EmulatedCuda } from '../../../../testing/emulated-cuda.js';
import { randomNumbers } from '../../../../testing/random.js';

const ROOM = 13;
const cuda = new EmulatedCuda();
const code = cuda.compile(new URL('./testing/ranking.cu', import.meta.url), { TAKEN: ROOM });

/** Indices 1 … count of the ROOM greatest values, ascending, and the processor time of the launch. */
function rank(values: Float32Array): { best: number[]; ms: number } {
  const all = values.length;
  const importance = Tensor.from(cuda, [0, ...values], [all + 1]);
  const [ties, best] = [all, ROOM].map((size) => Tensor.zeros(cuda, [size], 'i32'));
  const ms = cpuMs(() => code.launch('rank_candidates', { grid: 1, block: 256 }, importance, ties, best, all));
  const found = [...best.read()].sort((a, b) => a - b);
  for (const tensor of [importance, ties, best]) tensor.free();
  return { best: found, ms };
}

/** The same by sorting: higher values first, then the lower index. */
function expected(values: Float32Array): number[] {
  const order = Array.from(values, (_, i) => i + 1).sort((a, b) => values[b - 1] - values[a - 1] || a - b);
  return order.slice(0, ROOM).sort((a, b) => a - b);
}

const CASES: readonly [string, (index: number, noise: number) => number][] = [
  ['different values', (_, noise) => noise],
  ['equal values', () => 0.25],
  ['zeros', () => 0],
  ['a few greater than all the others, which are equal', (i) => (i % 331 === 7 ? 1 + i : 0.5)],
  ['values that differ in the last bits only', (i) => 1 + ((i * 7919) % 64) * 2 ** -23],
  ['tiny values in the last bin', (_, noise) => (noise > 0.999 ? 1 : noise * 1e-30)],
];

it.each(CASES)('takes the greatest, and the lower index among equals: %s', (_, value) => {
  for (const count of [ROOM, 100, 256, 257, 3000]) {
    const noise = randomNumbers(3);
    const values = Float32Array.from({ length: count }, (_, i) => value(i, noise()));
    expect(rank(values).best, `${count} candidates`).toEqual(expected(values));
  }
});

it.each(CASES)('counts the candidates ahead, of two equal ones the first: %s', (_, value) => {
  for (const count of [1, 4, 13, 100, 256]) {
    const noise = randomNumbers(3);
    const values = Float32Array.from({ length: count }, (_, i) => value(i, noise()));
    const fours = Math.ceil(count / 4);
    const bits = new Int32Array(4 * fours).fill(-1);
    bits.set(new Int32Array(values.buffer));
    const order = Tensor.from(cuda, bits, [4 * fours], 'i32');
    const places = Tensor.zeros(cuda, [4 * fours], 'i32');
    code.launch('count_candidates', { grid: 1, block: 256 }, order, fours, places);
    const expected = Array.from(values, (own, j) =>
      values.reduce((ahead, other, k) => ahead + (other > own || (other === own && k < j) ? 1 : 0), 0),
    );
    expect([...places.read().slice(0, count)], `${count} candidates`).toEqual(expected);
    order.free();
    places.free();
  }
});

it.each(CASES)('takes the best of a warp in order, of equal ones the first: %s', (_, value) => {
  for (const count of [0, 1, 5, ROOM, 32, 33, 64, 100, 128, 208, 224]) {
    const noise = randomNumbers(3);
    const values = Float32Array.from({ length: count }, (_, i) => value(i, noise()));
    const bits = new Int32Array(4 * Math.max(1, Math.ceil(count / 4))).fill(-1);
    bits.set(new Int32Array(values.buffer));
    const order = Tensor.from(cuda, bits, [bits.length], 'i32');
    const taken = Tensor.zeros(cuda, [ROOM], 'i32');
    code.launch('take_candidates', { grid: 1, block: 32, shared: 512 }, order, count, taken);
    const best = Array.from(values, (_, i) => i).sort((a, b) => values[b] - values[a] || a - b);
    const expected = Array.from({ length: ROOM }, (_, place) => best[place] ?? -1);
    expect([...taken.read()], `${count} candidates`).toEqual(expected);
    order.free();
    taken.free();
  }
});

it('takes time linear in the number of candidates when all are equal', () => {
  const time = (count: number) => Math.min(...[0, 1, 2].map(() => rank(new Float32Array(count).fill(0.5)).ms));
  time(1000); // the first launch also loads the code
  // Comparing each with each would take 256 times as long for 16 times as many.
  expect(time(65_536) / time(4096)).toBeLessThan(64);
});
