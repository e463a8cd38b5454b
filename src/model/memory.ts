/**
 * Estimates the memory of training from the shapes: weights with gradients and Adam moments, the activations that the
 * backward pass needs, and the peak working set. docs/reference/model.md lists what each block keeps.
 *
 * With bf16 on a GPU, weights, gradients and moments are f32, every matrix has a bf16 copy, and activations are bf16
 * except gates, log-sum-exps and norm scales. Tests compare the estimate with the tensors of a real step.
 */
import type { Config } from '../config/schema.js';
import type { Device } from '../device/device.js';
import { type FusedBytes, fusedBytes } from '../ops/attention/fused/bytes.js';
import { fusedBuild, fusedPath, isKept } from '../ops/attention/fused/op.js';
import { shapeRefusal } from '../ops/attention/fused/plan.js';
import { scorerRefusal } from '../ops/attention/fused/scorer.js';
import { headPays } from '../ops/crossentropy/fp8.js';
import { chunkRows } from '../ops/crossentropy/op.js';
import { layerPays, MULTIPLE, normedLayerPays } from '../ops/linear/fp8.js';
import { feedForwardPays } from '../ops/linear/fp8-mlp.js';
import { muonElements } from '../ops/muon/op.js';
import { kernelOptions } from './kernels.js';
import { adaptedLayers, type LinearLayer } from './linear-layers.js';
import {
  computeDtype,
  countedLayers,
  headShapeOf,
  hiddenSize,
  type LayerShape,
  layerShapes,
  type ModelShape,
  phiHiddenSize,
  projectionPairs,
  sparseShapeOf,
} from './shape.js';
import { matcher } from './trainable.js';

const FLOAT = 4;
const BF16 = 2;
const FP8 = 1;
/** Value, gradient, and the two moments of AdamW; Muon's matrices have one moment. */
const COPIES = 4;
/** Assumed compute capability: buffer sizes of the fused kernels do not depend on the GPU. */
const ARCHITECTURE = 90;

/** Bytes of a training step by purpose. */
export interface MemoryEstimate {
  /** Bytes of the weights alone, as a checkpoint holds them. */
  readonly weights: number;
  /** Bytes of a checkpoint, and of the copy from which it is written while training goes on (train.async_save). */
  readonly copy: number;
  /** Bytes that stay for the whole run: weights, gradients, moments, and copies in bf16. */
  readonly state: number;
  /** Bytes at the peak of a step beyond that. */
  readonly activations: number;
  readonly total: number;
}

export function parameterCount(shape: ModelShape): number {
  const { dim, vocabSize, tieEmbeddings } = shape;
  const layers = sum(countedLayers(shape).map(({ layer, count }) => count * sum(blockTensors(layer))));
  return layers + dim + vocabSize * dim * (tieEmbeddings ? 1 : 2);
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}

/** Number of elements of each parameter of a block, in the model's order. */
export function blockTensors(shape: LayerShape): number[] {
  return blockParameters(shape).map(([, size]) => size);
}

/** The same with their names inside the block. */
export function blockParameters(shape: LayerShape): [name: string, elements: number][] {
  const { dim, mlp } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const isSparse = shape.attention === 'nsa';
  const projection = dim * (heads * dk + projectionPairs(shape) * groups * (dk + dv));
  const feedForward = dim * hiddenSize(shape);
  const up = (mlp === 'swiglu' ? 2 : 1) * feedForward;
  const optional = (isThere: boolean, ...parameters: [string, number][]) => (isThere ? parameters : []);
  return [
    ['attention_norm', dim],
    ['attention.qkv', projection],
    ...optional(shape.qkvBias, ['attention.qkv_bias', projection / dim]),
    ...optional(shape.qkNorm, ['attention.q_norm', dk], ['attention.k_norm', dk]),
    ...optional(isSparse, ['attention.gate.weight', 3 * heads * dim], ['attention.gate.bias', 3 * heads]),
    ...phiTensors(shape, 'attention.phi_k', dk),
    ...phiTensors(shape, 'attention.phi_v', dv),
    ['attention.out', dim * heads * dv],
    ...optional(shape.outBias, ['attention.out_bias', dim]),
    ['mlp_norm', dim],
    ['mlp.up', up],
    ['mlp.down', feedForward],
    ...optional(shape.mlpBias, ['mlp.up_bias', up / dim], ['mlp.down_bias', dim]),
  ];
}

