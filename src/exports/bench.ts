/**
 * Measurements of training steps and of attention.
 *
 * @packageDocumentation
 */

export {
  type AttentionBench,
  type AttentionRow,
  benchLength as benchAttention,
  benchLinear,
} from '../bench/attention.js';
export { measurePeak } from '../bench/peak/op.js';
export type { Pass as BenchPass, What as AttentionPart } from '../bench/subject.js';
export type { Budget as TimeBudget } from '../bench/timing.js';
export type { StepHooks } from '../bench/train.js';
export { measureTraining as benchTraining, type StepBudget, type StepTime } from '../bench/train.js';
export { type CaseChoice, type TrainCase, trainCases } from '../bench/train-cases.js';
export type { Environment as EnvironmentVariables } from '../environment.js';
export type { Precision as StepPrecision } from '../model/shape.js';
