/**
 * Train, run and watch long-context language models with Native Sparse Attention.
 *
 * This entry point holds what most programs need. More is in `trefoil/ops` (operations and attention), `trefoil/data`
 * (tokenizers and batches), `trefoil/run` (files of a run, ranks), `trefoil/bench`, `trefoil/verify` and `trefoil/serve`. The lists are
 * fixed by test/api.test.ts.
 *
 * @packageDocumentation
 */

export { readConfig } from './config/load.js';
export { parseConfig } from './config/parse.js';
export type {
  Config,
  ConfigInput,
  DataConfig,
  ModelConfig,
  NsaConfig,
  RuntimeConfig,
  TrainConfig,
} from './config/schema.js';
export type { LoaderTelemetry } from './data/loader.js';
export type { StreamDecoder, Tokenizer } from './data/tokenizer.js';
export type { TokenBuffer } from './data/tokenizers/token-buffer.js';
export type { Compiler, CompilerOptions, KernelCompiler } from './device/cpu/compile.js';
export { CpuDevice, type CpuOptions } from './device/cpu/cpu.js';
export { cudaAbsence } from './device/cuda/cuda.js';
export type {
  CudaCode,
  CudaRuntime,
  Floating,
  LaunchArgument,
  LaunchShape,
  Macros as KernelMacros,
  MatrixProduct,
} from './device/cuda/runtime.js';
export type {
  Addressable,
  Argument as KernelArgument,
  Arguments,
  Block as MemoryBlock,
  Device,
  DeviceKind,
  KernelModule,
  Kernels,
  MemoryUse,
  StructArgument,
} from './device/device.js';
export type { CompileProgress } from './device/kernel-cache.js';
export { type OpenDeviceOptions, openDevice } from './device/open.js';
export type { Allocation, Allocator, MemoryPool } from './device/pool.js';
export { ExitCode, TrefoilError, UsageError } from './errors.js';
export { type DecodeOptions, prefill, readTokens } from './infer/decode.js';
export { createEngine } from './infer/engine/engine.js';
export type { Engine, EngineOptions, EngineStats, EventSink } from './infer/engine/interface.js';
export {
  type EngineEvent,
  type EngineRequest,
  type PositionLogprobs,
  type RefusalReason,
  RequestRefused,
  type RequestUsage,
  type TokenLogprob,
  type TokenMask,
} from './infer/engine/request.js';
export {
  type FinishReason,
  type GenerateOptions,
  type Generation,
  generate,
  generateAll,
  type TextPiece,
  type TextSource,
} from './infer/generate.js';
export { type LoadedModel, loadModel, writeFinalModel } from './infer/load-model.js';
export type { SamplingOptions } from './infer/sampler.js';
export type { JsonSchema } from './infer/structured/schema.js';
export type { ResponseFormat } from './infer/structured/structured-output.js';
export type { Terminal as ProgressTerminal } from './live-line.js';
export {
  Attention,
  type AttentionContext,
  type BranchReads,
  type Observer,
  type PhiParameters,
} from './model/attention.js';
export type { Kind as PageKind, KindLayout } from './model/cache.js';
export { type CachedSequence, type CacheStep, DecodeCache, type WholeSequence } from './model/cache.js';
export {
  Block,
  FeedForward,
  type FeedForwardShape,
  type ForwardOptions,
  LanguageModel,
} from './model/language-model.js';
export { estimateMemory, type MemoryEstimate } from './model/memory.js';
export type { Page, PageList, PageStore } from './model/pages.js';
export { ParameterStore } from './model/parameters.js';
export { type ComputeDtype, type ModelShape, modelShape, type SparseModelShape } from './model/shape.js';
export type { SparseStartState } from './model/sparse-start.js';
export { AdamW, type AdamWOptions } from './ops/adamw/op.js';
export type { AttentionCounters, AttentionCounts } from './ops/attention/counters.js';
export type { NewTokens, Pages as CachePages } from './ops/attention/decode/paged/op.js';
export type { SelectedPath } from './ops/attention/fused/forward.js';
export type { FusedOptions } from './ops/attention/fused/op.js';
export type { GateStatistics } from './ops/attention/gate/reference.js';
export { type OwnedSparseLayout, type SparseLayout, type SparseOptions, sparseLayout } from './ops/attention/nsa.js';
export type { SelectedOptions } from './ops/attention/selected/op.js';
export type { SelectionStatistics } from './ops/attention/selection-counts/op.js';
export { Sequences } from './ops/common/sequences.js';
export { Muon, type MuonOptions } from './ops/muon/op.js';
export type { SavedCheckpoint, SaveOptions } from './run/checkpoint/save.js';
export type { SectionName } from './run/logs/heartbeat.js';
export type { DeviceStep, Optimizer, OptimizerStep, Trainable, TrainedParameter } from './tensor/optimizer.js';
export { Parameter } from './tensor/parameter.js';
export type { ParameterStack } from './tensor/parameter-stack.js';
export type { GradientTarget } from './tensor/tape.js';
export { type OutputGradient, Tape, type TapeOptions, withTape } from './tensor/tape.js';
export type { GradientSlot, Storage } from './tensor/tensor.js';
export { type Dtype, type HostArrays, type Shape, Tensor } from './tensor/tensor.js';
export { NonFiniteStep, SourceFailed } from './train/anomalies.js';
export type { Progress as TrainingProgress, TrainingState } from './train/checkpoint.js';
export type { Evaluation } from './train/evaluate.js';
export type { TokenBatch } from './train/iterable-loader.js';
export type { AttentionStatistics, Observed as StepObservations } from './train/observers.js';
export type {
  CheckpointRecord,
  EvaluationRecord,
  RunCallbacks,
  StepRecord,
  TrainOptions,
  TrainResult,
  TrainStatus,
} from './train/options.js';
export type { Agreement } from './train/ranks/agreement.js';
export type { SignalSource } from './train/signals.js';
export type { BatchUploader, DeviceBatch, GradientExchange, StepGradients } from './train/step.js';
export {
  HostStepper,
  type LossFunction,
  type StepContext,
  type StepInputs,
  type Stepper,
  type StepResult,
  type TrainableModel,
} from './train/step.js';
export { train } from './train/train.js';
export type { Spike as LossSpike, Spikes } from './train/trainer.js';
export {
  type BatchSource,
  Trainer,
  type TrainerOptions,
  type TrainingStep,
} from './train/trainer.js';
