/** Precision of the products of a training step. */
export type StepPrecision = 'fp32' | 'bf16' | 'fp8';

export function stepPrecision(
  runtime: Pick<Config['runtime'], 'precision' | 'fp8'>,
  on: Device['kind'],
): StepPrecision {
  if (computeDtype(runtime, on) === 'f32') return 'fp32';
  return runtime.fp8 ? 'fp8' : 'bf16';
}

/**
 * The settings that decide a model's parameters and maths: the `model` and `nsa` sections of a config with the
 * vocabulary filled in.
 */
import type { Config } from '../config/schema.js';
import type { Device } from '../device/device.js';
import { type HeadShape, type SparseShape, validateShapes } from '../ops/attention/shape.js';
import type { RotaryScaling, RotaryShape } from '../ops/rope/frequencies.js';

/** The number type of computations: the dtype of activations and of the operands of matrix products. */
export type ComputeDtype = 'f32' | 'bf16';

/** The precision of a model unless one is chosen: bf16 on CUDA, f32 on the CPU. */
export function defaultDtype(device: Device): ComputeDtype {
  return device.kind === 'cuda' ? 'bf16' : 'f32';
}

/** The meaning of `runtime.precision` on a device: bf16 is for CUDA, and the CPU computes in f32. */
export function computeDtype({ precision }: Pick<Config['runtime'], 'precision'>, on: Device['kind']): ComputeDtype {
  return precision === 'bf16' && on === 'cuda' ? 'bf16' : 'f32';
}

/**
 * The settings that decide a model's parameters and mathematics: the `model` and `nsa` sections of a config, in
 * camelCase.
 */
export interface ModelShape {
  /** Width of the residual stream. */
  readonly dim: number;
  /** Transformer blocks. */
  readonly nLayers: number;
  /** Query heads H. */
  readonly nHeads: number;
  /** Key/value groups G. */
  readonly nKvGroups: number;
  /** Size of a query or key head. */
  readonly dK: number;
  /** Size of a value head. */
  readonly dV: number;
  /** Feed-forward layer: two matrices with SiLU, or three with a gate. */
  readonly mlp: 'silu' | 'swiglu';
  /** Hidden size of the feed-forward layer = round(dim * mlpRatio), unless `mlpHidden` is given. */
  readonly mlpRatio: number;
  /** Hidden size of the feed-forward layer; null = from `mlpRatio`. */
  readonly mlpHidden: number | null;
  /** Whether queries, keys and values have a bias. */
  readonly qkvBias: boolean;
  /** Whether every query and key head is normalised before rotary positions. */
  readonly qkNorm: boolean;
  /** Whether the output projection of attention has a bias. */
  readonly outBias: boolean;
  /** Whether the feed-forward layers have biases. */
  readonly mlpBias: boolean;
  /** Whether the output matrix is the embedding table. */
  readonly tieEmbeddings: boolean;
  /** Sparse attention, or the dense baseline. */
  readonly attention: 'nsa' | 'dense';
  /** Attention of the layers in turn, repeated over all, if `attention` is nsa: sparse, or its window alone. */
  readonly layerPattern: readonly ('nsa' | 'window')[];
  /** Base of the rotary angles. */
  readonly ropeTheta: number;
  /** Positions are divided by this. */
  readonly ropeScale: number;
  /** Scaling of the rotary frequencies. */
  readonly ropeScaling: RotaryScaling;
  /** Rows of the embedding. */
  readonly vocabSize: number;
  /** Epsilon of RMSNorm. */
  readonly normEps: number;
  readonly nsa: SparseModelShape;
}

