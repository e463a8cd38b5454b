/**
 * The fused bf16 kernels of CUDA under the same invariants. Checks that compare bits force a path: which one `adaptive`
 * takes depends on the whole batch. Values of the future are finite here: tensor cores multiply masked ones by zero.
 */
import type { Device } from '../device/device.js';
import { fusedRefusal } from '../ops/attention/fused/op.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import type { NsaInputs } from '../ops/attention/reference.js';
import { compressedCount } from '../ops/common/sequences.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../tensor/bfloat16.js';
import { AWKWARD, type CaseShapes, INPUT_NAMES, type InputName, outputSize, randomInputs } from './cases.js';
import { BF16_TOLERANCE, check, type Finding, type VerifyCheck, Worst } from './check.js';
import { compareCore } from './compare.js';
import { type CoreResult, OUTPUT_NAMES, record, runCore } from './core.js';
import { type LongCase, sampled } from './long.js';
import { differentBits, randomValues, relativeError, startsOf, sum } from './numbers.js';
import { compareDense } from './parity.js';

const PAPER = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const HEADS_125M = { heads: 12, groups: 2, dk: 64, dv: 64 };

/** Long enough for more blocks than slots; the head sizes of the paper and of small models. */
const TYPICAL: readonly (CaseShapes & { readonly name: string })[] = [
  { name: 'the 125m shape', lengths: [1100, 70], heads: HEADS_125M, sparse: PAPER },
  {
    name: 'heads of 32, small blocks',
    lengths: [500, 0, 31],
    heads: { heads: 12, groups: 2, dk: 32, dv: 32 },
    sparse: { l: 16, d: 8, lSel: 32, nSel: 6, w: 48 },
  },
  {
    name: '16 heads of 128 a group',
    lengths: [700],
    heads: { heads: 16, groups: 1, dk: 128, dv: 128 },
    sparse: { ...PAPER, nSel: 6 },
  },
  {
    name: 'keys of 192, values of 128',
    lengths: [600],
    heads: { heads: 4, groups: 2, dk: 192, dv: 128 },
    sparse: { ...PAPER, nSel: 6 },
  },
];

/** Every path and build of the kernels. */
const WAYS: Readonly<Record<string, SparseOptions>> = {
  adaptive: {},
  v1: { kernel: 'v1' },
  union: { path: 'union' },
  outer: { path: 'outer' },
  apart: { path: 'outer', joint: false },
  deterministic: { path: 'outer', deterministic: true },
  'mma.sync': { path: 'outer', mmaSync: true },
};

/** Two scores closer than this, relative to the larger, are a tie in bf16. */
const NEAR_TIE = 1e-3;

const LONG: readonly LongCase[] = [
  { name: 'bf16, S = 8192, the 125m shape, sampled rows', length: 8192, heads: HEADS_125M, sparse: PAPER },
  { name: 'bf16, S = 65,601, the 125m shape, sampled rows', length: 65_601, heads: HEADS_125M, sparse: PAPER },
  { name: 'bf16, S = 131,072, the 125m shape, sampled rows', length: 131_072, heads: HEADS_125M, sparse: PAPER },
];

/** Empty on a device without fused kernels. */
export function fusedChecks(device: Device, full: boolean): VerifyCheck[] {
  if (device.kind !== 'cuda') return [];
  const limit = BF16_TOLERANCE;
  const awkward = AWKWARD.filter((shapes) => refusal(device, shapes) === null);
  return [
    ...TYPICAL.map((shapes) =>
      check('1 reference', `bf16, ${shapes.name}: ${Object.keys(WAYS).join(', ')}`, limit, () =>
        parity(device, shapes, WAYS),
      ),
    ),
    check('1 reference', 'bf16, dense baseline', limit, () =>
      compareDense(device, TYPICAL[0], bf16Inputs(TYPICAL[0], 63), slopes(TYPICAL[0], 64), 'bf16'),
    ),
    ...awkward.map((shapes) =>
      check('9 shapes', `bf16, ${shapes.name}`, limit, () =>
        parity(device, shapes, { union: WAYS['union'], outer: WAYS['outer'] }),
      ),
    ),
    ...(['union', 'outer'] as const).flatMap((path) => [
      check('2 causality', `bf16 core, ${path}: other tokens after t`, 0, () => causality(device, { path })),
      check('3 prefix', `bf16 core, ${path}: a prefix alone equals the whole`, limit, () => prefixes(device, { path })),
      check('4 packing', `bf16 core, ${path}: ragged batch equals each sequence alone`, limit, () =>
        packing(device, { path }),
      ),
      check('8 repeat', `bf16 core, ${path}, deterministic: again`, 0, () =>
        repeated(device, { path, deterministic: true }),
      ),
    ]),
    ...(full ? LONG.map((long) => check('9 shapes', long.name, limit, () => sampled(device, long, 'bf16'))) : []),
  ];
}

function refusal(device: Device, { lengths, heads, sparse }: CaseShapes): string | null {
  const tokens = { total: sum(lengths), longest: Math.max(0, ...lengths) };
  return fusedRefusal({ heads, sparse, dtype: 'bf16', tokens }, device);
}

function rounded(values: Float64Array): Float64Array {
  return Float64Array.from(bfloat16ToFloat32(float32ToBfloat16(values)));
}

/** Rounded to bf16, with non-negative gates, as the gate operation produces them. */
function bf16Inputs(shapes: CaseShapes, seed: number): NsaInputs {
  const inputs = randomInputs(shapes, seed);
  return record(INPUT_NAMES, (name) => (name === 'gates' ? inputs.gates.map(Math.abs) : rounded(inputs[name])));
}

function slopes(shapes: CaseShapes, seed: number): Float64Array {
  return rounded(randomValues(outputSize(shapes), seed));
}