/** All parameters of a model by name, in its order, with their elements. */
export function namedParameters(shape: ModelShape): [name: string, elements: number][] {
  const table = shape.vocabSize * shape.dim;
  const blocks = layerShapes(shape).flatMap((layer, i) =>
    blockParameters(layer).map(([name, size]): [string, number] => [`blocks.${i}.${name}`, size]),
  );
  return [
    ['embedding', table],
    ...blocks,
    ['norm', shape.dim],
    ...(shape.tieEmbeddings ? [] : ([['head', table]] as [string, number][])),
  ];
}

/** The same for the compression of keys or values with head size `size`. */
function phiTensors(shape: LayerShape, name: string, size: number): [name: string, elements: number][] {
  const { phi, l } = shape.nsa;
  if (shape.attention !== 'nsa' || phi === 'avg') return [];
  const position = l * headShapeOf(shape).groups * size;
  const hidden = phiHiddenSize(shape);
  if (phi === 'conv') return [[`${name}.weight`, position]];
  return [
    [`${name}.position`, position],
    [`${name}.w1`, hidden * l * size],
    [`${name}.w2`, size * hidden],
  ];
}

/** Equal matrices: rows, columns, and how many there are. */
type Matrices = readonly [rows: number, columns: number, count: number];

/** The weight matrices of a block (`Parameter.matrices`), without the gate's. */
function layerMatrices(shape: LayerShape): Matrices[] {
  const { dim, mlp } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const hidden = hiddenSize(shape);
  return [
    [heads * dk, dim, 1],
    [groups * dk, dim, projectionPairs(shape)],
    [groups * dv, dim, projectionPairs(shape)],
    [dim, heads * dv, 1],
    [hidden, dim, mlp === 'swiglu' ? 2 : 1],
    [dim, hidden, 1],
    ...phiLayers(shape),
  ];
}

/** Those of phi mlp. */
function phiLayers(shape: LayerShape): Matrices[] {
  const { attention, nsa, dK, dV } = shape;
  if (attention !== 'nsa' || nsa.phi !== 'mlp') return [];
  const hidden = phiHiddenSize(shape);
  const keysOrValues = (size: number): Matrices[] => [
    [hidden, nsa.l * size, 1],
    [size, hidden, 1],
  ];
  return [...keysOrValues(dK), ...keysOrValues(dV)];
}

function elements(matrices: readonly Matrices[]): number {
  return sum(matrices.map(([rows, columns, count]) => rows * columns * count));
}

/** Number of elements of the matrices of a block, which have a bf16 copy: also the gate's. */
export function blockMatrices(shape: LayerShape): number {
  return elements(layerMatrices(shape)) + (shape.attention === 'nsa' ? 3 * shape.nHeads * shape.dim : 0);
}

/** The part of phi in them. */
export function phiMatrices(shape: LayerShape): number {
  return elements(phiLayers(shape));
}

/** The weight matrices of all blocks, which Muon trains: each shape once, with their number. */
export function weightMatrices(shape: ModelShape): { rows: number; columns: number; count: number }[] {
  const found = new Map<string, { rows: number; columns: number; count: number }>();
  for (const [rows, columns, count] of layerShapes(shape).flatMap(layerMatrices)) {
    const key = `${rows} ${columns}`;
    found.set(key, { rows, columns, count: (found.get(key)?.count ?? 0) + count });
  }
  return [...found.values()];
}

/** The trained numbers of a run: parts of the model, or adapters beside it. */
interface TrainedPart {
  /** Elements of the model's parameters that are trained. */
  readonly elements: number;
  readonly adapters: readonly LinearLayer[];
  readonly rank: number;
  /** Layers below it keep nothing for the backward pass. */
  readonly firstLayer: number;
  readonly hasHead: boolean;
}

function trainedPart(shape: ModelShape, { train }: Pick<Config, 'train'>): TrainedPart {
  const whole = { elements: parameterCount(shape), adapters: [], rank: 0, firstLayer: 0, hasHead: true };
  if (train.lora !== null) {
    const adapters = adaptedLayers(shape, train.lora);
    return { ...whole, elements: 0, adapters, rank: train.lora.rank, hasHead: false };
  }
  if (train.trainable === null) return whole;
  const named = namedParameters(shape);
  const isTrained = matcher(
    train.trainable,
    named.map(([name]) => name),
  );
  const trained = named.filter(([name]) => isTrained(name));
  const layerOf = (name: string) =>
    name === 'embedding' ? 0 : Number(/^blocks\.(\d+)\./.exec(name)?.[1] ?? shape.nLayers);
  return {
    ...whole,
    elements: sum(trained.map(([, size]) => size)),
    firstLayer: Math.min(...trained.map(([name]) => layerOf(name))),
    hasHead: trained.some(([name]) => name === (shape.tieEmbeddings ? 'embedding' : 'head')),
  };
}