/** The sparse attention of a model: the `nsa` section of a config, in camelCase. */
export interface SparseModelShape {
  /** Tokens in a compression block. */
  readonly l: number;
  /** Stride of the compression blocks. */
  readonly d: number;
  /** Tokens in a selection block. */
  readonly lSel: number;
  /** Selected blocks per token and group, the forced ones included. */
  readonly nSel: number;
  /** Blocks at the beginning of a sequence that every token selects. */
  readonly initBlocks: number;
  /** Blocks up to its own, its own included, that every token selects. */
  readonly localBlocks: number;
  /** Importance of a selection block from its compressed blocks: their weighted sum, or the largest. */
  readonly scorePool: 'sum' | 'max';
  /** The best of all blocks, or half of them of those before the token's chunk of nSel blocks. */
  readonly selection: 'best' | 'chunked';
  /** Tokens in the sliding window. */
  readonly w: number;
  /** Whether the three branches have the same keys and values. */
  readonly sharedKv: boolean;
  /** How a block becomes one compressed key and value. */
  readonly phi: 'avg' | 'conv' | 'mlp';
  /** Hidden size of phi mlp; null = 2 * dK. */
  readonly phiHidden: number | null;
  /** Where compressed keys get their positions. */
  readonly cmpRope: 'after' | 'before' | 'none';
  /** Which branches see positions. */
  readonly rope: 'all' | 'window';
  /** How the three branches are weighed. */
  readonly gate: 'softmax' | 'sigmoid';
  /** Temperature of the gate. */
  readonly gateTemp: number;
  /** Debugging: one branch only. */
  readonly forceBranch: 'none' | 'cmp' | 'sel' | 'win';
  /** Debugging: every branch weighs one third. */
  readonly forceUniformGate: boolean;
  /** Debugging: no gradient into the gate. */
  readonly stopgradGates: boolean;
}

/** A large vocabulary is rounded up to whole rows of a GPU's matrix units: 50,257 as it is would halve their speed. */
const VOCABULARY_STEP = 64;
const LARGE_VOCABULARY = 4096;

/** Rows of the embedding; those beyond the tokenizer's are never a target and never drawn. */
function roundedVocabulary(tokens: number): number {
  return tokens > LARGE_VOCABULARY ? Math.ceil(tokens / VOCABULARY_STEP) * VOCABULARY_STEP : tokens;
}

/**
 * The shape of a config's model. `vocabulary` is the tokenizer's size; `model.vocab_size` may ask for more rows, never
 * for fewer.
 */
export function modelShape({ model, nsa }: Pick<Config, 'model' | 'nsa'>, vocabulary: number): ModelShape {
  const shape: ModelShape = {
    dim: model.dim,
    nLayers: model.n_layers,
    nHeads: model.n_heads,
    nKvGroups: model.n_kv_groups,
    dK: model.d_k,
    dV: model.d_v,
    mlp: model.mlp,
    mlpRatio: model.mlp_ratio,
    mlpHidden: model.mlp_hidden,
    qkvBias: model.qkv_bias,
    qkNorm: model.qk_norm,
    outBias: model.out_bias,
    mlpBias: model.mlp_bias,
    tieEmbeddings: model.tie_embeddings,
    attention: model.attention,
    layerPattern: model.layer_pattern,
    ropeTheta: model.rope_theta,
    ropeScale: model.rope_scale,
    ropeScaling: ropeScaling(model),
    vocabSize: model.vocab_size ?? roundedVocabulary(vocabulary),
    normEps: model.norm_eps,
    nsa: {
      l: nsa.l,
      d: nsa.d,
      lSel: nsa.l_sel,
      nSel: nsa.n_sel,
      initBlocks: nsa.init_blocks,
      localBlocks: nsa.local_blocks,
      scorePool: nsa.score_pool,
      selection: nsa.selection,
      w: nsa.w,
      sharedKv: nsa.shared_kv,
      phi: nsa.phi,
      phiHidden: nsa.phi_hidden,
      cmpRope: nsa.cmp_rope,
      rope: nsa.rope,
      gate: nsa.gate,
      gateTemp: nsa.gate_temp,
      forceBranch: nsa.force_branch,
      forceUniformGate: nsa.force_uniform_gate,
      stopgradGates: nsa.stopgrad_gates,
    },
  };
  validateShapes(headShapeOf(shape), sparseShapeOf(shape));
  return shape;
}

function ropeScaling(model: Config['model']): RotaryScaling {
  const [type, factor] = [model.rope_type, model.rope_factor];
  switch (type) {
    case 'default':
      return { type };
    case 'linear':
      return { type, factor };
    case 'llama3':
      return {
        type,
        factor,
        originalContext: model.rope_original_context,
        lowFreqFactor: model.rope_low_freq_factor,
        highFreqFactor: model.rope_high_freq_factor,
      };
    case 'yarn':
      return {
        type,
        factor,
        originalContext: model.rope_original_context,
        betaFast: model.rope_beta_fast,
        betaSlow: model.rope_beta_slow,
        attentionFactor: model.rope_attention_factor,
      };
  }
}

/** The rotations of a model's queries and keys. */
export function rotaryShapeOf({ dK, ropeTheta, ropeScale, ropeScaling }: ModelShape): RotaryShape {
  return { size: dK, theta: ropeTheta, scale: ropeScale, scaling: ropeScaling };
}

