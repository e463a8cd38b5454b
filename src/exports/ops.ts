/**
 * Operations. Each takes a tape first, computes at once and records its backward rule. Shapes are given in brackets
 * beside each operation and in docs/explain/attention.md.
 *
 * @packageDocumentation
 */

export { silu, swiglu } from '../ops/activation/op.js';
export { add } from '../ops/add/op.js';
export type { AttentionInputs, AttentionOutput } from '../ops/attention/branch.js';
export { combine } from '../ops/attention/combine/op.js';
export {
  type BlockLayout,
  compressAverage,
  compressConv,
  compressMlp,
  type MlpParameters,
} from '../ops/attention/compress/op.js';
export { compressedAttention } from '../ops/attention/compressed/op.js';
export { denseAttention } from '../ops/attention/dense/op.js';
export type { DenseOptions } from '../ops/attention/fused/dense.js';
export type { Branch } from '../ops/attention/gate/op.js';
export { type GateOptions, gate, gateStatistics } from '../ops/attention/gate/op.js';
export {
  nativeSparseAttention,
  type OwnedSparseLayout,
  type SparseInputs,
  type SparseLayout,
  type SparseOptions,
  type SparseOutputs,
  sparseLayout,
} from '../ops/attention/nsa.js';
export type { SelectInputs } from '../ops/attention/select/op.js';
export { selectBlocks } from '../ops/attention/select/op.js';
export { type SelectionKernel, selectedAttention } from '../ops/attention/selected/op.js';
export { type ForcedBlocks, type HeadShape, type SparseShape, validateShapes } from '../ops/attention/shape.js';
export { windowAttention } from '../ops/attention/window/op.js';
export type { FusedColumns, LargestMagnitude } from '../ops/common/fused-columns.js';
export { Sequences } from '../ops/common/sequences.js';
export type { ChunkOptions } from '../ops/crossentropy/op.js';
export { crossEntropy, crossEntropyLosses, linearCrossEntropy } from '../ops/crossentropy/op.js';
export { embedding } from '../ops/embedding/op.js';
export type { GradientNorm } from '../ops/gradnorm/op.js';
export { clipFactor, gradientNorm } from '../ops/gradnorm/op.js';
export { linear } from '../ops/linear/op.js';
export { rmsnorm } from '../ops/rmsnorm/op.js';
export type { RotaryScaling, RotaryShape } from '../ops/rope/frequencies.js';
export { type HeadPart, type RotaryOptions, RotaryTable, rotate, splitHeads } from '../ops/rope/op.js';
export { fillIntegers, fillNormal, fillUniform, type RandomSource } from '../tensor/random/op.js';