/** Estimated bytes of a training step. Allocates nothing. */
export function estimateMemory(
  shape: ModelShape,
  config: Pick<Config, 'train' | 'runtime'>,
  on: Device['kind'] = config.runtime.device === 'cuda' ? 'cuda' : 'cpu',
): MemoryEstimate {
  const rounds = computeDtype(config.runtime, on) === 'bf16';
  const part = trainedPart(shape, config);
  const ofAdapters = part.rank * sum(part.adapters.map(({ inputs, outputs }) => inputs + outputs));
  const [frozen, changed] = [parameterCount(shape) - part.elements, part.elements + ofAdapters];
  const matrices = sum(layerShapes(shape).map(blockMatrices)) + shape.vocabSize * shape.dim;
  const trained = config.train.optimizer === 'muon' && part.adapters.length === 0 ? weightMatrices(shape) : [];
  const oneMoment = Math.min(part.elements, sum(trained.map(({ rows, columns, count }) => rows * columns * count)));
  const copied = rounds ? BF16 * (matrices + ofAdapters) : 0;
  const state = FLOAT * (frozen + COPIES * changed - oneMoment) + copied;
  const setting = { on, bytes: rounds ? BF16 : FLOAT };
  // The update comes when the activations are freed.
  const updating = trained.map(({ rows, columns, count }) => setting.bytes * muonElements(on, count, rows, columns));
  const peak = Math.max(peakBytes(shape, config, setting, part), ...updating);
  const activations = peak + evaluationBytes(shape, config, setting);
  // A checkpoint of adapters holds them alone.
  const weights = FLOAT * (part.adapters.length > 0 ? ofAdapters : parameterCount(shape));
  const copy = weights + FLOAT * (2 * changed - oneMoment);
  return { weights, copy, state, activations, total: state + activations };
}

/** Device kind, and bytes per activation element. */
interface Setting {
  readonly on: Device['kind'];
  readonly bytes: number;
}

/** Peak bytes of a step: the maximum over the points where it can occur, the loss and the passes of every layer. */
function peakBytes(
  shape: ModelShape,
  config: Pick<Config, 'train' | 'runtime'>,
  setting: Setting,
  part: TrainedPart,
): number {
  const { train, runtime } = config;
  const tokens = train.seq_len * train.batch_size;
  const { bytes } = setting;
  const stream = bytes * tokens * shape.dim; // one tensor of the residual stream
  const isCheckpointed = runtime.gradient_checkpointing;
  const again = isCheckpointed ? stream : 0;
  let before = 0; // what the layers below keep
  let inLayers = 0;
  for (const [index, layer] of layerShapes(shape).entries()) {
    const fused = fusedParts(layer, config, setting);
    const fp8 = fp8Layers(layer, config, setting);
    const { heads, dv } = headShapeOf(layer);
    // A layer in FP8 keeps the codes of its input instead of its input.
    const saved = (name: keyof Fp8Layers, inputs: number) => (fp8?.[name] ? (bytes - FP8) * tokens * inputs : 0);
    const kept = attentionKept(layer, bytes) + scorerKept(layer, config);
    const attention = tokens * kept + (fused?.kept ?? 0) - saved('projection', shape.dim);
    const attended = bytes * tokens * heads * dv - saved('output', heads * dv);
    const feedForward =
      tokens * feedForwardKept(layer, bytes) - saved('up', shape.dim) - saved('down', hiddenSize(shape));
    // The codes of a gradient, in both layouts.
    const codes = (name: keyof Fp8Layers, outputs: number) => (fp8?.[name] ? 2 * FP8 * tokens * outputs : 0);
    if (index < part.firstLayer) {
      const inFeedForward = bytes * tokens * (upSize(layer) + hiddenSize(layer));
      inLayers = Math.max(inLayers, 2 * stream + Math.max(inFeedForward, attention + (fused?.forward ?? 0)));
      continue;
    }
    const block = stream + attention + attended + feedForward + adapterBytes(part, index, tokens, setting);
    const inForward = before + block - feedForward + (fused?.forward ?? 0);
    const inFeedForward = before + block + again + stream + bytes * tokens * upSize(layer) + codes('up', upSize(layer));
    const inAttention =
      before +
      again +
      block -
      feedForward -
      (layer.attention === 'nsa' ? attended : 0) + // its rule does not read it
      2 * stream +
      tokens * attentionGradients(layer, bytes, fused !== null) +
      (fused?.backward ?? 0);
    inLayers = Math.max(inLayers, inForward, inFeedForward, inAttention);
    // With checkpointing: the input of every block, and one block at a time run again, its output and gradient apart.
    before += isCheckpointed ? stream + (fused && isKept(train.seq_len) ? fused.ranked : 0) : block;
  }
  const atLoss =
    before +
    lossBytes(shape, tokens, setting, part) +
    (fp8Layers(shape, config, setting)?.head
      ? FP8 * (logitRows(shape, tokens, setting) + shape.dim) * shape.vocabSize
      : 0) +
    2 * stream + // the last norm and its input
    FLOAT * tokens;
  const ids = 2 * FLOAT * tokens;
  return ids + Math.max(atLoss, inLayers);
}

