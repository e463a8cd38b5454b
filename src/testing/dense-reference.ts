/** The logits of a dense model in float64, from its parameters by name: what kernels and imported weights are held against. */

import { addRow, headsForward } from '../model/heads-reference.js';
import { headShapeOf, hiddenSize, type ModelShape, rotaryShapeOf } from '../model/shape.js';
import { siluForward, swigluForward } from '../ops/activation/reference.js';
import { denseForward } from '../ops/attention/dense/reference.js';
import { linearForward } from '../ops/linear/reference.js';
import { rmsnormForward } from '../ops/rmsnorm/reference.js';
import { rotaryAngles } from '../ops/rope/frequencies.js';

export interface DenseResult {
  /** [T, vocabulary] */
  readonly logits: Float64Array;
  /** [T, dim]: the embedding, the output of every block, and the last norm. */
  readonly hidden: readonly Float64Array[];
}

/** One sequence `ids` through a model; `weight` returns a parameter by its name. */
export function denseModelForward(
  shape: ModelShape,
  weight: (name: string) => Float64Array,
  ids: readonly number[],
): DenseResult {
  const { dim, normEps } = shape;
  const tokens = ids.length;
  const heads = headShapeOf(shape);
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
    const [q, k, v] = headsForward(shape, fused, attention, positions, angles);
    const { out } = denseForward(q, k, v, [0, tokens], heads);
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
