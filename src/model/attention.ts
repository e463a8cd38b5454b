/**
 * The attention layer: one fused projection, rotary positions, Native Sparse Attention (or dense attention as the
 * baseline), and the output projection.
 */
import { UsageError } from '../errors.js';
import { silu } from '../ops/activation/op.js';
import { combine } from '../ops/attention/combine/op.js';
import { compressAverage, compressConv, compressMlp, unfold } from '../ops/attention/compress/op.js';
import type { AttendedWith } from '../ops/attention/coverage.js';
import {
  joinTail,
  keepTail,
  pagedCompressed,
  pagedSelected,
  pagedWindow,
  storePages,
} from '../ops/attention/decode/paged/op.js';
import { denseAttention } from '../ops/attention/dense/op.js';
import { type GateOptions, gate, gateColumns } from '../ops/attention/gate/op.js';
import { nativeSparseAttention, type SparseOptions, type SparseOutputs } from '../ops/attention/nsa.js';
import type { HeadShape, SparseShape } from '../ops/attention/shape.js';
import { windowAttention } from '../ops/attention/window/op.js';
import { operand, stackedOperand } from '../ops/cast/op.js';
import type { FusedColumns } from '../ops/common/fused-columns.js';
import { Sequences } from '../ops/common/sequences.js';
import { largestOfGradient, normedLayerPays, usesFp8 } from '../ops/linear/fp8.js';
import { stackedLinear } from '../ops/linear/op.js';
import { rmsnorm } from '../ops/rmsnorm/op.js';
import { type HeadPart, type RotaryOptions, type RotaryTable, rotate, splitHeads } from '../ops/rope/op.js';
import type { Parameter } from '../tensor/parameter.js';
import type { ParameterStack } from '../tensor/parameter-stack.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { isAdapted, project } from './adapters.js';
import type { CacheStep, PageKind } from './cache.js';
import type { ParameterStore } from './parameters.js';
import { denseTile, MIN_TILE_TOKENS, sparseTile } from './prompt-tile.js';
import {
  headShapeOf,
  type LayerShape,
  layerShape,
  type ModelShape,
  phiHiddenSize,
  projectionPairs,
  rotaryShapeOf,
  seesPositions,
  sparseShapeOf,
} from './shape.js';

/** Keys each branch read, i32 [T, G]. */
export interface BranchReads {
  readonly cmp: Tensor;
  readonly sel: Tensor;
  readonly win: Tensor;
}

/** Callbacks of a forward pass. The tensors are valid only during the call. */
export interface Observer {
  /** Gates [T, H, 3] of a layer. */
  gates?(layer: number, gates: Tensor): void;
  /** Queries, keys and choice of a layer that reads whole sequences; not called for a window alone or cached tokens. */
  attended?(layer: number, attended: AttendedWith): void;
  /** Selected blocks i32 [T, G, nSel] of a layer. */
  selected?(layer: number, selected: Tensor): void;
  /** Scorer loss [1] of a layer. Called only with `scorerWeight`. */
  scorerLoss?(layer: number, loss: Tensor): void;
  /** Keys that each branch read. Called only for a cache that already holds tokens. */
  reads?(layer: number, reads: BranchReads): void;
}

/** Inputs of a forward pass of an attention layer besides its activations. */
export interface AttentionContext {
  /** Lengths of the sequences, packed one after the other; a loop makes the `Sequences` once for all its passes. */
  readonly lengths: readonly number[] | Sequences;
  /** Which kernels compute attention. */
  readonly kernels?: SparseOptions | undefined;
  readonly observer?: Observer | undefined;
  /** The tokens continue cached sequences and are added to the cache; `lengths` are those of the step. No gradients. */
  readonly cache?: CacheStep | undefined;
}

/**
 * The sequences of a forward pass of this many tokens; those made from lengths are freed with the tape. Throws unless the
 * context fits the tokens and the shape of the model.
 */
export function sequencesOf(tape: Tape, context: AttentionContext, tokens: number, shape: ModelShape): Sequences {
  const lengths = (context as AttentionContext | undefined)?.lengths;
  if (!lengths) throw new UsageError('a forward pass needs { lengths } of the packed sequences, such as [700, 324]');
  const given = lengths instanceof Sequences ? lengths : tape.hold(new Sequences(tape.device, lengths));
  if (given.total !== tokens)
    throw new UsageError(`the lengths sum to ${given.total}, but ${tokens} tokens were given: they must be equal`);
  context.cache?.expectShape(shape);
  return given;
}

