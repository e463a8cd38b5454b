/**
 * How much memory training will take, from the shapes alone: weights with gradients and Adam moments, the activations
 * that the backward pass needs, and the largest working set beside them. docs/model.md lists what each block keeps.
 */
import type { Config } from '../config/schema.js';
import { headShapeOf, hiddenSize, type ModelShape, phiHiddenSize } from './shape.js';

const FLOAT = 4;
/** Value, gradient, and the two moments. */
const COPIES = 4;

export interface MemoryEstimate {
  /** Bytes that stay for the whole run. */
  readonly state: number;
  /** Bytes at the peak of a step beyond that. */
  readonly activations: number;
  readonly total: number;
}

export function parameterCount(shape: ModelShape): number {
  const { dim, n_layers, vocab_size, tie_embeddings } = shape;
  return n_layers * blockParameters(shape) + dim + vocab_size * dim * (tie_embeddings ? 1 : 2);
}

function blockParameters(shape: ModelShape): number {
  const { dim, mlp } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const hidden = hiddenSize(shape);
  const sparse = shape.attention === 'nsa';
  const projection = dim * (heads * dk + (sparse ? 3 : 1) * groups * (dk + dv));
  const gate = sparse ? 3 * heads * (dim + 1) : 0;
  const output = dim * heads * dv;
  const feedForward = (mlp === 'swiglu' ? 3 : 2) * dim * hidden;
  return 2 * dim + projection + gate + output + feedForward + (sparse ? phiParameters(shape) : 0);
}

function phiParameters(shape: ModelShape): number {
  const { phi, l } = shape.nsa;
  const { groups, dk, dv } = headShapeOf(shape);
  if (phi === 'avg') return 0;
  const perPosition = l * groups * (dk + dv);
  return phi === 'conv' ? perPosition : perPosition + phiHiddenSize(shape) * (l + 1) * (dk + dv);
}

/** Floats per token that one block keeps until its backward pass. */
function keptPerToken(shape: ModelShape): number {
  const { dim, mlp, nsa } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const hidden = hiddenSize(shape);
  const feedForward = 2 * dim + (mlp === 'swiglu' ? 3 : 2) * hidden; // middle, its norm, up, active
  const input = 2 * dim + 2; // the block's input, its norm, two 1/rms
  if (shape.attention === 'dense') return input + feedForward + heads * (dk + dv + 1) + groups * (dk + dv);
  const compressed = (groups * (dk + dv)) / nsa.d;
  const raw = nsa.phi === 'conv' ? groups * (dk + dv) : 0;
  const unfolded = nsa.phi === 'mlp' ? (groups * (nsa.l * (dk + dv) + 4 * phiHiddenSize(shape))) / nsa.d : 0;
  const branches = 4 * heads * dv + 3 * heads + 3 * heads; // three outputs and their sum, LSEs, gates
  return (
    input +
    feedForward +
    heads * dk +
    2 * groups * (dk + dv) +
    compressed +
    raw +
    unfolded +
    branches +
    groups * nsa.n_sel
  );
}

/**
 * Floats per token at the busiest point inside one block's backward pass, beyond what the block keeps. The feed-forward's
 * gradients come first, while everything is still kept; attention's come when the feed-forward's activations are gone.
 */
function workingPerToken(shape: ModelShape): number {
  const { dim, mlp } = shape;
  const { heads, groups, dk, dv } = headShapeOf(shape);
  const hidden = hiddenSize(shape);
  const isGated = mlp === 'swiglu';
  const feedForward = 2 * dim + (isGated ? 2 : 1) * hidden;
  const freed = 2 * dim + (isGated ? 3 : 2) * hidden;
  const sparse = shape.attention === 'nsa';
  const attention =
    2 * dim + (sparse ? 4 : 1) * heads * dv + heads * dk + (sparse ? 3 : 1) * groups * (dk + dv) - freed;
  return Math.max(feedForward, attention);
}

/** Largest chunk of logits the loss holds at a time, and the gradients it makes beside them. */
function lossBytes(shape: ModelShape, tokens: number): number {
  const logits = Math.min(FLOAT * tokens * shape.vocab_size, 128 * 2 ** 20);
  return logits + FLOAT * (tokens * 2 * shape.dim + shape.vocab_size * shape.dim);
}

export function estimateMemory(
  shape: ModelShape,
  { train, runtime }: Pick<Config, 'train' | 'runtime'>,
): MemoryEstimate {
  const tokens = train.seq_len * train.batch_size;
  const state = COPIES * FLOAT * parameterCount(shape);
  const kept = keptPerToken(shape);
  // With checkpointing: the input of every block, and one block at a time run again.
  const layers = runtime.gradient_checkpointing ? (shape.n_layers - 1) * shape.dim + kept : shape.n_layers * kept;
  const afterLoss = FLOAT * tokens * (layers + workingPerToken(shape));
  const atLoss =
    FLOAT * tokens * (runtime.gradient_checkpointing ? shape.n_layers * shape.dim : shape.n_layers * kept) +
    lossBytes(shape, tokens);
  const dWeight = FLOAT * shape.vocab_size * shape.dim;
  const activations = Math.max(atLoss, afterLoss + dWeight);
  return { state, activations, total: state + activations };
}
