/**
 * The parts of models: tensors, the tape, layers, optimizers, operations, and `Trainer`, the loop of `train` for a model,
 * a loss or data of one's own.
 *
 * An operation takes a tape first, computes at once and records its backward rule. Shapes are given in brackets beside each
 * operation and in docs/explain/attention.md.
 *
 * @packageDocumentation
 */

export { writeFinalModel } from '../infer/load.js';
export {
  Attention,
  type AttentionContext,
  type BranchReads,
  type Observer,
  type PhiParameters,
} from '../model/attention.js';
export {
  Block,
  FeedForward,
  type FeedForwardShape,
  type ForwardOptions,
  LanguageModel,
} from '../model/language-model.js';
export { estimateMemory, type MemoryEstimate } from '../model/memory.js';
export { ParameterStore, type StoredParameters } from '../model/parameters.js';
export { type ComputeDtype, type ModelShape, modelShape, type SparseModelShape } from '../model/shape.js';
export { silu, swiglu } from '../ops/activation/op.js';
export { AdamW, type AdamWOptions } from '../ops/adamw/op.js';
export { add } from '../ops/add/op.js';
export type { AttentionInputs, AttentionOutput } from '../ops/attention/branch.js';
export { combine } from '../ops/attention/combine/op.js';
export {
  type Blocks,
  compressAverage,
  compressConv,
  compressMlp,
  type MlpParameters,
} from '../ops/attention/compress/op.js';
export { compressedAttention } from '../ops/attention/compressed/op.js';
export { denseAttention } from '../ops/attention/dense/op.js';
export type { DenseOptions } from '../ops/attention/fused/dense.js';
export type { SelectedPath } from '../ops/attention/fused/forward.js';
export type { FusedOptions } from '../ops/attention/fused/op.js';
export type { Branch } from '../ops/attention/gate/op.js';
export { type GateOptions, gate, gateStatistics } from '../ops/attention/gate/op.js';
export type { GateStatistics } from '../ops/attention/gate/reference.js';
export {
  nativeSparseAttention,
  type SparseInputs,
  type SparseOptions,
  type SparseOutputs,
} from '../ops/attention/nsa.js';
export type { SelectInputs } from '../ops/attention/select/op.js';
export { selectBlocks } from '../ops/attention/select/op.js';
export type { SelectedOptions } from '../ops/attention/selected/op.js';
export { type SelectionKernel, selectedAttention } from '../ops/attention/selected/op.js';
export { type ForcedBlocks, type HeadShape, type SparseShape, validateShapes } from '../ops/attention/shape.js';
export { windowAttention } from '../ops/attention/window/op.js';
export { operand } from '../ops/cast/op.js';
export type { FusedColumns, LargestMagnitude } from '../ops/common/fused-columns.js';
export { Sequences } from '../ops/common/sequences.js';
export type { ChunkOptions } from '../ops/crossentropy/op.js';
export { crossEntropy, crossEntropyLosses, linearCrossEntropy } from '../ops/crossentropy/op.js';
export { embedding } from '../ops/embedding/op.js';
export type { GradientNorm } from '../ops/gradnorm/op.js';
export { clipFactor, gradientNorm } from '../ops/gradnorm/op.js';
export { linear } from '../ops/linear/op.js';
export { Muon, type MuonOptions } from '../ops/muon/op.js';
export { exp, log, mul, scale } from '../ops/pointwise/op.js';
export { rmsnorm } from '../ops/rmsnorm/op.js';
export type { RotaryScaling, RotaryShape } from '../ops/rope/frequencies.js';
export { type HeadPart, type RotaryOptions, RotaryTable, rotate, splitHeads } from '../ops/rope/op.js';
export { slice } from '../ops/slice/op.js';
export { softmax } from '../ops/softmax/op.js';
export { mean, type SumOver, sum } from '../ops/sum/op.js';
export type { Optimizer, OptimizerStep, Trainable, TrainedParameter } from '../tensor/optimizer.js';
export { Parameter } from '../tensor/parameter.js';
export { fillIntegers, fillNormal, fillUniform, type RandomSource } from '../tensor/random/op.js';
export { type GradientTarget, type OutputGradient, Tape, type TapeOptions, withTape } from '../tensor/tape.js';
export { type Dtype, type HostArrays, type Shape, Tensor } from '../tensor/tensor.js';
export { NonFiniteStep, SourceFailed } from '../train/anomalies.js';
export type { TrainingProgress, TrainingState } from '../train/checkpoint.js';
export type { DeviceBatch } from '../train/device-batch.js';
export type { TokenBatch } from '../train/iterable-loader.js';
export type { AttentionStatistics } from '../train/observers.js';
export {
  HostStepper,
  type LossFunction,
  type StepContext,
  type StepGradients,
  type StepInputs,
  type Stepper,
  type StepResult,
  type TrainableModel,
} from '../train/step.js';
export { type BatchSource, type Spike, type Spikes, Trainer, type TrainerOptions } from '../train/trainer.js';