/** The shape of one layer: that of its model, with the attention of the layer. */
export type LayerShape = Omit<ModelShape, 'attention'> & { readonly attention: ModelShape['attention'] | 'window' };

/** The shape of the layer at this index. */
export function layerShape(shape: ModelShape, layer: number): LayerShape {
  const { attention, layerPattern } = shape;
  const isWindow = attention === 'nsa' && layerPattern[layer % layerPattern.length] === 'window';
  return isWindow ? { ...shape, attention: 'window' } : shape;
}

/** The shapes of all layers, in their order. */
export function layerShapes(shape: ModelShape): LayerShape[] {
  return Array.from({ length: shape.nLayers }, (_, layer) => layerShape(shape, layer));
}

/** The kinds of layers and how many there are of each: as `layerShapes`, for any number of layers. */
export function countedLayers(shape: ModelShape): { layer: LayerShape; count: number }[] {
  const { nLayers, layerPattern } = shape;
  return layerPattern.map((_, i) => ({
    layer: layerShape(shape, i),
    count: Math.max(0, Math.ceil((nLayers - i) / layerPattern.length)),
  }));
}

/** Indices of the layers with sparse attention. */
export function sparseLayers(shape: ModelShape): number[] {
  return layerShapes(shape).flatMap(({ attention }, layer) => (attention === 'nsa' ? [layer] : []));
}

/** A config key in which two shapes differ, with both values. */
export interface ShapeDifference {
  readonly key: string;
  readonly a: unknown;
  readonly b: unknown;
}

/** The config keys in which two shapes differ. The same width of the feed-forward may be written in two ways. */
export function shapeDifferences(a: ModelShape, b: ModelShape): ShapeDifference[] {
  const [first, second] = [configKeysOf(a), configKeysOf(b)];
  const keys = [...new Set([...first.keys(), ...second.keys()])];
  return keys.flatMap((key) => {
    if (key.startsWith('model.mlp_') && key !== 'model.mlp_bias' && hiddenSize(a) === hiddenSize(b)) return [];
    const [x, y] = [first.get(key), second.get(key)];
    return JSON.stringify(x) === JSON.stringify(y) ? [] : [{ key, a: x, b: y }];
  });
}

/** The first key in which two shapes differ, as `key: a and b`; null when they are equal. */
export function shapeDifference(a: ModelShape, b: ModelShape): string | null {
  const [first] = shapeDifferences(a, b);
  return first ? `${first.key}: ${first.a} and ${first.b}` : null;
}

/** The sizes of a shape by the config key that sets them. */
function configKeysOf({ nsa, ropeScaling, ...model }: ModelShape): Map<string, unknown> {
  const snake = (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
  const named = (prefix: string, values: object) =>
    Object.entries(values).map(([name, value]) => [`${prefix}${snake(name)}`, value] as const);
  return new Map([...named('model.', model), ...named('model.rope_', ropeScaling), ...named('nsa.', nsa)]);
}

export function headShapeOf({ nHeads, nKvGroups, dK, dV }: LayerShape): HeadShape {
  return { heads: nHeads, groups: nKvGroups, dk: dK, dv: dV };
}

export function sparseShapeOf({ nsa }: LayerShape): SparseShape {
  const { l, d, lSel, nSel, w, initBlocks, localBlocks, scorePool, selection } = nsa;
  return { l, d, lSel, nSel, w, initBlocks, localBlocks, scorePool, selection };
}

/** Pairs of keys and values in the fused projection: one for each branch unless they share it. */
export function projectionPairs({ attention, nsa }: LayerShape): number {
  return attention !== 'nsa' || nsa.sharedKv ? 1 : 3;
}

/** Width of the feed-forward layer. */
export function hiddenSize({ dim, mlpRatio, mlpHidden }: LayerShape): number {
  return mlpHidden ?? Math.round(dim * mlpRatio);
}

/** Width of phi's hidden layer (nsa.phi: mlp). */
export function phiHiddenSize({ nsa, dK }: LayerShape): number {
  return nsa.phiHidden ?? 2 * dK;
}

/** Whether the queries of all branches are rotated; otherwise only those of the window (`nsa.rope`). */
export function seesPositions({ attention, nsa }: LayerShape): boolean {
  return attention !== 'nsa' || nsa.rope === 'all';
}
