/**
 * The attention module: one fused projection, rotary positions, Native Sparse Attention (or dense attention as the
 * baseline), and the output projection.
 */
import { UsageError } from '../errors.js';
import { compressAverage, compressConv, compressMlp, type MlpParameters } from '../ops/attention/compress/op.js';
import { joinTail, keepTail, pagedWindow, storePages } from '../ops/attention/decode/paged/op.js';
import { denseAttention } from '../ops/attention/dense/op.js';
import { type GateOptions, gate, gateColumns } from '../ops/attention/gate/op.js';
import {
  nativeSparseAttention,
  type SparseLayout,
  type SparseOptions,
  type SparseOutputs,
} from '../ops/attention/nsa.js';
import { linear, stackedLinear } from '../ops/linear/op.js';
import { type HeadPart, type RotaryOptions, rotate, splitHeads } from '../ops/rope/op.js';
import type { Parameter } from '../tensor/parameter.js';
import type { ParameterStack } from '../tensor/parameter-stack.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import type { CacheStep } from './cache.js';
import { type BranchReads, cachedSparseAttention } from './cached-attention.js';
import { operand, stackedOperand } from './operand.js';
import type { ParameterStore } from './parameters.js';
import { headShapeOf, type ModelShape, phiHiddenSize, sparseShapeOf } from './shape.js';

/** What a forward pass shows to whoever watches it; the tensors are valid during the call only. */
export interface Observer {
  gates?(layer: number, gates: Tensor): void;
  selected?(layer: number, selected: Tensor): void;
  /** Keys that each branch really read; on a cache that holds earlier tokens only. */
  reads?(layer: number, reads: BranchReads): void;
}

export interface AttentionContext {
  readonly layout: SparseLayout;
  readonly kernels?: SparseOptions;
  readonly observer?: Observer | undefined;
  /** The tokens continue cached sequences, and are cached in turn; `layout` is then the step's own. Without gradients. */
  readonly cache?: CacheStep | undefined;
}

/** Throws unless the context has a layout of this many tokens, and a cache made for this shape. */
export function expectContext(context: AttentionContext | undefined, tokens: number, shape: ModelShape): void {
  const given = (context?.layout as SparseLayout | undefined)?.tokens;
  if (!given)
    throw new UsageError(
      'a forward pass needs { layout }: build it with sparseLayout(new Sequences(device, lengths), nsa)',
    );
  if (given.total !== tokens)
    throw new UsageError(`the layout has ${given.total} tokens, but ${tokens} were given: build it from their lengths`);
  context?.cache?.expectShape(shape);
}

export interface AttentionModule {
  /** `x` [T, dim], normalised → [T, dim], added to the `residual` of that shape if there is one. */
  forward(tape: Tape, x: Tensor, context: AttentionContext, residual?: Tensor | null): Tensor;
}

export function createAttention(
  store: ParameterStore,
  name: string,
  layer: number,
  shape: ModelShape,
): AttentionModule {
  return shape.attention === 'nsa'
    ? new SparseAttention(store, name, layer, shape)
    : new DenseAttention(store, name, layer, shape);
}

class DenseAttention implements AttentionModule {
  readonly #shape: ModelShape;
  readonly #layer: number;
  readonly #parts: HeadPart[];
  readonly #projection: Parameter;
  readonly #output: Parameter;

