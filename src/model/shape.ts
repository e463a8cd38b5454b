/** What decides a model's parameters and maths: the `model` and `nsa` sections of a config with the vocabulary filled in. */
import type { Config } from '../config/schema.js';
import { type HeadShape, type SparseShape, validateShapes } from '../ops/attention/shape.js';

export interface ModelShape extends Omit<Config['model'], 'vocab_size'> {
  readonly vocab_size: number;
  readonly nsa: Config['nsa'];
}

/** A large vocabulary is rounded up to whole rows of a GPU's matrix units: 50,257 as it is would halve their speed. */
const VOCABULARY_STEP = 64;
const LARGE_VOCABULARY = 4096;

/** Rows of the embedding; those beyond the tokenizer's are never a target and never drawn. */
function roundedVocabulary(tokens: number): number {
  return tokens > LARGE_VOCABULARY ? Math.ceil(tokens / VOCABULARY_STEP) * VOCABULARY_STEP : tokens;
}

/** `vocabulary` is the tokenizer's; model.vocab_size may ask for more rows, never for fewer. */
export function modelShape(config: Pick<Config, 'model' | 'nsa'>, vocabulary: number): ModelShape {
  const rows = config.model.vocab_size ?? roundedVocabulary(vocabulary);
  const shape = { ...config.model, vocab_size: rows, nsa: config.nsa };
  validateShapes(headShapeOf(shape), sparseShapeOf(shape));
  return shape;
}

/** The first key in which two shapes differ, as `key: a and b`; null when they are equal. */
export function shapeDifference(a: ModelShape, b: ModelShape): string | null {
  const flat = ({ nsa, ...model }: ModelShape) =>
    new Map<string, unknown>([
      ...Object.entries(model),
      ...Object.entries(nsa).map(([key, value]) => [`nsa.${key}`, value] as const),
    ]);
  const [first, second] = [flat(a), flat(b)];
  for (const [key, value] of first) if (value !== second.get(key)) return `${key}: ${value} and ${second.get(key)}`;
  return null;
}

export function headShapeOf({ n_heads, n_kv_groups, d_k, d_v }: ModelShape): HeadShape {
  return { heads: n_heads, groups: n_kv_groups, dk: d_k, dv: d_v };
}

export function sparseShapeOf({ nsa }: ModelShape): SparseShape {
  return { l: nsa.l, d: nsa.d, lSel: nsa.l_sel, nSel: nsa.n_sel, w: nsa.w };
}

/** Width of the feed-forward layer. */
export function hiddenSize({ dim, mlp_ratio }: ModelShape): number {
  return Math.round(dim * mlp_ratio);
}

/** Width of phi's hidden layer (nsa.phi: mlp). */
export function phiHiddenSize({ nsa, d_k }: ModelShape): number {
  return nsa.phi_hidden ?? 2 * d_k;
}
