/**
 * Models with Native Sparse Attention of other programs: NSAForCausalLM of fla (flash-linear-attention), and
 * LlamaNSAForCausalLM, whose tensors have the names of a Llama. Both have one projection to keys and values for all branches, compress rotated keys by their mean in blocks
 * that do not overlap, and weigh the branches with sigmoids.
 */
import type { ConfigInput } from '../config/schema.js';
import { type ModelShape, sparseLayers } from '../model/shape.js';

export const FLA = 'NSAForCausalLM';
export const LLAMA_NSA = 'LlamaNSAForCausalLM';

/** Blocks that every token selects. */
const FORCED = {
  [FLA]: { init_blocks: 1, local_blocks: 2 },
  [LLAMA_NSA]: { init_blocks: 0, local_blocks: 1 },
} as const;
/** Heads of a group come in whole tiles of their kernels. */
const HEADS_OF_A_TILE = 16;

const COMMON = { phi: 'avg', cmp_rope: 'before', gate: 'sigmoid', shared_kv: true } as const;

export interface NsaFields {
  readonly block_size?: number | null | undefined;
  readonly block_counts?: number | null | undefined;
  readonly window_size?: number | null | undefined;
}

export function isNsa(architecture: string): architecture is keyof typeof FORCED {
  return Object.hasOwn(FORCED, architecture);
}

/** Their kernels round the number of blocks up like this. */
function nextPowerOfTwo(count: number): number {
  return 2 ** Math.ceil(Math.log2(count));
}

/**
 * Their kernels sort blocks in chunks of `size`, and keep half of what they had and half of the new chunk: the best
 * `count` blocks if these fit a half, and by chunks if they fill a whole one. Those of today's fla refuse the latter.
 */
function selectionRule(architecture: string, size: number, count: number): 'best' | 'chunked' | null {
  if (2 * count <= size) return 'best';
  return architecture === LLAMA_NSA && count === size ? 'chunked' : null;
}

/** The `nsa` section of such a model, or what is not supported. */
export function nsaKeys(
  architecture: keyof typeof FORCED,
  fields: NsaFields,
): { nsa: NonNullable<ConfigInput['nsa']> } | { unsupported: string } {
  const { block_size: size, block_counts: counts, window_size: window } = fields;
  const [block, count, w] = [size ?? 64, nextPowerOfTwo(counts ?? 16), window === undefined ? 512 : (window ?? 0)];
  if (w === 0) return { unsupported: 'a model without a window (window_size)' };
  const selection = selectionRule(architecture, block, count);
  if (!selection) return { unsupported: `block_counts ${count} with block_size ${block}` };
  return { nsa: { l: block, d: block, l_sel: block, n_sel: count, w, selection, ...COMMON, ...FORCED[architecture] } };
}

/** config.json of fla in the keys of a Llama. */
export function fromFla(json: Record<string, unknown>): Record<string, unknown> {
  const { num_heads: heads, num_kv_heads: groups, norm_eps: eps, intermediate_size: width, ...rest } = json;
  const [hidden, ratio] = [Number(json['hidden_size']), Number(json['hidden_ratio'] ?? 4)];
  return {
    ...rest,
    num_attention_heads: heads,
    num_key_value_heads: groups ?? heads,
    rms_norm_eps: eps ?? 1e-6,
    intermediate_size: width ?? 256 * Math.ceil(Math.trunc((hidden * ratio * 2) / 3) / 256),
  };
}

/** The first setting of fla's config.json that is not computed here. */
export function unsupportedInFla(json: Record<string, unknown>): string | null {
  if ((json['attnres_block_size'] ?? null) !== null) return `attnres_block_size ${json['attnres_block_size']}`;
  if (json['elementwise_affine'] === false) return 'elementwise_affine false';
  return null;
}