function parity(device: Device, shapes: CaseShapes, ways: Readonly<Record<string, SparseOptions>>): Finding {
  const inputs = bf16Inputs(shapes, 61);
  const dOut = slopes(shapes, 62);
  const results = record(Object.keys(ways), (way) => runCore(device, inputs, shapes, dOut, ways[way], 'bf16'));
  return compareCore(results, inputs, shapes, dOut, NEAR_TIE);
}

/** One sequence of small blocks: every edge within a few hundred tokens. */
const EDGES: CaseShapes = {
  lengths: [300],
  heads: { heads: 6, groups: 2, dk: 32, dv: 32 },
  sparse: { l: 16, d: 8, lSel: 16, nSel: 5, w: 40 },
};
const CUTS = [1, 15, 16, 17, 40, 63, 64, 65, 127, 128, 130, 191, 255, 299];

/** Numbers of each input per token, or per compressed block. */
const WIDTHS = (() => {
  const { heads, groups, dk, dv } = EDGES.heads;
  const [key, value] = [groups * dk, groups * dv];
  return { q: heads * dk, kCmp: key, vCmp: value, kSel: key, vSel: value, kWin: key, vWin: value, gates: heads * 3 };
})();

const blockCount = (length: number) => compressedCount(length, EDGES.sparse.l, EDGES.sparse.d);
const isCompressed = (name: InputName) => name === 'kCmp' || name === 'vCmp';

/** The same tokens and compressed keys up to `end`, different ones after it. */
function changedAfter(inputs: NsaInputs, other: NsaInputs, end: number): NsaInputs {
  return record(INPUT_NAMES, (name) => {
    const kept = WIDTHS[name] * (isCompressed(name) ? blockCount(end) : end);
    const values = inputs[name].slice();
    values.set(other[name].subarray(kept), kept);
    return values;
  });
}

/** The part of packed inputs that belongs to tokens [from, to) and compressed blocks [fromBlock, toBlock). */
function cut(inputs: NsaInputs, tokens: readonly [number, number], blocks: readonly [number, number]): NsaInputs {
  return record(INPUT_NAMES, (name) => {
    const [from, to] = isCompressed(name) ? blocks : tokens;
    return inputs[name].slice(from * WIDTHS[name], to * WIDTHS[name]);
  });
}

function causality(device: Device, options: SparseOptions): Finding {
  const [inputs, other] = [bf16Inputs(EDGES, 65), bf16Inputs(EDGES, 66)];
  const { heads, dv, groups } = EDGES.heads;
  const whole = runCore(device, inputs, EDGES, null, options, 'bf16');
  const worst = new Worst();
  for (const end of CUTS) {
    const after = runCore(device, changedAfter(inputs, other, end), EDGES, null, options, 'bf16');
    for (const name of OUTPUT_NAMES) {
      const rows = ({ outputs }: CoreResult) => outputs[name].subarray(0, end * heads * dv);
      const count = differentBits(rows(after), rows(whole));
      worst.add(count, `${count} values of ${name} before token ${end} change with the tokens after it`);
    }
    const blocks = ({ selected }: CoreResult) => selected.subarray(0, end * groups * EDGES.sparse.nSel);
    worst.add(differentBits(blocks(after), blocks(whole)), `selected blocks before token ${end} change`);
  }
  return worst.finding;
}

function prefixes(device: Device, options: SparseOptions): Finding {
  const inputs = bf16Inputs(EDGES, 67);
  const { heads, dv } = EDGES.heads;
  const whole = runCore(device, inputs, EDGES, null, options, 'bf16');
  const worst = new Worst();
  for (const end of CUTS) {
    const shapes = { ...EDGES, lengths: [end] };
    const alone = runCore(device, cut(inputs, [0, end], [0, blockCount(end)]), shapes, null, options, 'bf16');
    const rows = whole.outputs.out.subarray(0, end * heads * dv);
    worst.add(relativeError(alone.outputs.out, rows), `the first ${end} tokens alone give another output`);
  }
  return worst.finding;
}

function packing(device: Device, options: SparseOptions): Finding {
  const lengths = [3, 0, 170, 1, 16, 90];
  const shapes = { ...EDGES, lengths };
  const inputs = bf16Inputs(shapes, 68);
  const packed = runCore(device, inputs, shapes, null, options, 'bf16');
  const { heads, dv } = EDGES.heads;
  const [starts, blocks] = [startsOf(lengths), startsOf(lengths.map(blockCount))];
  const worst = new Worst();
  lengths.forEach((length, s) => {
    const one = cut(inputs, [starts[s], starts[s + 1]], [blocks[s], blocks[s + 1]]);
    const alone = runCore(device, one, { ...EDGES, lengths: [length] }, null, options, 'bf16');
    const rows = packed.outputs.out.subarray(starts[s] * heads * dv, starts[s + 1] * heads * dv);
    worst.add(relativeError(alone.outputs.out, rows), `sequence ${s} alone gives another output`);
  });
  return worst.finding;
}

function repeated(device: Device, options: SparseOptions): Finding {
  const [shapes] = TYPICAL;
  const inputs = bf16Inputs(shapes, 69);
  const dOut = slopes(shapes, 70);
  const bits = () => {
    const { outputs, selected, gradients } = runCore(device, inputs, shapes, dOut, options, 'bf16');
    return [selected, ...Object.values(outputs), ...Object.values(gradients!)];
  };
  const first = bits();
  const worst = new Worst();
  for (let run = 2; run <= 4; run++) {
    const count = bits().reduce((total, values, i) => total + differentBits(values, first[i]), 0);
    worst.add(count, `${count} values differ in run ${run}`);
  }
  return worst.finding;
}
