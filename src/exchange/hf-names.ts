/**
 * Which tensors of a Hugging Face model a parameter consists of. Every parameter is made of whole tensors, one below the
 * other, so importing and exporting move bytes and never compute.
 */
import { hiddenSize, type ModelShape } from '../model/shape.js';

/** A tensor of the foreign format: rows of a parameter. */
export interface HfPart {
  readonly name: string;
  readonly shape: readonly number[];
}

/** A parameter and the tensors that its rows come from, in their order. */
export interface HfParameter {
  readonly name: string;
  readonly shape: readonly number[];
  readonly parts: readonly HfPart[];
}

/** All parameters of a dense model, in the order of its files. */
export function hfParameters(shape: ModelShape): HfParameter[] {
  const { dim, vocabSize } = shape;
  const table = [vocabSize, dim];
  return [
    stacked('embedding', [{ name: 'model.embed_tokens.weight', shape: table }]),
    ...Array.from({ length: shape.nLayers }, (_, layer) => layerParameters(shape, layer)).flat(),
    stacked('norm', [{ name: 'model.norm.weight', shape: [dim] }]),
    ...(shape.tieEmbeddings ? [] : [stacked('head', [{ name: 'lm_head.weight', shape: table }])]),
  ];
}

function layerParameters(shape: ModelShape, layer: number): HfParameter[] {
  const { dim, nHeads, nKvGroups, dK, dV } = shape;
  const [own, theirs] = [`blocks.${layer}`, `model.layers.${layer}`];
  const hidden = hiddenSize(shape);
  const rows = { q: nHeads * dK, k: nKvGroups * dK, v: nKvGroups * dV };
  const part = (name: string, ...extents: number[]): HfPart => ({ name: `${theirs}.${name}`, shape: extents });
  const heads = (['q', 'k', 'v'] as const).map((head) => [`self_attn.${head}_proj`, rows[head]] as const);
  const ups = ['mlp.gate_proj', 'mlp.up_proj'];
  const parameters: [string, HfPart[]][] = [
    ['attention_norm', [part('input_layernorm.weight', dim)]],
    ['attention.qkv', heads.map(([name, count]) => part(`${name}.weight`, count, dim))],
  ];
  if (shape.qkvBias) parameters.push(['attention.qkv_bias', heads.map(([name, count]) => part(`${name}.bias`, count))]);
  if (shape.qkNorm)
    parameters.push(
      ['attention.q_norm', [part('self_attn.q_norm.weight', dK)]],
      ['attention.k_norm', [part('self_attn.k_norm.weight', dK)]],
    );
  parameters.push(['attention.out', [part('self_attn.o_proj.weight', dim, nHeads * dV)]]);
  if (shape.outBias) parameters.push(['attention.out_bias', [part('self_attn.o_proj.bias', dim)]]);
  parameters.push(
    ['mlp_norm', [part('post_attention_layernorm.weight', dim)]],
    ['mlp.up', ups.map((name) => part(`${name}.weight`, hidden, dim))],
    ['mlp.down', [part('mlp.down_proj.weight', dim, hidden)]],
  );
  if (shape.mlpBias)
    parameters.push(
      ['mlp.up_bias', ups.map((name) => part(`${name}.bias`, hidden))],
      ['mlp.down_bias', [part('mlp.down_proj.bias', dim)]],
    );
  return parameters.map(([name, parts]) => stacked(`${own}.${name}`, parts));
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