/** config.json of such a model, from Llama's. */
export function nsaConfig(shape: ModelShape, architecture: string, llama: Record<string, unknown>) {
  const { lSel, nSel, w } = shape.nsa;
  const sparse = { block_size: lSel, block_counts: nSel, window_size: w };
  if (architecture !== FLA) return { ...llama, ...sparse, model_type: 'llama-nsa' };
  const { num_attention_heads: heads, num_key_value_heads: groups, rms_norm_eps: eps, ...rest } = llama;
  return {
    ...rest,
    ...sparse,
    model_type: 'nsa',
    num_heads: heads,
    num_kv_heads: groups,
    norm_eps: eps,
    hidden_act: 'swish',
    hidden_ratio: 4,
    qkv_bias: shape.qkvBias,
    elementwise_affine: true,
    fuse_norm: true,
    fuse_swiglu: true,
    fuse_cross_entropy: true,
    attnres_block_size: null,
  };
}

/** The architecture that expresses a sparse model, or what none of them can express. */
export function nsaArchitecture(shape: ModelShape): { architecture: string } | { inexpressible: string } {
  const { nsa } = shape;
  const common = inexpressibleInBoth(shape);
  if (common) return { inexpressible: common };
  const found = Object.entries(FORCED).find(
    ([, forced]) => forced.init_blocks === nsa.initBlocks && forced.local_blocks === nsa.localBlocks,
  );
  if (!found)
    return {
      inexpressible: `${nsa.initBlocks} first and ${nsa.localBlocks} last blocks are forced (nsa.init_blocks, nsa.local_blocks)`,
    };
  const [architecture] = found;
  const isScaled = shape.ropeScale !== 1 || shape.ropeScaling.type !== 'default';
  if (architecture === FLA && isScaled)
    return { inexpressible: 'rotary positions are scaled (model.rope_type, rope_scale)' };
  if (architecture === LLAMA_NSA && shape.qkvBias !== shape.outBias)
    return { inexpressible: 'some projections of attention have a bias and others have not' };
  if (architecture === FLA && (shape.outBias || shape.mlpBias))
    return { inexpressible: 'other layers than queries, keys and values have biases (model.out_bias, model.mlp_bias)' };
  return { architecture };
}

/** The first feature that neither architecture can express; null if nothing. */
function inexpressibleInBoth(shape: ModelShape): string | null {
  const { nsa, nHeads, nKvGroups, qkNorm } = shape;
  const { l, d, lSel, nSel } = nsa;
  if (sparseLayers(shape).length < shape.nLayers) return 'some layers have only a window (model.layer_pattern)';
  if (!nsa.sharedKv) return 'the branches have keys and values of their own (nsa.shared_kv false)';
  if (nsa.phi !== 'avg') return `blocks are compressed by nsa.phi ${nsa.phi}`;
  if (nsa.cmpRope !== 'before') return `compressed keys are rotated as nsa.cmp_rope ${nsa.cmpRope} says`;
  if (nsa.gate !== 'sigmoid' || nsa.gateTemp !== 1) return 'the gate is no plain sigmoid (nsa.gate, nsa.gate_temp)';
  if (nsa.forceBranch !== 'none' || nsa.forceUniformGate) return 'the gate is fixed (nsa.force_branch)';
  if (l !== d || l !== lSel) return `nsa.l ${l}, d ${d} and l_sel ${lSel} differ`;
  if (nextPowerOfTwo(nSel) !== nSel) return `nsa.n_sel ${nSel} is not a power of two`;
  if (nsa.selection === 'chunked' && nSel !== lSel)
    return `chunks of nsa.n_sel ${nSel} blocks are not as long as nsa.l_sel ${lSel} (nsa.selection chunked)`;
  if (nsa.selection === 'best' && 2 * nSel > lSel) return `nsa.n_sel ${nSel} is more than half of nsa.l_sel ${lSel}`;
  if (qkNorm) return 'heads are normalised (model.qk_norm)';
  const perGroup = nHeads / nKvGroups;
  if (perGroup % HEADS_OF_A_TILE !== 0) return `${perGroup} heads in a group are no multiple of ${HEADS_OF_A_TILE}`;
  return null;
}
