/** The public API (docs/reference/api.md). Names are added here on purpose only: test/api.test.ts holds the list. */

export {
  type AttentionBench,
  type AttentionRow,
  benchLength as benchAttention,
  benchLinear,
} from './bench/attention.js';
export { measurePeak } from './bench/peak/op.js';
export { measureTraining as benchTraining, type StepBudget, type StepTime } from './bench/train.js';
export { type CaseChoice, type TrainCase, trainCases } from './bench/train-cases.js';
export { readConfig } from './config/load.js';
export { parseConfig } from './config/parse.js';
export type { Config, ConfigInput } from './config/schema.js';
export type { Batch } from './data/batch.js';
export { createLoader, type Loader, type LoaderOptions } from './data/loader.js';
export { createTokenizer, type Tokenizer } from './data/tokenizer.js';
export { CpuDevice, type CpuOptions } from './device/cpu/cpu.js';
export { CudaDevice, type CudaOptions, cudaAbsence } from './device/cuda/cuda.js';
export type { Device, DeviceKind } from './device/device.js';
export { ExitCode, TrefoilError, UsageError } from './errors.js';
export { prefill, readTokens } from './infer/decode.js';
export {
  type FinishReason,
  type GenerateOptions,
  type Generation,
  generate,
  generateAll,
  type TextPiece,
} from './infer/generate.js';
export { type LoadedModel, loadModel, writeFinalModel } from './infer/load-model.js';
export type { SamplingOptions } from './infer/sampler.js';
export { type AttentionContext, type AttentionModule, createAttention, type Observer } from './model/attention.js';
export { type CachedSequence, DecodeCache } from './model/cache.js';
export { type ForwardOptions, LanguageModel } from './model/language-model.js';
export { estimateMemory, type MemoryEstimate } from './model/memory.js';
export { ParameterStore } from './model/parameters.js';
export { type ModelShape, modelShape } from './model/shape.js';
export { silu, swiglu } from './ops/activation/op.js';
export { AdamW } from './ops/adamw/op.js';
export { add } from './ops/add/op.js';
export type { AttentionInputs, AttentionOutput } from './ops/attention/branch.js';
export { combine } from './ops/attention/combine/op.js';
export { compressAverage, compressConv, compressMlp } from './ops/attention/compress/op.js';
export { compressedAttention } from './ops/attention/compressed/op.js';
export { denseAttention } from './ops/attention/dense/op.js';
export { type GateOptions, gate, gateStatistics } from './ops/attention/gate/op.js';
export {
  nativeSparseAttention,
  type SparseInputs,
  type SparseLayout,
  type SparseOutputs,
  sparseLayout,
} from './ops/attention/nsa.js';
export { selectBlocks } from './ops/attention/select/op.js';
export { type SelectionKernel, selectedAttention } from './ops/attention/selected/op.js';
export { type HeadShape, type SparseShape, validateShapes } from './ops/attention/shape.js';
export { windowAttention } from './ops/attention/window/op.js';
export { Sequences } from './ops/common/sequences.js';
export { crossEntropy, crossEntropyLosses, linearCrossEntropy } from './ops/crossentropy/op.js';
export { embedding } from './ops/embedding/op.js';
export { clipFactor, gradientNorm } from './ops/gradnorm/op.js';
export { linear } from './ops/linear/op.js';
export { rmsnorm } from './ops/rmsnorm/op.js';
export { rotate, splitHeads } from './ops/rope/op.js';
export { type FoundCheckpoint, findCheckpoint } from './run/checkpoint/find.js';
export { readCsv, TRAINING_CSV, VAL_CSV } from './run/logs/csv.js';
export { type Heartbeat, readHeartbeats } from './run/logs/heartbeat.js';
export { type RunPaths, runPaths, writeHalt } from './run/paths.js';
export { readSafetensors, writeSafetensors } from './run/safetensors.js';
export { Parameter } from './tensor/parameter.js';
export { fillIntegers, fillNormal, fillUniform } from './tensor/random/op.js';
export { Tape } from './tensor/tape.js';
export { type Dtype, type Shape, Tensor } from './tensor/tensor.js';
export type { DeviceBatch } from './train/batches.js';
export type { Evaluation } from './train/evaluate.js';
export { type RankIdentity, resolveRank } from './train/ranks/identity.js';
export { openWorld, type World } from './train/ranks/world.js';
export type { CheckpointRecord, EvaluationRecord, StepRecord } from './train/records.js';
export {
  HostStepper,
  type LossFunction,
  type StepContext,
  type StepInputs,
  type Stepper,
  type StepResult,
  type TrainableModel,
} from './train/step.js';
export { type TrainOptions, type TrainResult, type TrainStatus, train } from './train/train.js';
export {
  type BatchSource,
  NonFiniteStep,
  SourceFailed,
  type TokenBatch,
  Trainer,
  type TrainerOptions,
  type TrainingStep,
} from './train/trainer.js';
export { attend, attendReference } from './verify/attend.js';
export { type CaseFile, type CaseResult, readCase } from './verify/case-file.js';
export {
  checksFor,
  type Row as VerifyRow,
  type Summary as VerifySummary,
  summarize,
  verifyDevice,
} from './verify/verify.js';