/** Which products of a step are in FP8. */
type Fp8Layers = Readonly<Record<'projection' | 'output' | 'up' | 'down' | 'head', boolean>>;

/** Null without runtime.fp8. */
function fp8Layers(
  shape: LayerShape,
  { train, runtime }: Pick<Config, 'train' | 'runtime'>,
  setting: Setting,
): Fp8Layers | null {
  if (!runtime.fp8 || setting.on !== 'cuda' || setting.bytes !== BF16) return null;
  const { dim, vocabSize } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const tokens = train.seq_len * train.batch_size;
  const isStacked = shape.attention === 'nsa' && !shape.qkvBias;
  const gate = isStacked ? 3 * heads : 0;
  const columns = heads * dk + projectionPairs(shape) * groups * (dk + dv) + gate;
  const hidden = hiddenSize(shape);
  const isFused = shape.mlp === 'silu' && !shape.mlpBias;
  const both = isFused && feedForwardPays(tokens, hidden, dim);
  return {
    projection: isStacked
      ? normedLayerPays(tokens, MULTIPLE * Math.ceil(columns / MULTIPLE), dim)
      : layerPays(tokens, columns, dim),
    output: layerPays(tokens, dim, heads * dv),
    up: both || layerPays(tokens, upSize(shape), dim),
    down: both || layerPays(tokens, dim, hidden),
    head: headPays(logitRows(shape, tokens, setting), vocabSize, dim),
  };
}

/** Bytes of an evaluation on a GPU, which cannot reuse the memory that the recorded graph of a step refers to. */
function evaluationBytes(shape: ModelShape, config: Pick<Config, 'train' | 'runtime'>, setting: Setting): number {
  const { train } = config;
  const { on, bytes } = setting;
  if (on !== 'cuda' || train.eval_every === 0) return 0;
  const tokens = train.seq_len * train.batch_size;
  const stream = bytes * tokens * shape.dim;
  const plain = { ...config, train: { ...train, scorer_loss: 0 } };
  const inAttention = layerShapes(shape).map(
    (layer) => tokens * attentionKept(layer, bytes) + (fusedParts(layer, plain, setting)?.forward ?? 0),
  );
  const inFeedForward = bytes * tokens * (upSize(shape) + hiddenSize(shape));
  const logits = bytes * logitRows(shape, tokens, setting) * shape.vocabSize;
  return 2 * stream + Math.max(logits, inFeedForward, ...inAttention);
}

/** Additional buffers of the fused kernels; null if they are not used. */
function fusedParts(
  shape: LayerShape,
  config: Pick<Config, 'train' | 'runtime'>,
  { on, bytes }: Setting,
): FusedBytes | null {
  const { train, runtime } = config;
  if (on !== 'cuda' || bytes !== BF16 || shape.attention !== 'nsa') return null;
  const options = kernelOptions({ runtime });
  const fusedShape = { heads: headShapeOf(shape), sparse: sparseShapeOf(shape) };
  const scored = train.scorer_loss > 0;
  const serves =
    !options.parity &&
    options.kernel !== 'reference' &&
    train.seq_len >= (options.fusedFrom ?? 0) &&
    shapeRefusal(fusedShape, fusedBuild(options), ARCHITECTURE) === null &&
    !(scored && scorerRefusal(fusedShape.sparse));
  if (!serves) return null;
  const lengths = new Array<number>(train.batch_size).fill(train.seq_len);
  return fusedBytes(lengths, fusedShape, {
    ...{ path: fusedPath(options), deterministic: runtime.deterministic },
    ...{ windowApart: shape.nsa.rope === 'window', scored },
  });
}

