/**
 * The linear layers of a model by name, and where their weights lie: several layers that read the same input are rows of
 * one parameter. Names are those of Llama and Qwen models; what only a sparse model has follows their form.
 */

import { nearest } from '../config/suggest.js';
import { UsageError } from '../errors.js';
import { hiddenSize, type LayerShape, layerShapes, type ModelShape, phiHiddenSize, projectionPairs } from './shape.js';

/** A linear layer: rows `from` to `from + outputs` of a parameter [rows, inputs]. */
export interface LinearLayer {
  /** Such as `layers.0.self_attn.q_proj`. */
  readonly name: string;
  /** Such as `blocks.0.attention.qkv`. */
  readonly parameter: string;
  readonly from: number;
  readonly outputs: number;
  readonly inputs: number;
}

/** Stands for all layers in a list of targets. */
export const ALL_LINEAR = 'all-linear';

/** All linear layers of the blocks, in the order of the parameters. The head does not belong to them. */
export function linearLayers(shape: ModelShape): LinearLayer[] {
  return layerShapes(shape).flatMap((layer, index) => layersOf(layer, index));
}

/** Key of a config's shape for its layers' names: `q_proj`, `k_proj`, … */
export function layerKind({ name }: LinearLayer): string {
  return name.slice(name.lastIndexOf('.') + 1);
}

/**
 * The layers that a list of targets names. A target is the end of a name after a dot (`q_proj`, `self_attn.q_proj`,
 * `layers.0.mlp.up_proj`) or `all-linear`, as in PEFT. Throws for one that names none.
 */
export function targetedLayers(
  layers: readonly LinearLayer[],
  targets: readonly string[],
  where: string,
): LinearLayer[] {
  const isNamed = ({ name }: LinearLayer, target: string) =>
    target === ALL_LINEAR || `.${name}`.endsWith(`.${target.replace(/^model\./, '')}`);
  for (const target of targets) {
    if (layers.some((layer) => isNamed(layer, target))) continue;
    const kinds = [...new Set(layers.map(layerKind))];
    const near = nearest(target, kinds);
    const hint = near === undefined ? '' : ` (did you mean ${near}?)`;
    throw new UsageError(
      `${where}: ${target} names no layer of this model; ${[...kinds, ALL_LINEAR].join(', ')}${hint}`,
    );
  }
  return layers.filter((layer) => targets.some((target) => isNamed(layer, target)));
}

/** The layers that get adapters by `train.lora`. Throws for a rank that no layer has room for: it would save nothing. */
export function adaptedLayers(
  shape: ModelShape,
  { rank, targets }: { readonly rank: number; readonly targets: readonly string[] },
): LinearLayer[] {
  const layers = targetedLayers(linearLayers(shape), targets, 'train.lora.targets');
  const most = Math.max(...layers.map(({ inputs, outputs }) => Math.min(inputs, outputs)));
  if (rank > most)
    throw new UsageError(`train.lora.rank: ${rank} is more than the rank of any layer it adapts; at most ${most}`);
  return layers;
}

function layersOf(shape: LayerShape, index: number): LinearLayer[] {
  const { dim, nHeads, nKvGroups, dK, dV, mlp, nsa } = shape;
  const hidden = hiddenSize(shape);
  const layers: LinearLayer[] = [];
  /** Layers whose rows lie one below the other in a parameter. */
  const add = (parameter: string, module: string, inputs: number, rows: readonly (readonly [string, number])[]) => {
    let from = 0;
    for (const [name, outputs] of rows) {
      const place = { parameter: `blocks.${index}.${parameter}`, from, outputs, inputs };
      layers.push({ name: `layers.${index}.${module}.${name}`, ...place });
      from += outputs;
    }
  };
  const pair = (branch: string): [string, number][] => [
    [`k${branch}_proj`, nKvGroups * dK],
    [`v${branch}_proj`, nKvGroups * dV],
  ];
  const branches = projectionPairs(shape) > 1 ? ['_cmp', '_sel', '_win'] : [''];
  add('attention.qkv', 'self_attn', dim, [['q_proj', nHeads * dK], ...branches.flatMap(pair)]);
  if (shape.attention === 'nsa') {
    add('attention.gate.weight', 'self_attn', dim, [['g_proj', 3 * nHeads]]);
    if (nsa.phi === 'mlp')
      for (const [part, size] of [['k', dK] as const, ['v', dV] as const]) {
        const phi = phiHiddenSize(shape);
        add(`attention.phi_${part}.w1`, 'self_attn', nsa.l * size, [[`phi_${part}_up`, phi]]);
        add(`attention.phi_${part}.w2`, 'self_attn', phi, [[`phi_${part}_down`, size]]);
      }
  }
  add('attention.out', 'self_attn', nHeads * dV, [['o_proj', dim]]);
  const up: [string, number] = ['up_proj', hidden];
  add('mlp.up', 'mlp', dim, mlp === 'swiglu' ? [['gate_proj', hidden], up] : [up]);
  add('mlp.down', 'mlp', hidden, [['down_proj', dim]]);
  return layers;
}
