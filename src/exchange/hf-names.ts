/**
 * Which tensors of a Hugging Face model a parameter consists of. Every parameter is made of whole tensors, one below the
 * other, so importing and exporting move bytes and never compute.
 */
import { hiddenSize, type ModelShape } from '../model/shape.js';
import { FLA } from './nsa-config.js';

/** A tensor of the foreign format: rows of a parameter. */
export interface HfPart {
  readonly name: string;
  readonly shape: readonly number[];
}

/** A parameter and the tensors that its rows come from, in their order; zeros if there are none. */
export interface HfParameter {
  readonly name: string;
  readonly shape: readonly number[];
  readonly parts: readonly HfPart[];
}

/** Tensor names, which differ between architectures. */
const LLAMA_NAMES = {
  embedding: 'model.embed_tokens.weight',
  attention: 'self_attn',
  attentionNorm: 'input_layernorm',
  mlpNorm: 'post_attention_layernorm',
};
const FLA_NAMES = {
  embedding: 'model.embeddings.weight',
  attention: 'attn',
  attentionNorm: 'attn_norm',
  mlpNorm: 'mlp_norm',
};

/** All parameters of a model, in the order of its files. */
export function hfParameters(shape: ModelShape, architecture: string): HfParameter[] {
  const { dim, vocabSize } = shape;
  const names = architecture === FLA ? FLA_NAMES : LLAMA_NAMES;
  const table = [vocabSize, dim];
  return [
    stacked('embedding', [{ name: names.embedding, shape: table }]),
    ...Array.from({ length: shape.nLayers }, (_, layer) => layerParameters(shape, layer, names)).flat(),
    stacked('norm', [{ name: 'model.norm.weight', shape: [dim] }]),
    ...(shape.tieEmbeddings ? [] : [stacked('head', [{ name: 'lm_head.weight', shape: table }])]),
  ];
}

function layerParameters(shape: ModelShape, layer: number, names: typeof LLAMA_NAMES): HfParameter[] {
  const { dim, nHeads, nKvGroups, dK, dV } = shape;
  const [own, theirs] = [`blocks.${layer}`, `model.layers.${layer}`];
  const hidden = hiddenSize(shape);
  const rows = { q: nHeads * dK, k: nKvGroups * dK, v: nKvGroups * dV };
  const part = (name: string, ...extents: number[]): HfPart => ({ name: `${theirs}.${name}`, shape: extents });
  const attention = (name: string, ...extents: number[]) => part(`${names.attention}.${name}`, ...extents);
  const heads = (['q', 'k', 'v'] as const).map((head) => [`${head}_proj`, rows[head]] as const);
  const ups = ['mlp.gate_proj', 'mlp.up_proj'];
  const parameters: [string, HfPart[]][] = [
    ['attention_norm', [part(`${names.attentionNorm}.weight`, dim)]],
    ['attention.qkv', heads.map(([name, count]) => attention(`${name}.weight`, count, dim))],
  ];
  if (shape.qkvBias)
    parameters.push(['attention.qkv_bias', heads.map(([name, count]) => attention(`${name}.bias`, count))]);
  if (shape.qkNorm)
    parameters.push(
      ['attention.q_norm', [attention('q_norm.weight', dK)]],
      ['attention.k_norm', [attention('k_norm.weight', dK)]],
    );
  // Row 3 * head + branch here and there, in the order compressed, selected, window. Theirs has no bias.
  if (shape.attention === 'nsa')
    parameters.push(
      ['attention.gate.weight', [attention('g_proj.weight', 3 * nHeads, dim)]],
      ['attention.gate.bias', []],
    );
  parameters.push(['attention.out', [attention('o_proj.weight', dim, nHeads * dV)]]);
  if (shape.outBias) parameters.push(['attention.out_bias', [attention('o_proj.bias', dim)]]);
  parameters.push(
    ['mlp_norm', [part(`${names.mlpNorm}.weight`, dim)]],
    ['mlp.up', ups.map((name) => part(`${name}.weight`, hidden, dim))],
    ['mlp.down', [part('mlp.down_proj.weight', dim, hidden)]],
  );
  if (shape.mlpBias)
    parameters.push(
      ['mlp.up_bias', ups.map((name) => part(`${name}.bias`, hidden))],
      ['mlp.down_bias', [part('mlp.down_proj.bias', dim)]],
    );
  return parameters.map(([name, parts]) =>
    parts.length > 0 ? stacked(`${own}.${name}`, parts) : { name: `${own}.${name}`, shape: [3 * nHeads], parts },
  );
}

function stacked(name: string, parts: readonly HfPart[]): HfParameter {
  const [, ...rest] = parts[0].shape;
  const rows = parts.reduce((total, { shape }) => total + shape[0], 0);
  return { name, shape: [rows, ...rest], parts };
}

/** Tensors that files may hold and transformers does not read: tables that are computed, and the head of a tied model. */
export function isIgnored(name: string, shape: ModelShape): boolean {
  return name.endsWith('.rotary_emb.inv_freq') || (shape.tieEmbeddings && name === 'lm_head.weight');
}