/** Bytes per token that attention keeps for its backward pass, without the block's input and the attended values. */
function attentionKept(shape: LayerShape, bytes: number): number {
  const { dim, nsa } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const pair = groups * (dk + dv);
  const pairs = projectionPairs(shape);
  // Heads before their norm, and their 1/rms. The selected and the window branch keep their keys; compression may not.
  const normed = shape.qkNorm ? heads + pairs * groups : 0;
  const norm = bytes * (dim + normed * dk) + FLOAT * (1 + normed); // and 1/rms
  if (shape.attention !== 'nsa') return norm + bytes * (heads * dk + pair) + FLOAT * heads;
  const compressed = pair / nsa.d;
  // phi conv keeps its input. With shared keys and values only keys that are rotated later are a tensor of their own.
  const input = pairs > 1 ? pair : nsa.cmpRope === 'before' ? 0 : groups * dk;
  const raw = nsa.phi === 'conv' ? input : 0;
  const unfolded = nsa.phi === 'mlp' ? (groups * (nsa.l * (dk + dv) + 4 * phiHiddenSize(shape))) / nsa.d : 0;
  const queries = nsa.rope === 'window' ? 2 * heads * dk : heads * dk; // those of the window are others
  const branches = 3 * heads * dv;
  const numbers = 3 * heads + 3 * heads + groups * nsa.nSel; // log-sum-exps, gates, selections
  return (
    norm + bytes * (queries + Math.min(2, pairs) * pair + compressed + raw + unfolded + branches) + FLOAT * numbers
  );
}

/** Bytes per token that the scorer loss keeps: a gradient for each group's selected blocks, and a mean for each head. */
function scorerKept(shape: LayerShape, { train }: Pick<Config, 'train'>): number {
  const { heads, groups } = headShapeOf(shape);
  return train.scorer_loss > 0 && shape.attention === 'nsa' ? FLOAT * (groups * shape.nsa.nSel + heads) : 0;
}

/** The same for the feed-forward layer: its input, the norm, and input and output of the activation. */
function feedForwardKept(shape: LayerShape, bytes: number): number {
  return bytes * (2 * shape.dim + upSize(shape) + hiddenSize(shape)) + FLOAT;
}

function upSize(shape: LayerShape): number {
  return (shape.mlp === 'swiglu' ? 2 : 1) * hiddenSize(shape);
}

/**
 * Bytes per token of gradients in attention's backward pass: of the attended values, queries, keys, values and gates.
 * Kernels of single branches take the gradient of each branch as well.
 */
function attentionGradients(shape: LayerShape, bytes: number, isFused: boolean): number {
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const pair = groups * (dk + dv);
  if (shape.attention !== 'nsa') return bytes * (heads * dv + heads * dk + pair);
  const keys = isFused ? (2 + 1 / shape.nsa.d) * pair : projectionPairs(shape) * pair;
  const queries = (shape.nsa.rope === 'window' ? 2 : 1) * heads * dk;
  return bytes * ((isFused ? 1 : 4) * heads * dv + queries + keys) + FLOAT * 3 * heads;
}

/** Bytes of one chunk of logits and of the gradients that the loss computes. */
function lossBytes(shape: ModelShape, tokens: number, setting: Setting, { hasHead }: TrainedPart): number {
  const { vocabSize: vocab, dim } = shape;
  const { bytes } = setting;
  const gradient = hasHead ? FLOAT * vocab * dim : 0;
  return bytes * logitRows(shape, tokens, setting) * vocab + bytes * tokens * dim + gradient;
}

/**
 * Bytes that the adapters of a layer keep: their inner values, and B among rows of zeros where several layers are rows of one
 * parameter. The latter is small beside the former.
 */
function adapterBytes({ adapters, rank }: TrainedPart, layer: number, tokens: number, { bytes }: Setting): number {
  const own = adapters.filter(({ parameter }) => parameter.startsWith(`blocks.${layer}.`));
  return sum(own.map(({ from, outputs }) => bytes * rank * (tokens + from + outputs)));
}

function logitRows({ vocabSize: vocab }: LayerShape, tokens: number, setting: Setting): number {
  return Math.min(tokens, chunkRows(tokens, vocab, setting));
}