/** Parameters of the compression of keys or of values (`nsa.phi`); empty for `avg`. */
export interface PhiParameters {
  /** Weights [l, G, size] of phi `conv`. */
  readonly conv?: Parameter;
  /** `position` [l, G, size], `w1` [hidden, l * size] and `w2` [size, hidden] of phi `mlp`. */
  readonly mlp?: Readonly<Record<'position' | 'w1' | 'w2', Parameter>>;
}

/** Columns of the fused projection, and which of the norms its heads have in a model with `qkNorm`. */
interface ProjectionPart extends HeadPart {
  readonly norm: 'query' | 'key' | null;
}

/** An attention layer: sparse, dense, or a window alone, as `shape.attention` and `shape.layerPattern` say. */
export class Attention {
  /** Fused projection of the input to queries, keys and values [columns, dim]; docs/reference/model.md gives the order. */
  readonly projection: Parameter;
  /** Bias [columns] of the projection; null without. */
  readonly projectionBias: Parameter | null;
  /** Weights [dK] of the norms of query and key heads, the same for all heads and branches; null without. */
  readonly norms: { readonly query: Parameter; readonly key: Parameter } | null;
  /** Output projection [dim, H * dV]. */
  readonly output: Parameter;
  /** Bias [dim] of the output projection; null without. */
  readonly outputBias: Parameter | null;
  /** Weight [3 * H, dim] and bias [3 * H] of the gate; null without sparse attention. */
  readonly gate: { readonly weight: Parameter; readonly bias: Parameter } | null;
  /** Compression of keys and values; null without sparse attention. */
  readonly phi: { readonly keys: PhiParameters; readonly values: PhiParameters } | null;
  #shape: ModelShape;
  /** `#shape` as the attention kernels take it. */
  readonly #heads: HeadShape;
  #sparse: SparseShape;
  readonly #layer: number;
  readonly #kind: LayerShape['attention'];
  readonly #parts: readonly ProjectionPart[];
  readonly #rotations: RotaryTable;
  /**
   * The gate's rows below those of the projection, where the kernels allow it: the few outputs of the gate alone would
   * cost one pass over the input forward and two backward.
   */
  readonly #stack: ParameterStack | null;

