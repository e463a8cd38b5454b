/**
 * Train, run and watch long-context language models with Native Sparse Attention.
 *
 * This entry point holds what a program needs first: devices, configs, training, text, errors. Tensors, layers, optimizers and
 * operations are in `trefoil/nn`, kernels of one's own in `trefoil/device`; `trefoil/data`, `trefoil/run`, `trefoil/bench`,
 * `trefoil/verify` and `trefoil/serve` are named by their subjects. docs/reference/api.md shows how the parts fit together.
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
export type { Device, DeviceKind } from './device/device.js';
export type { CompileProgress } from './device/kernel-cache.js';
export { type OpenDeviceOptions, openDevice } from './device/open.js';
export { ExitCode, TrefoilError, UsageError } from './errors.js';
export { Chat, type ChatOptions, type ChatTool, Conversation } from './infer/chat.js';
export { createEngine } from './infer/engine/create.js';
export type { Engine, EngineOptions, EngineStats, EventSink } from './infer/engine/interface.js';
export {
  type EngineEvent,
  type EngineRequest,
  type FinishReason,
  type PositionLogprobs,
  type RefusalReason,
  RequestRefused,
  type RequestUsage,
  type TokenLogprob,
  type TokenMask,
} from './infer/engine/request.js';
export type { SamplingOptions } from './infer/engine/sampler.js';
export { generate, generateAll } from './infer/generate.js';
export { type LoadedModel, type LoadOptions, loadModel } from './infer/load.js';
export type { JsonSchema } from './infer/structured/schema.js';
export type { ResponseFormat } from './infer/structured/structured-output.js';
export type { TextSource } from './infer/text-source.js';
export type { GenerateOptions, Generation, TextPiece } from './infer/texts.js';
export type { Terminal } from './live-line.js';
export type { OwnMetrics } from './run/metrics.js';
export type { Evaluation } from './train/evaluation.js';
export type {
  CheckpointRecord,
  EvaluationRecord,
  RunCallbacks,
  TrainOptions,
  TrainResult,
  TrainStatus,
} from './train/options.js';
export type { SignalSource } from './train/signals.js';
export { train } from './train/train.js';
export type { TrainingStep } from './train/trainer.js';
