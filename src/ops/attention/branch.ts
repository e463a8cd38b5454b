/** Common code of the branches: checked inputs, the kernel arguments and the backward rule. */
import type { StructArgument } from '../../device/device.js';
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

/** The arguments of every branch kernel: `AttentionArguments` of attention.h, whose fields have this order. */
export interface AttentionArguments {
  readonly q: Tensor;
  readonly k: Tensor;
  readonly v: Tensor;
  /** Where each sequence begins, in tokens and in keys. */
  readonly offsets: Tensor;
  readonly keyOffsets: Tensor;
  readonly out: Tensor;
  readonly lse: Tensor;
  /** Null in the forward pass. */
  readonly dOut: Tensor | null;
  readonly dq: Tensor | null;
  readonly dKeys: Tensor | null;
  readonly dValues: Tensor | null;
  readonly sequences: number;
  readonly heads: number;
  readonly groups: number;
  readonly dk: number;
  readonly dv: number;
  /** 1 where a gradient is added to the existing one instead of overwriting it. */
  readonly accumulateQ: number;
  readonly accumulateK: number;
  readonly accumulateV: number;
}

interface BranchCall {
  /** Names the operation in error messages. */
  readonly name: string;
  readonly tokens: Sequences;
  readonly keys: Sequences;
  /** Tensors that `backward` reads besides the inputs and outputs. */
  readonly saved?: readonly Tensor[];
  readonly forward: (given: StructArgument) => void;
  readonly backward: (given: StructArgument) => void;
}

/** A branch whose backward rule is not recorded yet. */
export interface UnrecordedBranch extends AttentionOutput {
  /** Records the rule; `also` computes more than the branch's own gradients. */
  record(also?: ExtendedBackward): void;
}

/** A backward kernel of a branch that adds the gradient of something else. */
export interface ExtendedBackward {
  /** Tensors it reads besides those of the branch. */
  readonly saved: readonly Tensor[];
  backward(given: StructArgument): void;
}

/** Runs one branch and records its backward rule. */
export function attendBranch(tape: Tape, inputs: AttentionInputs, call: BranchCall): AttentionOutput {
  const { out, lse, record } = startBranch(tape, inputs, call);
  record();
  return { out, lse };
}

/** Runs one branch. */
export function startBranch(tape: Tape, inputs: AttentionInputs, call: BranchCall): UnrecordedBranch {
  const { tokens, keys, saved = [] } = call;
  const { heads, groups, dk, dv } = headShape(call.name, inputs, tokens, keys);
  const { q, k, v } = inputs;
  const out = tape.empty([tokens.total, heads, dv], q.dtype);
  const lse = tape.empty([tokens.total, heads]);
  const given: AttentionArguments = {
    q,
    k,
    v,
    offsets: tokens.offsets,
    keyOffsets: keys.offsets,
    out,
    lse,
    dOut: null,
    dq: null,
    dKeys: null,
    dValues: null,
    sequences: tokens.count,
    heads,
    groups,
    dk,
    dv,
    accumulateQ: 0,
    accumulateK: 0,
    accumulateV: 0,
  };
  call.forward({ ...given });
  const record = (also: ExtendedBackward = { saved: [], backward: call.backward }) =>
    recordAttention(tape, inputs, { out, lse }, [...saved, ...also.saved], (dOut, gradients) => {
      const [accumulateQ, accumulateK, accumulateV] = gradients.flags;
      const { dq, dk: dKeys, dv: dValues } = gradients;
      also.backward({ ...given, dOut, dq, dKeys, dValues, accumulateQ, accumulateK, accumulateV });
    });
  return { out, lse, record };
}

/** Gradients a kernel must fill, with its accumulate flags. Inputs that need no gradient get temporary memory. */
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
    const unused = new DiscardedGradients();
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

/** Temporary memory for gradients that are computed but not needed. */
class DiscardedGradients {
  readonly #tensors: Tensor[] = [];

  target(tape: Tape, like: Tensor) {
    const gradient = tape.release(tape.empty(like.shape, like.dtype));
    this.#tensors.push(gradient);
    return { gradient, accumulate: false };
  }

  free(): void {
    for (const tensor of this.#tensors) tensor.free();
  }
}