  constructor(store: ParameterStore, name: string, layer: number, shape: ModelShape) {
    const { heads, groups, dk, dv } = headShapeOf(shape);
    this.#shape = shape;
    this.#layer = layer;
    this.#parts = [
      { heads, size: dk, rotate: true },
      { heads: groups, size: dk, rotate: true },
      { heads: groups, size: dv, rotate: false },
    ];
    this.#projection = store.matrix(`${name}.qkv`, [width(this.#parts), shape.dim]);
    this.#output = store.residualMatrix(`${name}.out`, [shape.dim, heads * dv]);
  }

  forward(tape: Tape, x: Tensor, context: AttentionContext, residual: Tensor | null = null): Tensor {
    expectContext(context, x.shape[0], this.#shape);
    const { layout, kernels, cache } = context;
    const { ropeTheta: theta, ropeScale: scale } = this.#shape;
    const fused = linear(tape, x, operand(this.#projection, x));
    const start = cache?.tokens.starts ?? 0;
    const [q, k, v] = splitHeads(tape, fused, this.#parts, layout.tokens, { theta, scale, start });
    tape.drop(fused);
    if (cache) storePages(tape.device, k, v, cache.pages('win', this.#layer), cache.tokens);
    const attended =
      cache && !cache.isFresh
        ? this.#attendCached(tape, q, cache)
        : denseAttention(tape, { q, k, v }, layout.tokens, kernels);
    for (const tensor of [q, k, v]) tape.drop(tensor);
    const out = linear(tape, flat(attended), operand(this.#output, attended), null, residual);
    tape.drop(attended);
    return out;
  }

  #attendCached(tape: Tape, q: Tensor, cache: CacheStep): Tensor {
    const pages = cache.pages('win', this.#layer);
    const { out, lse } = pagedWindow(tape, q, pages, cache.tokens, headShapeOf(this.#shape), Number.POSITIVE_INFINITY);
    tape.drop(lse);
    return out;
  }
}

/** Parameters of phi for one of K and V; nothing for `avg`. */
interface Phi {
  readonly conv?: Parameter;
  readonly mlp?: Record<keyof MlpParameters, Parameter>;
}

class SparseAttention implements AttentionModule {
  readonly #shape: ModelShape;
  readonly #layer: number;
  readonly #parts: HeadPart[];
  readonly #projection: Parameter;
  readonly #output: Parameter;
  readonly #gate: { readonly weight: Parameter; readonly bias: Parameter };
  /**
   * The gate's few rows below the projection's, where the kernels allow it: 36 outputs alone cost a pass over the input
   * forward and two backward.
   */
  readonly #both: ParameterStack | null;
  readonly #phiKeys: Phi;
  readonly #phiValues: Phi;

  constructor(store: ParameterStore, name: string, layer: number, shape: ModelShape) {
    const { heads, groups, dk, dv } = headShapeOf(shape);
    this.#shape = shape;
    this.#layer = layer;
    const key = { heads: groups, size: dk, rotate: true };
    const value = { heads: groups, size: dv, rotate: false };
    // Queries, then keys and values of the compressed, the selected and the window branch: docs/explain/attention.md.
    this.#parts = [
      { heads, size: dk, rotate: true },
      { ...key, rotate: shape.nsa.cmpRope === 'before' },
      value,
      key,
      value,
      key,
      value,
    ];
    this.#projection = store.matrix(`${name}.qkv`, [width(this.#parts), shape.dim]);
    this.#gate = {
      weight: store.zeros(`${name}.gate.weight`, [3 * heads, shape.dim]),
      bias: store.zeros(`${name}.gate.bias`, [3 * heads]),
    };
    this.#both = isTrained(gateOptions(shape)) ? store.stack(this.#projection, this.#gate.weight) : null;
    this.#phiKeys = createPhi(store, `${name}.phi_k`, shape, dk);
    this.#phiValues = createPhi(store, `${name}.phi_v`, shape, dv);
    this.#output = store.residualMatrix(`${name}.out`, [shape.dim, heads * dv]);
  }

  forward(tape: Tape, x: Tensor, context: AttentionContext, residual: Tensor | null = null): Tensor {
    expectContext(context, x.shape[0], this.#shape);
    const { layout, kernels, observer, cache } = context;
    const { ropeTheta: theta, ropeScale: scale, nsa } = this.#shape;
    const start = cache?.tokens.starts ?? 0;
    const { split, gates } = this.#project(tape, x, layout, { theta, scale, start });
    const [q, newKeys, newValues, kSel, vSel, kWin, vWin] = split;
    // Blocks that begin in tokens read earlier need their rows too.
    const rawKeys = cache ? this.#join(tape, newKeys, 'keys', cache) : newKeys;
    const rawValues = cache ? this.#join(tape, newValues, 'values', cache) : newValues;
    const rawLayout = cache ? { tokens: cache.joined, blocks: layout.blocks } : layout;
    const compressedKeys = this.#compress(tape, this.#phiKeys, rawKeys, rawLayout);
    const vCmp = this.#compress(tape, this.#phiValues, rawValues, rawLayout);
    const blockStart = cache?.blockPositions ?? 0;
    const kCmp =
      nsa.cmpRope === 'after'
        ? rotate(tape, compressedKeys, layout.blocks, { theta, scale, stride: nsa.d, start: blockStart })
        : compressedKeys;
    observer?.gates?.(this.#layer, gates);
    const inputs = { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates };
    if (cache) {
      storePages(tape.device, kCmp, vCmp, cache.pages('cmp', this.#layer), cache.blocks);
      storePages(tape.device, kSel, vSel, cache.pages('sel', this.#layer), cache.tokens);
      storePages(tape.device, kWin, vWin, cache.pages('win', this.#layer), cache.tokens);
    }
    const attended =
      cache && !cache.isFresh
        ? this.#attendCached(tape, q, gates, cache, observer)
        : nativeSparseAttention(tape, inputs, layout, sparseShapeOf(this.#shape), kernels);
    observer?.selected?.(this.#layer, attended.selected);
    const branches = [attended.oCmp, attended.oSel, attended.oWin, attended.selected];
    const done = new Set([...split, rawKeys, rawValues, compressedKeys, vCmp, kCmp, gates, ...branches]);
    for (const tensor of done) tape.drop(tensor);
    const out = linear(tape, flat(attended.out), operand(this.#output, attended.out), null, residual);
    tape.drop(attended.out);
    return out;
  }

  #attendCached(tape: Tape, q: Tensor, gates: Tensor, cache: CacheStep, observer: Observer | undefined): SparseOutputs {
    const count = () => tape.empty([q.shape[0], this.#shape.nKvGroups], 'i32');
    const reads = observer?.reads ? { cmp: count(), sel: count(), win: count() } : null;
    const attended = cachedSparseAttention(tape, q, gates, cache, this.#layer, this.#shape, reads);
    if (reads) observer?.reads?.(this.#layer, reads);
    return attended;
  }

  /** The rows that blocks to come still need are kept, once the joined ones are there. */
  #join(tape: Tape, x: Tensor, part: 'keys' | 'values', cache: CacheStep): Tensor {
    const tail = cache.tail(part, this.#layer);
    const joined = joinTail(tape, x, tail, cache.tokens, cache.joined);
    keepTail(tape.device, joined, cache.joined, cache.done, tail, cache.tokens);
    return joined;
  }

  /** Queries, keys and values of `#parts`, and the gates [T, H, 3]. */
  #project(tape: Tape, x: Tensor, { tokens }: SparseLayout, rotary: RotaryOptions) {
    const options = gateOptions(this.#shape);
    if (this.#both) {
      const weights = this.#both.parameters.map(({ value }) => value);
      const fused = stackedLinear(tape, x, stackedOperand(this.#both), weights);
      const columns = gateColumns(tape, fused, width(this.#parts), this.#gate.bias.value, options);
      const split = splitHeads(tape, fused, this.#parts, tokens, rotary, columns);
      tape.drop(fused);
      return { split, gates: columns.gates };
    }
    const fused = linear(tape, x, operand(this.#projection, x));
    const split = splitHeads(tape, fused, this.#parts, tokens, rotary);
    tape.drop(fused);
    const logits = linear(tape, x, operand(this.#gate.weight, x), this.#gate.bias.value);
    const gates = gate(tape, logits, options);
    tape.drop(logits);
    return { split, gates };
  }

  #compress(tape: Tape, phi: Phi, x: Tensor, { tokens, blocks }: SparseLayout): Tensor {
    const { l, d } = this.#shape.nsa;
    const layout = { tokens, blocks, l, d };
    if (phi.conv) return compressConv(tape, x, phi.conv.value, layout);
    if (!phi.mlp) return compressAverage(tape, x, layout);
    const { position, w1, w2 } = phi.mlp;
    return compressMlp(tape, x, { position: position.value, w1: operand(w1, x), w2: operand(w2, x) }, layout);
  }
}

function gateOptions({ nsa }: ModelShape): GateOptions {
  return {
    kind: nsa.gate,
    temperature: nsa.gateTemp,
    uniform: nsa.forceUniformGate,
    stopGradient: nsa.stopgradGates,
    ...(nsa.forceBranch === 'none' ? {} : { force: nsa.forceBranch }),
  };
}

/** Whether gates follow from logits and are trained; the debugging options keep to the operation that has them all. */
function isTrained({ force, uniform, stopGradient }: GateOptions): boolean {
  return force === undefined && !uniform && !stopGradient;
}

function createPhi(store: ParameterStore, name: string, shape: ModelShape, size: number): Phi {
  const { phi, l } = shape.nsa;
  if (phi === 'avg') return {};
  if (phi === 'conv') return { conv: store.constant(`${name}.weight`, [l, shape.nKvGroups, size], 1 / l) };
  const hidden = phiHiddenSize(shape);
  return {
    mlp: {
      position: store.matrix(`${name}.position`, [l, shape.nKvGroups, size]),
      w1: store.normal(`${name}.w1`, [hidden, l * size], 1 / Math.sqrt(l * size)),
      w2: store.normal(`${name}.w2`, [size, hidden], 1 / Math.sqrt(hidden)),
    },
  };
}

function width(parts: readonly HeadPart[]): number {
  return parts.reduce((total, { heads, size }) => total + heads * size, 0);
}

function flat(x: Tensor): Tensor {
  const [tokens, heads, size] = x.shape;
  return x.reshape([tokens, heads * size]);
}
