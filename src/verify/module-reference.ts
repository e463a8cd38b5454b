/** The attention module in float64, composed of the references of its operations. */
import { addRow, headsForward } from '../model/heads-reference.js';
import { headShapeOf, type ModelShape, rotaryShapeOf, seesPositions, sparseShapeOf } from '../model/shape.js';
import { averageWeight, type CompressShape, convForward, mlpForward } from '../ops/attention/compress/reference.js';
import { gateForward } from '../ops/attention/gate/reference.js';
import { type NsaInputs, type NsaLayout, nsaForward } from '../ops/attention/reference.js';
import { linearForward } from '../ops/linear/reference.js';
import { rotaryAngles } from '../ops/rope/frequencies.js';
import { splitForward } from '../ops/rope/reference.js';
import { layoutOf } from './cases.js';

/** Parameters by name, without the module's prefix: `qkv`, `gate.weight`, `phi_k.w1`, `out`. */
export type Weights = Readonly<Record<string, Float64Array>>;

export interface ModuleResult {
  /** [T, dim] */
  readonly out: Float64Array;
  readonly inputs: NsaInputs;
  readonly layout: NsaLayout;
}

/** `x` [T, dim], normalised; `selected` as the device chose, since no gradient flows through it. */
export function moduleForward(
  shape: ModelShape,
  weights: Weights,
  x: Float64Array,
  lengths: readonly number[],
  selected: Int32Array,
): ModuleResult {
  const layout = layoutOf({ lengths, heads: headShapeOf(shape), sparse: sparseShapeOf(shape) });
  const inputs = coreInputs(shape, weights, x, lengths, layout);
  const { out } = nsaForward(inputs, layout, selected);
  const tokens = x.length / shape.dim;
  const width = shape.nHeads * shape.dV;
  const projected = linearForward(out, weights['out'], tokens, shape.dim, width);
  return { out: shape.outBias ? addRow(projected, weights['out_bias']) : projected, inputs, layout };
}

/** The inputs of the core: projections, rotated keys, compressed keys and gates. */
function coreInputs(
  shape: ModelShape,
  weights: Weights,
  x: Float64Array,
  lengths: readonly number[],
  { starts, cmpStarts }: NsaLayout,
): NsaInputs {
  const { dim, nsa } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const tokens = x.length / dim;
  const rope = rotaryAngles(rotaryShapeOf(shape));
  const fused = linearForward(x, weights['qkv'], tokens, weights['qkv'].length / dim, dim);
  const positions = lengths.flatMap((length) => Array.from({ length }, (_, t) => t));
  const split = headsForward(shape, fused, (name) => weights[name], positions, rope);
  const [q, rawKeys, rawValues, kSel, vSel, kWin, vWin] = split;
  const compress = (values: Float64Array, size: number, name: string) =>
    compressForward(values, weights, name, nsa.phi, starts, { groups, size, l: nsa.l, d: nsa.d });
  let kCmp = compress(rawKeys, dk, 'phi_k');
  const vCmp = compress(rawValues, dv, 'phi_v');
  if (nsa.cmpRope === 'after') {
    const blocks = lengths.flatMap((_, s) =>
      Array.from({ length: cmpStarts[s + 1] - cmpStarts[s] }, (_, i) => i * nsa.d),
    );
    [kCmp] = splitForward(kCmp, [{ heads: groups, size: dk, rotate: true }], blocks, rope);
  }
  const logits = linearForward(x, weights['gate.weight'], tokens, 3 * heads, dim);
  const bias = weights['gate.bias'];
  const biased = logits.map((logit, i) => logit + bias[i % bias.length]);
  const gates = gateForward(biased, { kind: nsa.gate, temperature: nsa.gateTemp });
  const qWin = seesPositions(shape) ? null : splitForward(q, [{ heads, size: dk, rotate: true }], positions, rope)[0];
  return { q, qWin, kCmp, vCmp, kSel, vSel, kWin, vWin, gates };
}

function compressForward(
  x: Float64Array,
  weights: Weights,
  name: string,
  phi: ModelShape['nsa']['phi'],
  starts: ArrayLike<number>,
  shape: CompressShape,
): Float64Array {
  if (phi === 'avg') return convForward(x, averageWeight(shape), starts, shape);
  if (phi === 'conv') return convForward(x, weights[`${name}.weight`], starts, shape);
  const [position, w1, w2] = ['position', 'w1', 'w2'].map((part) => weights[`${name}.${part}`]);
  return mlpForward(x, { position, w1, w2 }, starts, shape);
}