  /** `name` prefixes the parameters; `layer` is the index in the cache and in calls of the observer. */
  constructor(store: ParameterStore, name: string, shape: ModelShape, layer = 0) {
    this.#heads = headShapeOf(shape);
    this.#sparse = sparseShapeOf(shape);
    const { heads, groups, dk, dv } = this.#heads;
    const own = layerShape(shape, layer);
    const isSparse = own.attention === 'nsa';
    const query: ProjectionPart = { heads, size: dk, rotate: seesPositions(own), norm: 'query' };
    const key: ProjectionPart = { heads: groups, size: dk, rotate: true, norm: 'key' };
    const value: ProjectionPart = { heads: groups, size: dv, rotate: false, norm: null };
    this.#shape = shape;
    this.#layer = layer;
    this.#kind = own.attention;
    // Queries, then keys and values of the compressed, the selected and the window branch, or of all branches.
    const compressed = { ...key, rotate: !isSparse || shape.nsa.cmpRope === 'before' };
    const selected = { ...key, rotate: seesPositions(own) };
    const others = projectionPairs(own) > 1 ? [selected, value, key, value] : [];
    this.#parts = [query, compressed, value, ...others];
    this.#rotations = store.rotary(rotaryShapeOf(shape));
    this.projection = store.matrix(`${name}.qkv`, [width(this.#parts), shape.dim], rowsOf(this.#parts));
    this.projectionBias = shape.qkvBias ? store.zeros(`${name}.qkv_bias`, [width(this.#parts)]) : null;
    this.norms = shape.qkNorm
      ? { query: store.constant(`${name}.q_norm`, [dk], 1), key: store.constant(`${name}.k_norm`, [dk], 1) }
      : null;
    this.gate = isSparse
      ? {
          weight: store.zeros(`${name}.gate.weight`, [3 * heads, shape.dim]),
          bias: store.zeros(`${name}.gate.bias`, [3 * heads]),
        }
      : null;
    const isStacked = isTrained(gateOptions(shape)) && !this.projectionBias;
    this.#stack = this.gate && isStacked ? store.stack(this.projection, this.gate.weight) : null;
    this.phi = isSparse
      ? {
          keys: createPhi(store, `${name}.phi_k`, shape, dk),
          values: createPhi(store, `${name}.phi_v`, shape, dv),
        }
      : null;
    this.output = store.residualMatrix(`${name}.out`, [shape.dim, heads * dv]);
    this.outputBias = shape.outBias ? store.zeros(`${name}.out_bias`, [shape.dim]) : null;
  }

  /** Replaces the shape by one that has the same parameters (`LanguageModel.setSelectedBlocks`). */
  setShape(shape: ModelShape): void {
    this.#shape = shape;
    this.#sparse = sparseShapeOf(shape);
  }

  /** Whether the input of a forward pass is to be in FP8, for `x` [T, dim] before its norm. */
  takesFp8(tape: Tape, x: Tensor): boolean {
    if (!this.#stack || this.#isAdapted || !usesFp8(tape, x)) return false;
    const [outputs, inputs] = stackedOperand(this.#stack).shape;
    return normedLayerPays(x.shape[0], outputs, inputs);
  }

  /** `x` [T, dim], normalised, in FP8 if `takesFp8` → [T, dim], added to `residual` [T, dim] if given. */
  forward(tape: Tape, x: Tensor, context: AttentionContext, residual: Tensor | null = null): Tensor {
    const tokens = sequencesOf(tape, context, x.shape[0], this.#shape);
    const attend = this.gate ? this.#attendSparse : this.#attendPlain;
    const attended = attend.call(this, tape, x, tokens, context);
    const out = project(tape, flat(attended), this.output, this.outputBias?.value, residual);
    tape.drop(attended);
    return out;
  }

  /** Dense attention, or a window alone. */
  #attendPlain(tape: Tape, x: Tensor, tokens: Sequences, { kernels, observer, cache }: AttentionContext): Tensor {
    const fused = project(tape, x, this.projection, this.projectionBias?.value);
    const rotary = { table: this.#rotations, start: cache?.tokens.starts ?? 0 };
    const [q, k, v] = this.#split(tape, fused, tokens, rotary);
    tape.drop(fused);
    if (cache) storePages(tape.device, k, v, cache.pages('win', this.#layer), cache.tokens);
    const attended =
      cache && !cache.isFresh
        ? this.#attendPlainCached(tape, q, cache, kernels)
        : this.#kind === 'window'
          ? windowAttention(tape, { q, k, v }, tokens, this.#shape.nsa.w, kernels ?? {})
          : denseAttention(tape, { q, k, v }, tokens, kernels);
    if (!cache && this.#kind === 'dense') observer?.attended?.(this.#layer, { q, k, selected: null });
    for (const tensor of [q, k, v]) tape.drop(tensor);
    return attended;
  }

  #attendPlainCached(tape: Tape, q: Tensor, cache: CacheStep, kernels: SparseOptions | undefined): Tensor {
    if (this.#kind === 'dense' && q.shape[0] >= MIN_TILE_TOKENS) {
      const tile = denseTile(tape, q, { cache, layer: this.#layer, heads: this.#heads, kernels });
      if (tile) return tile;
    }
    const pages = cache.pages('win', this.#layer);
    const w = this.#kind === 'window' ? this.#shape.nsa.w : Number.POSITIVE_INFINITY;
    const { out, lse } = pagedWindow(tape, q, pages, cache.tokens, this.#heads, w);
    tape.drop(lse);
    return out;
  }

  #attendSparse(tape: Tape, x: Tensor, tokens: Sequences, context: AttentionContext): Tensor {
    const { kernels, observer, cache } = context;
    const { nsa } = this.#shape;
    const table = this.#rotations;
    const start = cache?.tokens.starts ?? 0;
    const { split, gates } = this.#project(tape, x, tokens, { table, start });
    const [q, newKeys, newValues] = split;
    const [kSel, vSel, kWin, vWin] = nsa.sharedKv
      ? this.#shared(tape, newKeys, newValues, tokens, { table, start })
      : split.slice(3);
    // Blocks that began in cached tokens need the raw rows of those tokens.
    const rawKeys = cache ? this.#join(tape, newKeys, 'keys', cache) : newKeys;
    const rawValues = cache ? this.#join(tape, newValues, 'values', cache) : newValues;
    const raw = cache?.joined ?? tokens;
    const compressedKeys = this.#compress(tape, this.phi!.keys, rawKeys, raw);
    const vCmp = this.#compress(tape, this.phi!.values, rawValues, raw);
    const blockStart = cache?.blockPositions ?? 0;
    const kCmp =
      nsa.cmpRope === 'after'
        ? rotate(tape, compressedKeys, raw.compressed(nsa), { table, stride: nsa.d, start: blockStart })
        : compressedKeys;
    observer?.gates?.(this.#layer, gates);
    const qWin = nsa.rope === 'window' ? rotate(tape, q, tokens, { table, start }) : q;
    const inputs = { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates, ...(qWin !== q && { qWin }) };
    if (cache) {
      storePages(tape.device, kCmp, vCmp, cache.pages('cmp', this.#layer), cache.blocks);
      storePages(tape.device, kSel, vSel, cache.pages('sel', this.#layer), cache.tokens);
      if (!nsa.sharedKv) storePages(tape.device, kWin, vWin, cache.pages('win', this.#layer), cache.tokens);
    }
    const { out, selected, ...branches } =
      cache && !cache.isFresh
        ? this.#attendSparseCached(tape, { q, qWin, gates }, cache, { observer, kernels })
        : nativeSparseAttention(tape, inputs, raw, this.#sparse, this.#scored(kernels));
    if (!cache) observer?.attended?.(this.#layer, { q, k: kSel, selected });
    observer?.selected?.(this.#layer, selected);
    if (branches.scorerLoss) observer?.scorerLoss?.(this.#layer, branches.scorerLoss);
    const given = [...split, qWin, kSel, rawKeys, rawValues, compressedKeys, vCmp, kCmp, gates];
    for (const tensor of new Set([...given, ...Object.values(branches), selected])) tape.drop(tensor);
    return out;
  }

  /** Beside the fused kernels the scorer loss has no gradient where a forced branch closes the compressed one's gate. */
  #scored(kernels: SparseOptions | undefined): SparseOptions | undefined {
    const { forceBranch } = this.#shape.nsa;
    const isClosed = forceBranch === 'sel' || forceBranch === 'win';
    return kernels?.scorerWeight && isClosed ? { ...kernels, fusedFrom: Number.POSITIVE_INFINITY } : kernels;
  }

  /** Attention of new tokens over a cache that already holds their keys and values. */
  #attendSparseCached(
    tape: Tape,
    { q, qWin, gates }: Record<'q' | 'qWin' | 'gates', Tensor>,
    cache: CacheStep,
    { observer, kernels }: Pick<AttentionContext, 'observer' | 'kernels'>,
  ): Pick<SparseOutputs, 'out' | 'selected'> & Partial<SparseOutputs> {
    const [heads, sparse, { sharedKv }] = [this.#heads, this.#sparse, this.#shape.nsa];
    if (q.shape[0] >= MIN_TILE_TOKENS && !observer?.reads) {
      const place = { cache, layer: this.#layer, heads, kernels };
      const tile = sparseTile(tape, { q, qWin, gates }, place, { ...sparse, sharedKv });
      if (tile) return tile;
    }
    const count = () => tape.empty([q.shape[0], heads.groups], 'i32');
    const reads = observer?.reads ? { cmp: count(), sel: count(), win: count() } : null;
    const { tokens } = cache;
    const pages = (kind: PageKind) => cache.pages(kind, this.#layer);
    const cmp = pagedCompressed(tape, q, pages('cmp'), tokens, heads, sparse, reads?.cmp);
    const { selected } = cmp;
    const sel = pagedSelected(tape, q, selected, pages('sel'), tokens, heads, reads?.sel);
    const windowPages = pages(sharedKv ? 'sel' : 'win');
    const win = pagedWindow(tape, qWin, windowPages, tokens, heads, sparse.w, reads?.win);
    const out = combine(tape, gates, cmp.out, sel.out, win.out);
    for (const { lse } of [cmp, sel, win]) tape.drop(lse);
    if (reads) observer?.reads?.(this.#layer, reads);
    return { out, oCmp: cmp.out, oSel: sel.out, oWin: win.out, selected };
  }

  /** Keys and values of the selected and of the window branch when all branches share theirs. */
  #shared(tape: Tape, keys: Tensor, values: Tensor, tokens: Sequences, rotary: RotaryOptions): Tensor[] {
    // Without `before` the compressed branch reads them unrotated, and the others need their positions.
    const rotated = this.#shape.nsa.cmpRope === 'before' ? keys : rotate(tape, keys, tokens, rotary);
    return [rotated, values, rotated, values];
  }

  /** The cached raw rows followed by the new ones. The rows that later blocks need replace those in the cache. */
  #join(tape: Tape, x: Tensor, part: 'keys' | 'values', cache: CacheStep): Tensor {
    const tail = cache.tail(part, this.#layer);
    const joined = joinTail(tape, x, tail, cache.tokens, cache.joined);
    keepTail(tape.device, joined, cache.joined, cache.done, tail, cache.tokens);
    return joined;
  }

  /** Queries, keys and values of `#parts`, and the gates [T, H, 3]. */
  #project(tape: Tape, x: Tensor, tokens: Sequences, rotary: RotaryOptions) {
    const options = gateOptions(this.#shape);
    const { weight, bias } = this.gate!;
    if (this.#stack && !this.#isAdapted) {
      const weights = this.#stack.parameters.map(({ value }) => value);
      const largest = largestOfGradient(tape, x);
      const fused = stackedLinear(tape, x, stackedOperand(this.#stack), weights, largest);
      const columns = gateColumns(tape, fused, width(this.#parts), bias.value, options, largest);
      const split = this.#split(tape, fused, tokens, rotary, columns);
      tape.drop(fused);
      return { split, gates: columns.gates };
    }
    const fused = project(tape, x, this.projection, this.projectionBias?.value);
    const split = this.#split(tape, fused, tokens, rotary);
    tape.drop(fused);
    const logits = project(tape, x, weight, bias.value);
    const gates = gate(tape, logits, options);
    tape.drop(logits);
    return { split, gates };
  }

  /** Whether a layer of `#stack` has adapters: the product of all layers at once has no place for them. */
  get #isAdapted(): boolean {
    return this.#stack?.parameters.some(isAdapted) ?? false;
  }

  /** The parts of the fused projection, normalised and rotated as each requires. */
  #split(
    tape: Tape,
    fused: Tensor,
    tokens: Sequences,
    rotary: RotaryOptions,
    behind: FusedColumns | null = null,
  ): Tensor[] {
    const { norms } = this;
    if (!norms) return splitHeads(tape, fused, this.#parts, tokens, rotary, behind);
    const plain = this.#parts.map((part) => ({ ...part, rotate: false }));
    return splitHeads(tape, fused, plain, tokens, null, behind).map((x, i) => {
      const { norm, rotate: isRotated, size } = this.#parts[i];
      if (norm === null) return x;
      const rows = x.reshape([x.size / size, size]);
      const normed = rmsnorm(tape, rows, norms[norm].value, this.#shape.normEps).reshape(x.shape);
      tape.drop(x);
      if (!isRotated) return normed;
      const rotated = rotate(tape, normed, tokens, rotary).reshape(x.shape);
      tape.drop(normed);
      return rotated;
    });
  }

  #compress(tape: Tape, phi: PhiParameters, x: Tensor, tokens: Sequences): Tensor {
    const { l, d } = this.#shape.nsa;
    const blocks = { tokens, l, d };
    if (phi.conv) return compressConv(tape, x, phi.conv.value, blocks);
    if (!phi.mlp) return compressAverage(tape, x, blocks);
    const { position, w1, w2 } = phi.mlp;
    if (!isAdapted(w1) && !isAdapted(w2))
      return compressMlp(tape, x, { position: position.value, w1: operand(w1, x), w2: operand(w2, x) }, blocks);
    const unfolded = unfold(tape, x, position.value, blocks);
    const inner = project(tape, unfolded, w1);
    tape.drop(unfolded);
    const active = silu(tape, inner);
    tape.drop(inner);
    const y = project(tape, active, w2);
    tape.drop(active);
    const [, groups, size] = x.shape;
    return y.reshape([y.size / (groups * size), groups, size]);
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

/** Whether the gate is trained. The debugging options need the separate gate operation, which has them all. */
function isTrained({ force, uniform, stopGradient }: GateOptions): boolean {
  return force === undefined && !uniform && !stopGradient;
}

function createPhi(store: ParameterStore, name: string, shape: ModelShape, size: number): PhiParameters {
  const { phi, l } = shape.nsa;
  if (phi === 'avg') return {};
  if (phi === 'conv') return { conv: store.constant(`${name}.weight`, [l, shape.nKvGroups, size], 1 / l) };
  const hidden = phiHiddenSize(shape);
  return {
    mlp: {
      position: store.matrix(`${name}.position`, [l, shape.nKvGroups, size]),
      w1: store.normal(`${name}.w1`, [hidden, l * size], 1 / Math.sqrt(l * size), [hidden]),
      w2: store.normal(`${name}.w2`, [size, hidden], 1 / Math.sqrt(hidden), [size]),
    },
  };
}

/** Rows of the projection that belong to each part. */
function rowsOf(parts: readonly HeadPart[]): number[] {
  return parts.map(({ heads, size }) => heads * size);
}

function width(parts: readonly HeadPart[]): number {
  return rowsOf(parts).reduce((total, rows) => total + rows, 0);
}

function flat(x: Tensor): Tensor {
  const [tokens, heads, size] = x.shape;
  return x.reshape([tokens, heads * size]);
}
