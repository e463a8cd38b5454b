/** The logits of a model in float64, from its parameters by name: what kernels and imported weights are held against. */

import { addRow, headsForward } from '../model/heads-reference.js';
import { headShapeOf, hiddenSize, layerShape, type ModelShape, rotaryShapeOf, sparseShapeOf } from '../model/shape.js';
import { siluForward, swigluForward } from '../ops/activation/reference.js';
import { averageWeight, convForward } from '../ops/attention/compress/reference.js';
import { gateForward } from '../ops/attention/gate/reference.js';
import { nsaForward } from '../ops/attention/reference.js';
import { windowForward } from '../ops/attention/window/reference.js';
import { compressedCount } from '../ops/common/sequences.js';
import { linearForward } from '../ops/linear/reference.js';
import { rmsnormForward } from '../ops/rmsnorm/reference.js';
import { rotaryAngles } from '../ops/rope/frequencies.js';
import { splitForward } from '../ops/rope/reference.js';

export interface ModelResult {
  /** [T, vocabulary] */
  readonly logits: Float64Array;
  /** [T, dim]: the embedding, the output of every block, and the last norm. */
  readonly hidden: readonly Float64Array[];
}

/** One sequence `ids` through a model; `weight` returns a parameter by its name. */
export function modelForward(
  shape: ModelShape,
  weight: (name: string) => Float64Array,
  ids: readonly number[],
): ModelResult {
  const { dim, normEps } = shape;
  const tokens = ids.length;
  const angles = rotaryAngles(rotaryShapeOf(shape));
  const positions = ids.map((_, t) => t);
  const linear = (x: Float64Array, name: string, bias: string | null) => {
    const matrix = weight(name);
    const inputs = x.length / tokens;
    const y = linearForward(x, matrix, tokens, matrix.length / inputs, inputs);
    return bias === null ? y : addRow(y, weight(bias));
  };
  const plus = (a: Float64Array, b: Float64Array) => a.map((value, i) => value + b[i]);
  let x: Float64Array = Float64Array.from(
    ids.flatMap((id) => Array.from(weight('embedding').subarray(id * dim, (id + 1) * dim))),
  );
  const hidden = [x];
  for (let layer = 0; layer < shape.nLayers; layer++) {
    const name = `blocks.${layer}`;
    const attention = (part: string) => weight(`${name}.attention.${part}`);
    const normed = rmsnormForward(x, weight(`${name}.attention_norm`), normEps);
    const fused = linear(normed, `${name}.attention.qkv`, null);
    const own = layerShape(shape, layer);
    const split = headsForward(own, fused, attention, positions, angles);
    const out =
      own.attention !== 'nsa'
        ? windowForward(
            ...([split[0], split[1], split[2], [0, tokens], headShapeOf(shape)] as const),
            own.attention === 'window' ? shape.nsa.w : tokens,
          ).out
        : sparseForward(
            shape,
            split,
            addRow(linear(normed, `${name}.attention.gate.weight`, null), attention('gate.bias')),
          );
    x = plus(x, linear(out, `${name}.attention.out`, shape.outBias ? `${name}.attention.out_bias` : null));
    const middle = rmsnormForward(x, weight(`${name}.mlp_norm`), normEps);
    const up = linear(middle, `${name}.mlp.up`, shape.mlpBias ? `${name}.mlp.up_bias` : null);
    const active = shape.mlp === 'swiglu' ? swigluForward(up, hiddenSize(shape)) : siluForward(up);
    x = plus(x, linear(active, `${name}.mlp.down`, shape.mlpBias ? `${name}.mlp.down_bias` : null));
    hidden.push(x);
  }
  const last = rmsnormForward(x, weight('norm'), normEps);
  hidden.push(last);
  return { logits: linear(last, shape.tieEmbeddings ? 'embedding' : 'head', null), hidden };
}

/** Sparse attention with phi avg of one sequence, from the parts of the fused projection and the logits of the gate. */
function sparseForward(shape: ModelShape, parts: readonly Float64Array[], logits: Float64Array): Float64Array {
  const [q, rawKeys, rawValues, ...own] = parts;
  const { nsa } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const tokens = q.length / (heads * dk);
  const count = compressedCount(tokens, nsa.l, nsa.d);
  const compress = (x: Float64Array, size: number) => {
    const block = { groups, size, l: nsa.l, d: nsa.d };
    return convForward(x, averageWeight(block), [0, tokens], block);
  };
  const rotated = (x: Float64Array, positions: readonly number[]) =>
    splitForward(x, [{ heads: groups, size: dk, rotate: true }], positions, rotaryAngles(rotaryShapeOf(shape)))[0];
  const at = (length: number, stride: number) => Array.from({ length }, (_, i) => i * stride);
  const compressed = compress(rawKeys, dk);
  const kCmp = nsa.cmpRope === 'after' ? rotated(compressed, at(count, nsa.d)) : compressed;
  const keys = nsa.cmpRope === 'before' ? rawKeys : rotated(rawKeys, at(tokens, 1));
  const [kSel, vSel, kWin, vWin] = nsa.sharedKv ? [keys, rawValues, keys, rawValues] : own;
  const gates = gateForward(logits, { kind: nsa.gate, temperature: nsa.gateTemp });
  const layout = {
    starts: [0, tokens],
    cmpStarts: [0, count],
    heads: headShapeOf(shape),
    sparse: sparseShapeOf(shape),
  };
  return nsaForward({ q, kCmp, vCmp: compress(rawValues, dv), kSel, vSel, kWin, vWin, gates }, layout).out;
}
