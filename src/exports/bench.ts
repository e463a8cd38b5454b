/**
 * Measurements of training steps and of attention.
 *
 * @packageDocumentation
 */

export {
  type AttentionBench,
  type AttentionRow,
  benchAttention,
  benchLinear,
} from '../bench/attention.js';
export { measurePeak } from '../bench/peak/op.js';
export type { AttentionPart, BenchPass } from '../bench/subject.js';
export type { TimeBudget } from '../bench/timing.js';
export type { StepHooks } from '../bench/train.js';
export { benchTraining, type StepBudget, type StepTime } from '../bench/train.js';
export { type CaseChoice, type TrainCase, trainCases } from '../bench/train-cases.js';
export type { StepPrecision } from '../model/shape.js';
