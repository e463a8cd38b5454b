/**
 * Compression: every block of `l` tokens, one each `d` tokens, becomes one key or value. By the mean (`avg`), by a
 * learned weight per channel and position (`conv`), or by a two-layer network over the flattened block (`mlp`).
 */
import { defineKernels } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import { Tensor } from '../../../tensor/tensor.js';
import { silu } from '../../activation/op.js';
import { expectCompressed, type Sequences } from '../../common/sequences.js';
import { expectFloats, expectShape } from '../../common/shapes.js';
import { linear } from '../../linear/op.js';
import { CUDA_BLOCKS_PER_PARTIAL, launchers } from './cuda.js';

const layout = ['ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64', 'i64'] as const; // see layoutArguments
export const signatures = {
  compress_forward: ['ptr', 'ptr', 'ptr', ...layout],
  compress_backward_input: ['ptr', 'ptr', 'ptr', ...layout, 'i64'],
  compress_backward_weight: ['ptr', 'ptr', 'ptr', 'ptr', ...layout, 'i64'],
  unfold_forward: ['ptr', 'ptr', 'ptr', ...layout, 'i64'],
  unfold_backward_input: ['ptr', 'ptr', ...layout, 'i64', 'i64'],
  unfold_backward_position: ['ptr', 'ptr', 'ptr', ...layout, 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Blocks whose weight gradients one task adds up (cpu.cpp: kPartialBlocks). */
const BLOCKS_PER_PARTIAL = { cpu: 64, cuda: CUDA_BLOCKS_PER_PARTIAL };

/** Where the blocks lie: `blocks` = `tokens.compressed(l, d)`. */
export interface BlockLayout {
  readonly tokens: Sequences;
  readonly blocks: Sequences;
  readonly l: number;
  readonly d: number;
}

/** `x` [T,G,D] -> [Tc,G,D]: the mean of each block. */
export function compressAverage(tape: Tape, x: Tensor, layout: BlockLayout): Tensor {
  return weightedSum(tape, x, null, layout);
}

/** `x` [T,G,D], `weight` f32 [l,G,D] -> [Tc,G,D]; weights that are all 1/l give the mean. */
export function compressConv(tape: Tape, x: Tensor, weight: Tensor, layout: BlockLayout): Tensor {
  expectShape('compress: weight', weight, [layout.l, ...x.shape.slice(1)]);
  return weightedSum(tape, x, weight, layout);
}

/** `position` f32 [l,G,D], `w1` [hidden, l*D], `w2` [D, hidden] of x's dtype; the groups share the two layers. */
export interface MlpParameters {
  readonly position: Tensor;
  readonly w1: Tensor;
  readonly w2: Tensor;
}

/** `x` [T,G,D] -> [Tc,G,D]: w2 silu(w1 (block + position)). */
export function compressMlp(tape: Tape, x: Tensor, { position, w1, w2 }: MlpParameters, layout: BlockLayout): Tensor {
  const [, groups, size] = x.shape;
  const [hidden] = expectShape('compress: w1', w1, [-1, layout.l * size], x.dtype);
  expectShape('compress: w2', w2, [size, hidden], x.dtype);
  const unfolded = unfold(tape, x, position, layout);
  const inner = linear(tape, unfolded, w1);
  tape.drop(unfolded);
  const active = silu(tape, inner);
  tape.drop(inner);
  const y = linear(tape, active, w2);
  tape.drop(active);
  return y.reshape([layout.blocks.total, groups, size]);
}

/** `x` [T,G,D], `position` f32 [l,G,D] -> [Tc*G, l*D]: one row for each (block, group), the positions added. */
export function unfold(tape: Tape, x: Tensor, position: Tensor, layout: BlockLayout): Tensor {
  const [, groups, size] = checkLayout(x, layout);
  expectShape('compress: position', position, [layout.l, groups, size]);
  const kernel = tape.device.kernels(kernels);
  const out = tape.empty([layout.blocks.total * groups, layout.l * size], x.dtype);
  const where = layoutArguments(layout, groups * size);
  kernel.unfold_forward(x, position, out, ...where, groups);
  tape.record([x, position], [out], [], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const dx = tape.gradientTarget(x);
    if (dx) kernel.unfold_backward_input(dOut, dx.gradient, ...where, groups, Number(dx.accumulate));
    const dPosition = tape.gradientTarget(position);
    if (!dPosition) return;
    const partial = emptyPartials(tape, layout, groups * size);
    const { gradient, accumulate } = dPosition;
    kernel.unfold_backward_position(dOut, gradient, partial, ...where, groups, Number(accumulate));
    partial.free();
  });
  return out;
}

function weightedSum(tape: Tape, x: Tensor, weight: Tensor | null, layout: BlockLayout): Tensor {
  const [, groups, size] = checkLayout(x, layout);
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([layout.blocks.total, groups, size], x.dtype);
  const where = layoutArguments(layout, groups * size);
  kernel.compress_forward(x, weight, y, ...where);
  tape.record([x, weight], [y], weight ? [x, weight] : [], () => {
    const dy = tape.gradient(y);
    if (!dy) return;
    const dx = tape.gradientTarget(x);
    if (dx) kernel.compress_backward_input(dy, weight, dx.gradient, ...where, Number(dx.accumulate));
    const dWeight = weight && tape.gradientTarget(weight);
    if (!dWeight) return;
    const partial = emptyPartials(tape, layout, groups * size);
    const { gradient, accumulate } = dWeight;
    kernel.compress_backward_weight(dy, x, gradient, partial, ...where, Number(accumulate));
    partial.free();
  });
  return y;
}

function checkLayout(x: Tensor, { tokens, blocks, l, d }: BlockLayout) {
  expectCompressed('compress', tokens, blocks, { l, d });
  return expectFloats('compress: x', x, [tokens.total, -1, -1]);
}

function layoutArguments({ tokens, blocks, l, d }: BlockLayout, width: number) {
  return [tokens.offsets, blocks.offsets, tokens.count, tokens.total, blocks.total, l, d, width] as const;
}

function emptyPartials(tape: Tape, { blocks, l }: BlockLayout, width: number): Tensor {
  return Tensor.empty(tape.device, [Math.ceil(blocks.total / BLOCKS_PER_PARTIAL[tape.device.kind]), l, width]);
}
