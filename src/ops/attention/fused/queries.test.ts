/** The end of the queries' gradient on the thread emulator: shares added, and turned back into the projection's gradient. */
import { describe, expect, it } from 'vitest';
import { f32 } from '../../../device/cuda/runtime.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../../../tensor/bfloat16.js';
import { Tensor } from '../../../tensor/tensor.js';
import { EmulatedCuda } from '../../../testing/emulated-cuda.js';
import { randomValues, relativeError } from '../../../testing/numbers.js';
import { Sequences } from '../../common/sequences.js';
import { rotaryAngles } from '../../rope/frequencies.js';
import { splitBackward } from '../../rope/reference.js';
import { fusedMacros, rowLanes } from './plan.js';

const device = new EmulatedCuda();
const SPARSE = { l: 32, d: 16, lSel: 64, nSel: 5, w: 100 };
const LENGTHS = [9, 0, 1, 14];
const TOKENS = 24;
/** Columns of the projection behind the queries'. */
const BEHIND = 24;

const rounded = (count: number, seed: number) =>
  Float64Array.from(bfloat16ToFloat32(float32ToBfloat16(Float32Array.from(randomValues(count, seed)))));

describe.each([
  [12, 2, 64],
  [10, 2, 128],
  [6, 1, 96],
  [4, 2, 32],
  [3, 1, 192],
  [2, 2, 48],
])('%i heads in %i groups of %i', (heads, groups, dk) => {
  const shape = { heads: { heads, groups, dk, dv: 64 }, sparse: SPARSE };
  const macros = fusedMacros(shape, { queryMajor: false, mmaSync: true }, 8);
  const code = device.compile(new URL('./queries.cu', import.meta.url), macros);
  const [h, n] = [heads / groups, SPARSE.nSel];
  const others = rounded(TOKENS * heads * dk, 1);
  const shares = rounded(TOKENS * heads * n * dk, 2);
  // Some slots are empty; the shares of those are not defined.
  const selected = Array.from({ length: TOKENS * groups * n }, (_, i) => (i % 7 === 3 ? -1 : i % 9));
  shares.forEach((_, i) => {
    const slot = Math.floor(i / dk / h) % n;
    const row = Math.floor(i / dk / h / n);
    if (selected[row * n + slot] < 0) shares[i] = Number.NaN;
  });
  const sums = others.map((other, i) => {
    const [token, head, column] = [Math.floor(i / dk / heads), Math.floor(i / dk) % heads, i % dk];
    const row = token * groups + Math.floor(head / h);
    let sum = 0;
    for (let slot = 0; slot < n; slot++)
      if (selected[row * n + slot] >= 0) sum += shares[((row * n + slot) * h + (head % h)) * dk + column];
    return other + sum / Math.sqrt(dk);
  });
  const shapeOfLaunch = { grid: Math.ceil((TOKENS * heads * rowLanes(dk)) / 256), block: 256 };
  const upload = () => ({
    dq: Tensor.from(device, others, [TOKENS, heads, dk], 'bf16'),
    given: Tensor.from(device, shares, [TOKENS, heads, n, dk], 'bf16'),
    chosen: Tensor.from(device, selected, [TOKENS, groups, n], 'i32'),
  });

  it('are added in place', () => {
    const { dq, given, chosen } = upload();
    code.launch(
      'selected_query_gradient',
      shapeOfLaunch,
      ...[dq, given, chosen, TOKENS, null, 0, null, f32(1), f32(1), null, 0],
    );
    expect(relativeError(dq.read(), sums)).toBeLessThan(4e-3);
  });

  it('are turned back into the gradient of the projection, whose other columns stay', () => {
    const { dq, given, chosen } = upload();
    const width = heads * dk + BEHIND;
    const angles = rotaryAngles({ size: dk, theta: 10000, scale: 2 });
    const fused = Tensor.from(device, new Float64Array(TOKENS * width).fill(7), [TOKENS, width], 'bf16');
    const tokens = new Sequences(device, LENGTHS);
    const frequencies = Tensor.from(device, angles.frequencies, [dk / 2]);
    code.launch(
      'selected_query_gradient',
      shapeOfLaunch,
      ...[dq, given, chosen, TOKENS, fused, width, frequencies, f32(angles.scale), f32(1.5), tokens.offsets],
      LENGTHS.length,
    );
    const positions = LENGTHS.flatMap((length) => Array.from({ length }, (_, i) => i));
    const parts = [{ heads, size: dk, rotate: true }];
    const expected = splitBackward([sums], parts, positions, { ...angles, amplitude: 1.5 });
    const actual = fused.read();
    const column = (i: number) => i % width;
    expect(actual.filter((_, i) => column(i) >= heads * dk)).toEqual(new Float32Array(TOKENS * BEHIND).fill(7));
    expect(relativeError(Float64Array.from(actual.filter((_, i) => column(i) < heads * dk)), expected)).toBeLessThan(
      4e-3,
    );
    expect(dq.read()).toEqual(Float32Array.from(others));
  });
});
