/**
 * Cross entropy of logits against target ids, with the softmax never stored, and fused with the output layer so that
 * the logits are never stored either. The loss is the mean over the tokens whose target is not `IGNORED`; with none
 * of them it is 0, and so are the gradients.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import { DTYPE_BYTES, Tensor } from '../../tensor/tensor.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { linearInputGradient, linearInto, linearWeightGradient } from '../linear/op.js';
import { launchers } from './cuda.js';
import { fp8Head } from './fp8.js';

export const signatures = {
  crossentropy_count: ['ptr', 'ptr', 'ptr', 'i64', 'i64'],
  crossentropy_forward: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64'],
  crossentropy_mean: ['ptr', 'ptr', 'ptr', 'i64'],
  crossentropy_backward: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
  crossentropy_in_place: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64'],
  crossentropy_scale: ['ptr', 'ptr', 'ptr', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Target id of a token that does not count: no loss, no gradient. */
export const IGNORED = -100;

/** Bytes of a chunk's logits by default. Smaller chunks pass more often over the weight's gradient. */
const CHUNK_BYTES = { cpu: 2 ** 27, cuda: 2 ** 31 };

/** Rows that a matrix product takes at a time: a chunk of whole tiles leaves none of them half empty. */
const TILE_ROWS = { cpu: 1, cuda: 256 };

/** How logits are divided into chunks. */
export interface ChunkOptions {
  /** Tokens whose logits are held at a time. */
  readonly chunk?: number;
}

/** `logits` [tokens, vocab], `targets` i32 [tokens] -> the mean loss f32 [1]. */
export function crossEntropy(tape: Tape, logits: Tensor, targets: Tensor): Tensor {
  const [tokens, vocab] = expectFloats('crossEntropy: logits', logits, [-1, -1]);
  const { device } = tape;
  const inverseCount = tape.own(countTargets('crossEntropy', device, targets, tokens, vocab));
  const kernel = device.kernels(kernels);
  const lse = tape.empty([tokens]);
  const losses = tape.empty([tokens]);
  const loss = tape.empty([1]);
  kernel.crossentropy_forward(logits, targets, losses, lse, tokens, vocab);
  kernel.crossentropy_mean(losses, inverseCount, loss, tokens);
  tape.record([logits], [loss], [logits, targets, lse, inverseCount], () => {
    const dLoss = tape.gradient(loss);
    const target = dLoss && tape.gradientTarget(logits);
    if (!target) return;
    const { gradient, accumulate } = target;
    kernel.crossentropy_backward(
      logits,
      targets,
      lse,
      inverseCount,
      dLoss,
      gradient,
      tokens,
      vocab,
      Number(accumulate),
    );
  });
  for (const tensor of [losses, lse, inverseCount]) tape.drop(tensor);
  return loss;
}

/**
 * Cross entropy of the logits x weightᵀ, a chunk of tokens at a time. The gradients for a slope of 1 are made in the
 * forward pass, where the logits are at hand: they cost as much memory as `x` and `weight`, whatever the vocabulary.
 *
 * `x` [tokens, dim], `weight` [vocab, dim] of x's dtype, `targets` i32 [tokens] -> the mean loss f32 [1].
 */
export function linearCrossEntropy(
  tape: Tape,
  x: Tensor,
  weight: Tensor,
  targets: Tensor,
  options: ChunkOptions = {},
): Tensor {
  const { tokens, dim, vocab, chunk } = expectLinear('linearCrossEntropy', x, weight, options);
  const { device } = tape;
  const inverseCount = countTargets('linearCrossEntropy', device, targets, tokens, vocab);
  const kernel = device.kernels(kernels);
  const loss = tape.empty([1]);
  const losses = Tensor.empty(device, [tokens]);
  const dx = tape.tracks(x) ? tape.empty([tokens, dim], x.dtype) : null;
  const dWeight = tape.tracks(weight) ? tape.empty([vocab, dim]) : null;
  if (tokens === 0) dWeight?.zero();
  const fp8 = dx && dWeight ? fp8Head(tape, x, weight, chunk) : null;
  eachChunk(x, vocab, chunk, (logits, from, to) => {
    const [rows, ids, into] = [x.rows(from, to), targets.rows(from, to), losses.rows(from, to)];
    if (fp8?.fits(logits)) {
      const x8 = fp8.forward(rows, logits);
      fp8.backward({ logits, targets: ids, inverseCount, losses: into }, x8, dx!.rows(from, to), {
        gradient: dWeight!,
        accumulate: from > 0,
      });
      return;
    }
    linearInto(device, rows, weight, logits);
    if (!dx && !dWeight) {
      kernel.crossentropy_forward(logits, ids, into, null, to - from, vocab);
      return;
    }
    kernel.crossentropy_in_place(logits, ids, inverseCount, into, to - from, vocab);
    if (dx) linearInputGradient(device, logits, weight, { gradient: dx.rows(from, to), accumulate: false });
    if (dWeight) linearWeightGradient(device, logits, rows, { gradient: dWeight, accumulate: from > 0 });
  });
  kernel.crossentropy_mean(losses, inverseCount, loss, tokens);
  losses.free();
  inverseCount.free();
  fp8?.free();
  const slopes = [dx, dWeight].filter((slope) => slope !== null);
  tape.record([x, weight], [loss], slopes, () => {
    const dLoss = tape.gradient(loss);
    if (!dLoss) return;
    for (const [input, slope] of [[x, dx] as const, [weight, dWeight] as const]) {
      const target = slope && tape.gradientTarget(input);
      if (target) kernel.crossentropy_scale(slope, dLoss, target.gradient, slope.size, Number(target.accumulate));
    }
  });
  for (const slope of slopes) tape.drop(slope);
  return loss;
}

