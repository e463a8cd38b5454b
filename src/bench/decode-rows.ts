/** What `bench decode` and `bench prefill` are asked for and give. */
import type { ModelShape } from '../model/shape.js';

export type Branch = 'cmp' | 'sel' | 'win';

export interface PrefillRow {
  readonly S: number;
  readonly batch: number;
  readonly ms_total: number;
  readonly ms_cmp: number;
  readonly ms_sel: number;
  readonly ms_win: number;
  /** The whole model with dense attention; NaN where it was not measured. */
  readonly ms_dense: number;
  readonly tokens_per_s: number;
}

export interface DecodeRow extends PrefillRow {
  /** Keys read by one token in one layer and group. */
  readonly reads_measured: number;
  readonly reads_predicted: number;
}

export interface DecodeBench {
  readonly shape: ModelShape;
  readonly batch: number;
  readonly runs: number;
  readonly dense: boolean;
}

/** Medians, in milliseconds. */
export interface PrefillTimes {
  readonly ms: number;
  readonly branches: Record<`ms_${Branch}`, number>;
}

export interface StepTimes extends PrefillTimes {
  readonly reads: number;
}

/** `batch` prompts of S tokens, all different. */
export function benchPrompts(shape: ModelShape, batch: number, S: number): number[][] {
  return Array.from({ length: batch }, (_, row) =>
    Array.from({ length: S }, (_, i) => (i * 7919 + row) % shape.vocabSize),
  );
}
