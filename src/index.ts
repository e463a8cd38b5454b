/** The public API: tensors, operations, the attention module, the model. */
export { parseConfig } from './config/parse.js';
export type { Config } from './config/schema.js';
export { CpuDevice, type CpuOptions } from './device/cpu/cpu.js';
export type { Device, DeviceKind } from './device/device.js';
export { ExitCode, TrefoilError, UsageError } from './errors.js';
export { type AttentionContext, type AttentionModule, createAttention, type Observer } from './model/attention.js';
export { type ForwardOptions, LanguageModel } from './model/language-model.js';
export { ParameterStore } from './model/parameters.js';
export { type ModelShape, modelShape } from './model/shape.js';
export { silu, swiglu } from './ops/activation/op.js';
export { AdamW } from './ops/adamw/op.js';
export { add } from './ops/add/op.js';
export { type HeadShape, type SparseShape, validateShapes } from './ops/attention.js';
export type { AttentionInputs, AttentionOutput } from './ops/attention-op.js';
export { combine } from './ops/combine/op.js';
export { compressAverage, compressConv, compressMlp } from './ops/compress/op.js';
export { compressedAttention } from './ops/compressed/op.js';
export { crossEntropy, crossEntropyLosses, linearCrossEntropy } from './ops/crossentropy/op.js';
export { denseAttention } from './ops/dense/op.js';
export { embedding } from './ops/embedding/op.js';
export { type GateOptions, gate, gateStatistics } from './ops/gate/op.js';
export { clipFactor, gradientNorm } from './ops/gradnorm/op.js';
export { linear } from './ops/linear/op.js';
export {
  nativeSparseAttention,
  type SparseInputs,
  type SparseLayout,
  type SparseOutputs,
  sparseLayout,
} from './ops/nsa.js';
export { rmsnorm } from './ops/rmsnorm/op.js';
export { rotate, splitHeads } from './ops/rope/op.js';
export { selectBlocks } from './ops/select/op.js';
export { type SelectionKernel, selectedAttention } from './ops/selected/op.js';
export { Sequences } from './ops/sequences.js';
export { windowAttention } from './ops/window/op.js';
export { Parameter } from './tensor/parameter.js';
export { fillIntegers, fillNormal, fillUniform } from './tensor/random/op.js';
export { Tape } from './tensor/tape.js';
export { type Dtype, type Shape, Tensor } from './tensor/tensor.js';
