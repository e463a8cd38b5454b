/** What the attention operations share: checked inputs, and the backward rule that all their kernels have in common. */
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import type { Sequences } from '../common/sequences.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { type HeadShape, validateShapes } from './shape.js';

/** Queries [tokens, heads, dk] with keys [keys, groups, dk] and values [keys, groups, dv]. */
export interface AttentionInputs {
  readonly q: Tensor;
  readonly k: Tensor;
  readonly v: Tensor;
}

/** The output [tokens, heads, dv] and the natural logarithm of every softmax sum [tokens, heads]. */
export interface AttentionOutput {
  readonly out: Tensor;
  readonly lse: Tensor;
}

export function headShape(what: string, { q, k, v }: AttentionInputs, tokens: Sequences, keys: Sequences): HeadShape {
  const [, heads, dk] = expectFloats(`${what}: q`, q, [tokens.total, -1, -1]);
  const [, groups] = expectShape(`${what}: k`, k, [keys.total, -1, dk], q.dtype);
  const [, , dv] = expectShape(`${what}: v`, v, [keys.total, groups, -1], q.dtype);
  if (keys.count !== tokens.count)
    throw new UsageError(`${what}: ${keys.count} sequences of keys do not fit ${tokens.count} sequences of tokens`);
  const shape = { heads, groups, dk, dv };
  validateShapes(shape);
  return shape;
}

/** Gradients a kernel must fill, with its accumulate flags. Inputs nobody needs a gradient of get memory to throw away. */
export interface InputGradients {
  readonly dq: Tensor;
  readonly dk: Tensor;
  readonly dv: Tensor;
  readonly flags: readonly [number, number, number];
}

export function recordAttention(
  tape: Tape,
  inputs: AttentionInputs,
  output: AttentionOutput,
  alsoSaved: readonly Tensor[],
  backward: (dOut: Tensor, gradients: InputGradients) => void,
): void {
  const { q, k, v } = inputs;
  const { out, lse } = output;
  tape.record([q, k, v], [out, lse], [q, k, v, out, lse, ...alsoSaved], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const unused = new Tapeless();
    const [dq, dk, dv] = [q, k, v].map((tensor) => tape.gradientTarget(tensor) ?? unused.target(tape, tensor));
    backward(dOut, {
      dq: dq.gradient,
      dk: dk.gradient,
      dv: dv.gradient,
      flags: [Number(dq.accumulate), Number(dk.accumulate), Number(dv.accumulate)],
    });
    unused.free();
  });
}

/** Memory for gradients that are computed along but wanted by nobody. */
class Tapeless {
  readonly #tensors: Tensor[] = [];

  target(tape: Tape, like: Tensor) {
    const gradient = tape.keep(tape.empty(like.shape, like.dtype));
    this.#tensors.push(gradient);
    return { gradient, accumulate: false };
  }

  free(): void {
    for (const tensor of this.#tensors) tensor.free();
  }
}
