/** The gate over the branches (cmp, sel, win) of every head: softmax or sigmoid of logits / temperature. */
import { type Device, defineKernels } from '../../../device/device.js';
import { UsageError } from '../../../errors.js';
import type { Tape } from '../../../tensor/tape.js';
import { Tensor } from '../../../tensor/tensor.js';
import type { FusedColumns, LargestMagnitude } from '../../common/fused-columns.js';
import { expectFloats, expectShape } from '../../common/shapes.js';
import { launchers } from './cuda.js';
import type { GateStatistics } from './reference.js';

export type { GateStatistics } from './reference.js';

export const signatures = {
  gate_forward: ['ptr', 'ptr', 'i64', 'i64', 'f32'],
  gate_backward: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'f32', 'i64'],
  gate_columns_forward: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64', 'f32'],
  gate_columns_backward: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64', 'f32', 'i64', 'i64', 'ptr'],
  gate_constant: ['ptr', 'i64', 'f32', 'f32', 'f32'],
  gate_sums: ['ptr', 'ptr', 'ptr', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** The branches of sparse attention. */
export type Branch = 'cmp' | 'sel' | 'win';
/** In the order of the columns. */
export const BRANCHES: readonly Branch[] = ['cmp', 'sel', 'win'];

/** How gates are computed from logits. */
export interface GateOptions {
  readonly kind: 'softmax' | 'sigmoid';
  readonly temperature: number;
  /** Debug: this branch alone, regardless of the logits. */
  readonly force?: Branch;
  /** Debug: a third for each branch. */
  readonly uniform?: boolean;
  /** Debug: the gates are computed but not trained. */
  readonly stopGradient?: boolean;
}

function expectOptions(kind: string, temperature: number): void {
  if (kind !== 'softmax' && kind !== 'sigmoid')
    throw new UsageError(`the gate's kind must be softmax or sigmoid, not ${kind}`);
  if (!(temperature > 0)) throw new UsageError(`the gate's temperature must be above 0, not ${temperature}`);
}

/** `logits` [T, 3*H], head by head (cmp, sel, win) -> gates f32 [T, H, 3]. */
export function gate(tape: Tape, logits: Tensor, options: GateOptions): Tensor {
  const { kind, temperature, force, uniform = false, stopGradient = false } = options;
  const [tokens, width] = expectFloats('gate: logits', logits, [-1, -1]);
  if (width % 3 !== 0) throw new UsageError(`gate: logits must have 3 columns per head, not ${width} in all`);
  expectOptions(kind, temperature);
  if (force && uniform) throw new UsageError(`a gate can be forced to ${force} or to uniform, not both`);
  const rows = (tokens * width) / 3;
  const isSoftmax = Number(kind === 'softmax');
  const kernel = tape.device.kernels(kernels);
  const gates = tape.empty([tokens, width / 3, 3]);
  if (force || uniform) {
    const [cmp, sel, win] = BRANCHES.map((branch) => (uniform ? 1 / 3 : Number(branch === force)));
    kernel.gate_constant(gates, rows, cmp, sel, win);
  } else {
    kernel.gate_forward(logits, gates, rows, isSoftmax, temperature);
  }
  const frozen = force !== undefined || uniform || stopGradient;
  tape.record([logits], [gates], frozen ? [] : [gates], () => {
    const dGates = tape.gradient(gates);
    const dLogits = dGates && tape.gradientTarget(logits);
    if (!dLogits) return;
    const { gradient, accumulate } = dLogits;
    if (!frozen) kernel.gate_backward(gates, dGates, gradient, rows, isSoftmax, temperature, Number(accumulate));
    // A zero gradient instead of no gradient: the optimizer then treats the gate's weights like all others.
    else if (!accumulate) gradient.zero();
  });
  return gates;
}

/**
 * The gate over logits that are columns of a fused projection, from `column` on; columns after them are padding.
 * It records nothing: the gradient of the projection is one matrix that several operations write, see `splitHeads`.
 * `largest` is told of that gradient.
 */
export function gateColumns(
  tape: Tape,
  fused: Tensor,
  column: number,
  bias: Tensor,
  { kind, temperature }: Pick<GateOptions, 'kind' | 'temperature'>,
  largest: LargestMagnitude | null = null,
): FusedColumns & { readonly gates: Tensor } {
  const [tokens, width] = expectFloats('gateColumns: fused', fused, [-1, -1]);
  const [logits] = expectShape('gateColumns: bias', bias, [-1]);
  if (logits % 3 !== 0) throw new UsageError(`gate: logits must have 3 columns per head, not ${logits} in all`);
  expectOptions(kind, temperature);
  if (column + logits > width)
    throw new UsageError(`gateColumns: ${logits} columns from ${column} on are not in a matrix of ${width}`);
  const heads = logits / 3;
  const isSoftmax = Number(kind === 'softmax');
  const kernel = tape.device.kernels(kernels);
  const gates = tape.empty([tokens, heads, 3]);
  const place = [tokens, heads, width, column, isSoftmax, temperature] as const;
  kernel.gate_columns_forward(fused, bias, gates, ...place);
  return {
    gates,
    columns: width - column,
    inputs: [bias],
    outputs: [gates],
    saved: [gates],
    largest,
    backward: ({ gradient, accumulate }, into) => {
      const dBias = tape.gradientTarget(bias);
      const adds = [Number(accumulate), Number(dBias?.accumulate ?? false)] as const;
      const gradients = [gradient, dBias?.gradient ?? null] as const;
      kernel.gate_columns_backward(gates, tape.gradient(gates), ...gradients, ...place, ...adds, into);
    },
  };
}

const ROWS_PER_PARTIAL = 4096;

/** Elements of the tensor that `gateSums` returns. */
const SUMS = 9;

/** Sums over the rows of gates [..., 3], an f64 tensor [9] that the caller frees; `summarizeGates` reads them. */
export function gateSums(device: Device, gates: Tensor): Tensor {
  expectShape('gateSums: gates', gates.reshape([gates.size / 3, 3]), [-1, 3]);
  const rows = gates.size / 3;
  const sums = Tensor.empty(device, [SUMS], 'f64');
  const partial = Tensor.empty(device, [Math.ceil(rows / ROWS_PER_PARTIAL), SUMS], 'f64');
  device.kernels(kernels).gate_sums(gates, partial, sums, rows);
  partial.free();
  return sums;
}

/** The statistics of all rows behind some sums, one for each layer (and micro-batch). NaN where there are no rows. */
export function summarizeGates(sums: readonly ArrayLike<number>[]): GateStatistics {
  const column = (i: number) => sums.map((one) => one[i]);
  const total = (i: number) => column(i).reduce((a, b) => a + b, 0);
  const rows = total(0);
  return {
    entropyMean: total(1) / rows,
    entropyMin: rows === 0 ? Number.NaN : Math.min(...column(2)),
    maxMean: total(3) / rows,
    max: rows === 0 ? Number.NaN : Math.max(...column(4)),
    collapseFraction: total(5) / rows,
    shares: [total(6) / rows, total(7) / rows, total(8) / rows],
  };
}

/** Statistics over the gates [T, H, 3] of all layers. */
export function gateStatistics(device: Device, gates: readonly Tensor[]): GateStatistics {
  return summarizeGates(
    gates.map((layer) => {
      const sums = gateSums(device, layer);
      const values = sums.read();
      sums.free();
      return values;
    }),
  );
}
