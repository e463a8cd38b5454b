/**
 * Compression: every block of `l` tokens, one each `d` tokens, becomes one key or value. By the mean (`avg`), by a
 * learned weight per channel and position (`conv`), or by a two-layer network over the flattened block (`mlp`).
 */
import { defineKernels } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import { Tensor } from '../../../tensor/tensor.js';
import { silu } from '../../activation/op.js';
import type { Sequences } from '../../common/sequences.js';
import { expectFloats, expectShape } from '../../common/shapes.js';
import { linear } from '../../linear/op.js';
import { CUDA_BLOCKS_PER_PARTIAL, launchers } from './cuda.js';

const place = ['ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const; // see blockArguments
export const signatures = {
  compress_forward: ['ptr', 'ptr', 'ptr', ...place],
  compress_backward_input: ['ptr', 'ptr', 'ptr', ...place, 'i64'],
  compress_backward_weight: ['ptr', 'ptr', 'ptr', 'ptr', ...place, 'i64'],
  unfold_forward: ['ptr', 'ptr', 'ptr', ...place, 'i64'],
  unfold_backward_input: ['ptr', 'ptr', ...place, 'i64', 'i64'],
  unfold_backward_position: ['ptr', 'ptr', 'ptr', ...place, 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Blocks whose weight gradients one task adds up (cpu.cpp: kPartialBlocks). */
const BLOCKS_PER_PARTIAL = { cpu: 64, cuda: CUDA_BLOCKS_PER_PARTIAL };

/** The blocks of a compression: `l` tokens each, one every `d` tokens of each sequence. */
export interface Blocks {
  readonly tokens: Sequences;
  readonly l: number;
  readonly d: number;
}

/** `x` [T,G,D] -> [Tc,G,D]: the mean of each block. */
export function compressAverage(tape: Tape, x: Tensor, blocks: Blocks): Tensor {
  return weightedSum(tape, x, null, blocks);
}

/** `x` [T,G,D], `weight` f32 [l,G,D] -> [Tc,G,D]; weights that are all 1/l give the mean. */
export function compressConv(tape: Tape, x: Tensor, weight: Tensor, blocks: Blocks): Tensor {
  expectShape('compress: weight', weight, [blocks.l, ...x.shape.slice(1)]);
  return weightedSum(tape, x, weight, blocks);
}

/** `position` f32 [l,G,D], `w1` [hidden, l*D], `w2` [D, hidden] of x's dtype; the groups share the two layers. */
export interface MlpParameters {
  readonly position: Tensor;
  readonly w1: Tensor;
  readonly w2: Tensor;
}

/** `x` [T,G,D] -> [Tc,G,D]: w2 silu(w1 (block + position)). */
export function compressMlp(tape: Tape, x: Tensor, { position, w1, w2 }: MlpParameters, blocks: Blocks): Tensor {
  const [, groups, size] = x.shape;
  const [hidden] = expectShape('compress: w1', w1, [-1, blocks.l * size], x.dtype);
  expectShape('compress: w2', w2, [size, hidden], x.dtype);
  const unfolded = unfold(tape, x, position, blocks);
  const inner = linear(tape, unfolded, w1);
  tape.drop(unfolded);
  const active = silu(tape, inner);
  tape.drop(inner);
  const y = linear(tape, active, w2);
  tape.drop(active);
  return y.reshape([countOf(blocks), groups, size]);
}

/** `x` [T,G,D], `position` f32 [l,G,D] -> [Tc*G, l*D]: one row for each (block, group), the positions added. */
export function unfold(tape: Tape, x: Tensor, position: Tensor, blocks: Blocks): Tensor {
  const [, groups, size] = expectTokens(x, blocks);
  expectShape('compress: position', position, [blocks.l, groups, size]);
  const kernel = tape.device.kernels(kernels);
  const out = tape.empty([countOf(blocks) * groups, blocks.l * size], x.dtype);
  const where = blockArguments(blocks, groups * size);
  kernel.unfold_forward(x, position, out, ...where, groups);
  tape.record([x, position], [out], [], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const dx = tape.gradientTarget(x);
    if (dx) kernel.unfold_backward_input(dOut, dx.gradient, ...where, groups, Number(dx.accumulate));
    const dPosition = tape.gradientTarget(position);
    if (!dPosition) return;
    const partial = emptyPartials(tape, blocks, groups * size);
    const { gradient, accumulate } = dPosition;
    kernel.unfold_backward_position(dOut, gradient, partial, ...where, groups, Number(accumulate));
    partial.free();
  });
  return out;
}

function weightedSum(tape: Tape, x: Tensor, weight: Tensor | null, blocks: Blocks): Tensor {
  const [, groups, size] = expectTokens(x, blocks);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([countOf(blocks), groups, size], x.dtype);
  const where = blockArguments(blocks, groups * size);
  kernel.compress_forward(x, weight, y, ...where);
  tape.record([x, weight], [y], weight ? [x, weight] : [], () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    const dx = tape.gradientTarget(x);
    if (dx) kernel.compress_backward_input(dy, weight, dx.gradient, ...where, Number(dx.accumulate));
    const dWeight = weight && tape.gradientTarget(weight);
    if (!dWeight) return;
    const partial = emptyPartials(tape, blocks, groups * size);
    const { gradient, accumulate } = dWeight;
    kernel.compress_backward_weight(dy, x, gradient, partial, ...where, Number(accumulate));
    partial.free();
  });
  return y;
}

function expectTokens(x: Tensor, { tokens }: Blocks) {
  return expectFloats('compress: x', x, [tokens.total, -1, -1]);
}

function countOf({ tokens, ...size }: Blocks): number {
  return tokens.compressed(size).total;
}

function blockArguments({ tokens, l, d }: Blocks, width: number) {
  const { offsets, total } = tokens.compressed({ l, d });
  return [tokens.offsets, offsets, tokens.count, tokens.total, total, l, d, width] as const;
}

function emptyPartials(tape: Tape, blocks: Blocks, width: number): Tensor {
  const partials = Math.ceil(countOf(blocks) / BLOCKS_PER_PARTIAL[tape.device.kind]);
  return Tensor.empty(tape.device, [partials, blocks.l, width]);
}
