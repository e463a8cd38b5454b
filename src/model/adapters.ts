/**
 * Low-rank adapters (LoRA): a frozen linear layer W gets the addition scale * B A, of which only A [rank, inputs] and
 * B [outputs, rank] are trained. The addition is computed beside the layer; `src/exchange/adapter.ts` adds it to the weights.
 */
import { operand } from '../ops/cast/op.js';
import { addLinearColumns, linear } from '../ops/linear/op.js';
import { scale as scaled } from '../ops/pointwise/op.js';
import type { Parameter } from '../tensor/parameter.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { adaptedLayers, type LinearLayer } from './linear-layers.js';
import type { ParameterStore } from './parameters.js';
import type { ModelShape } from './shape.js';

/**
 * Which layers get adapters, and of what rank.
 *
 * @opaque
 */
export interface AdapterSettings {
  readonly rank: number;
  /** The scale is alpha / rank. */
  readonly alpha: number;
  /** Names of layers, or `all-linear` (`targetedLayers`). */
  readonly targets: readonly string[];
}

/**
 * The adapter of one linear layer.
 *
 * @opaque
 */
export interface Adapter {
  readonly layer: LinearLayer;
  /** A [rank, inputs] */
  readonly down: Parameter;
  /** B [outputs, rank] */
  readonly up: Parameter;
  readonly scale: number;
}

/** Whether a parameter has adapters. */
export function isAdapted(parameter: Parameter): boolean {
  return parameter.additions.length > 0;
}

/** Adds adapters to a model whose parameters are in `store`. A is drawn, B is zero. */
export function addAdapters(store: ParameterStore, shape: ModelShape, settings: AdapterSettings): Adapter[] {
  const { rank, alpha } = settings;
  const parameters = new Map(store.parameters.map((parameter) => [parameter.name, parameter]));
  return adaptedLayers(shape, settings).map((layer) => {
    const { name, inputs, outputs } = layer;
    // The variance with which PEFT draws A.
    const down = store.normal(`${name}.lora_A`, [rank, inputs], 1 / Math.sqrt(3 * inputs));
    const up = store.zeros(`${name}.lora_B`, [outputs, rank]);
    const adapter = { layer, down, up, scale: alpha / rank };
    parameters.get(layer.parameter)!.additions.push({ down, up, scale: adapter.scale, from: layer.from });
    return adapter;
  });
}

/** The linear layers of a parameter with their adapters; the arguments are those of `linear`. */
export function project(
  tape: Tape,
  x: Tensor,
  parameter: Parameter,
  bias: Tensor | null | undefined = null,
  residual: Tensor | null = null,
  computesResult = true,
): Tensor {
  let y = linear(tape, x, operand(parameter, x), bias, residual, computesResult);
  for (const { down, up, scale, from } of parameter.additions) {
    const narrow = linear(tape, x, operand(down, x));
    const inner = scaled(tape, narrow, scale);
    tape.drop(narrow);
    y = addLinearColumns(tape, inner, operand(up, inner), y, from, computesResult);
    tape.drop(inner);
  }
  return y;
}