/** The loss of every token, 0 where the target is ignored; the caller frees the result. For evaluation. */
export function crossEntropyLosses(device: Device, logits: Tensor, targets: Tensor): Tensor {
  const [tokens, vocab] = expectFloats('crossEntropyLosses: logits', logits, [-1, -1]);
  countTargets('crossEntropyLosses', device, targets, tokens, vocab).free();
  const losses = Tensor.empty(device, [tokens]);
  device.kernels(kernels).crossentropy_forward(logits, targets, losses, null, tokens, vocab);
  return losses;
}

/** The same from the input of the output layer, a chunk of tokens at a time. */
export function linearCrossEntropyLosses(
  device: Device,
  x: Tensor,
  weight: Tensor,
  targets: Tensor,
  options: ChunkOptions = {},
): Tensor {
  const { tokens, vocab, chunk } = expectLinear('linearCrossEntropyLosses', x, weight, options);
  countTargets('linearCrossEntropyLosses', device, targets, tokens, vocab).free();
  const kernel = device.kernels(kernels);
  const losses = Tensor.empty(device, [tokens]);
  eachChunk(x, vocab, chunk, (logits, from, to) => {
    linearInto(device, x.rows(from, to), weight, logits);
    kernel.crossentropy_forward(logits, targets.rows(from, to), losses.rows(from, to), null, to - from, vocab);
  });
  return losses;
}

/** 1 / (targets that are not ignored) on the device, 0 when there are none. Refuses ids outside the vocabulary. */
function countTargets(what: string, device: Device, targets: Tensor, tokens: number, vocab: number): Tensor {
  expectShape(`${what}: targets`, targets, [tokens], 'i32');
  const inverseCount = Tensor.empty(device, [1]);
  const firstBad = Tensor.empty(device, [1], 'i32');
  device.kernels(kernels).crossentropy_count(targets, inverseCount, firstBad, tokens, vocab);
  // On the CPU only: reading the result from a GPU would make the host wait inside a step.
  const bad = device.kind === 'cpu' ? firstBad.item() : -1;
  firstBad.free();
  if (bad < 0) return inverseCount;
  inverseCount.free();
  throw new UsageError(
    `${what}: token ${bad} has target ${targets.item(bad)}, outside the vocabulary of ${vocab} (${IGNORED} is ignored)`,
  );
}

function expectLinear(what: string, x: Tensor, weight: Tensor, options: ChunkOptions) {
  const [tokens, dim] = expectFloats(`${what}: x`, x, [-1, -1]);
  const [vocab] = expectShape(`${what}: weight`, weight, [-1, dim], x.dtype);
  const chunk = options.chunk ?? chunkRows(tokens, vocab, { on: x.device.kind, bytes: DTYPE_BYTES[x.dtype] });
  if (!Number.isSafeInteger(chunk) || chunk < 1)
    throw new UsageError(`${what}: chunk must be a whole number from 1, not ${chunk}`);
  return { tokens, dim, vocab, chunk };
}

/**
 * Tokens of a chunk by default. Equal chunks, so that no short one at the end costs a whole pass over the weight's
 * gradient.
 */
export function chunkRows(
  tokens: number,
  vocab: number,
  { on, bytes }: { readonly on: Device['kind']; readonly bytes: number },
): number {
  const logits = CHUNK_BYTES[on] / bytes;
  const most = Math.max(1, Math.floor(logits / Math.max(1, vocab)));
  const chunks = Math.max(1, Math.ceil(tokens / most));
  const rows = Math.max(1, Math.ceil(tokens / chunks));
  const whole = TILE_ROWS[on] * Math.ceil(rows / TILE_ROWS[on]);
  return chunks > 1 && whole <= most ? whole : rows;
}

/** Runs `body` for every chunk of the rows of x with room for its logits. */
function eachChunk(
  x: Tensor,
  vocab: number,
  chunk: number,
  body: (logits: Tensor, from: number, to: number) => void,
): void {
  const [tokens] = x.shape;
  const logits = Tensor.empty(x.device, [Math.min(chunk, tokens), vocab], x.dtype);
  for (let from = 0; from < tokens; from += chunk) {
    const to = Math.min(from + chunk, tokens);
    body(logits.rows(0, to - from), from, to);
  }
  logits.free();
}
