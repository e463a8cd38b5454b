/** Options and rows of `bench decode` and `bench prefill`, and the caches and prompts they measure with. */
import type { Config } from '../config/schema.js';
import type { CachedSequence, DecodeCache } from '../model/cache.js';
import { headShapeOf, layerShapes, type ModelShape } from '../model/shape.js';
import { type NewTokens, storePages } from '../ops/attention/decode/paged/op.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import type { SelectionKernel } from '../ops/attention/selected/op.js';
import { castInto } from '../ops/cast/op.js';
import { fillNormal } from '../tensor/random/op.js';
import { Tensor } from '../tensor/tensor.js';

export type Branch = 'cmp' | 'sel' | 'win';

/** Times of one length and batch; the branches are NaN where none of their kernels ran. */
export interface CacheRow {
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

export interface PrefillRow extends CacheRow {
  /** The kernel of the selected branch that was asked for. */
  readonly kernel: SelectionKernel;
  /** The kernels that ran. */
  readonly ran: string;
}

export interface DecodeRow extends CacheRow {
  /** Keys read by one token in one layer and group. */
  readonly reads_measured: number;
  readonly reads_predicted: number;
}

export interface DecodeBench {
  /** Which kernels read prompts. */
  readonly config: Pick<Config, 'runtime' | 'model' | 'nsa'>;
  /** Kernels of the selected branch to compare. Default: that of the config. */
  readonly kernels?: readonly SelectionKernel[] | undefined;
  readonly shape: ModelShape;
  readonly batch: number;
  readonly runs: number;
  readonly dense: boolean;
}

/** Measurements of one model. */
export interface ModelBench extends Omit<DecodeBench, 'dense' | 'config' | 'kernels'> {
  readonly lengths: readonly number[];
  readonly kernels?: SparseOptions | undefined;
  /** Tokens of a prompt that are read at a time. Default: all. */
  readonly tile?: number | null | undefined;
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

/** Fills a cache with random keys and values: a prefill would take much longer than what is measured. */
export function fillCache(cache: DecodeCache, sequences: readonly CachedSequence[], length: number): void {
  const { device, shape, dtype } = cache;
  const { groups, dk, dv } = headShapeOf(shape);
  let stream = 0;
  const random = (rows: number, size: number) => {
    const tensor = Tensor.empty(device, [rows, groups, size]);
    stream += 1;
    fillNormal(tensor, { seed: 1, stream });
    if (dtype === 'f32') return tensor;
    const rounded = Tensor.empty(device, tensor.shape, dtype);
    castInto(device, tensor, rounded);
    tensor.free();
    return rounded;
  };
  const step = cache.begin(
    sequences,
    sequences.map(() => length),
  );
  const fill = (kind: 'sel' | 'win' | 'cmp', layer: number, tokens: NewTokens) => {
    const [k, v] = [random(tokens.sequences.total, dk), random(tokens.sequences.total, dv)];
    storePages(device, k, v, step.pages(kind, layer), tokens);
    k.free();
    v.free();
  };
  for (const [layer, { attention }] of layerShapes(shape).entries()) {
    fill('win', layer, step.tokens);
    if (attention !== 'nsa') continue;
    fill('sel', layer, step.tokens);
    fill('cmp', layer, step.blocks);
  }
  step.commit();
  step.free();
}
