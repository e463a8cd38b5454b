/** One subject of measurement, forward and backward, and its result rows. */
import type { Device } from '../device/device.js';
import { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { measure, type TimeBudget, type Trial } from './timing.js';

/** Parts of attention that are timed. */
export type AttentionPart = 'nsa' | 'dense' | 'cmp' | 'score' | 'sel' | 'win' | 'linear';
/** Forward or backward. */
export type BenchPass = 'forward' | 'backward';

/** One row of `bench attention --json`, but for the share of the peak. */
export interface AttentionRow {
  readonly what: AttentionPart;
  readonly pass: BenchPass;
  readonly kernel: string;
  readonly S: number;
  readonly sequences: number;
  readonly ms: number;
  readonly gflops: number;
  /** Memory beyond inputs and outputs: peak of the pool, and the kernels' own workspace. */
  readonly extra_bytes: number;
}

export interface Description {
  readonly what: AttentionPart;
  readonly kernel: string;
  readonly S: number;
  readonly sequences: number;
  readonly flops: number;
  /** Null without a backward pass. */
  readonly backwardFlops: number | null;
}

/** How one pass is run, what it results in, and the memory it uses that was there before it began. */
export interface Work {
  start(): Trial;
  readonly resultBytes: number;
  readonly heldBytes?: number;
}

export interface Subject {
  readonly description: Description;
  readonly forward: Work;
  readonly backward: Work | null;
}

/** An operation on the tape; `result` has its output's shape and dtype, and is the gradient that backward starts from. */
export function tapeSubject(
  device: Device,
  description: Description,
  operation: { readonly inputs: readonly Tensor[]; readonly result: Tensor; forward(tape: Tape): Tensor },
): Subject {
  const { inputs, result } = operation;
  const forward = {
    resultBytes: result.bytes,
    start: () => {
      const tape = new Tape(device, { record: false });
      return { run: () => void operation.forward(tape), end: () => tape.end() };
    },
  };
  const backward = {
    resultBytes: inputs.reduce((total, { bytes }) => total + bytes, 0),
    start: () => {
      const tape = new Tape(device);
      for (const input of inputs) tape.watch(input);
      const output = operation.forward(tape);
      return { run: () => tape.backward(output, result), end: () => tape.end() };
    },
  };
  return { description, forward, backward: description.backwardFlops === null ? null : backward };
}

export function benchSubject(
  device: Device,
  { description, forward, backward }: Subject,
  budget: TimeBudget,
  onRow: (row: AttentionRow) => void,
): AttentionRow[] {
  const rows = [rowOf(device, description, 'forward', forward, description.flops, budget)];
  onRow(rows[0]);
  if (backward === null || description.backwardFlops === null) return rows;
  rows.push(rowOf(device, description, 'backward', backward, description.backwardFlops, budget));
  onRow(rows[1]);
  return rows;
}

function rowOf(
  device: Device,
  { what, kernel, S, sequences }: Description,
  pass: BenchPass,
  { start, resultBytes, heldBytes = 0 }: Work,
  flops: number,
  budget: TimeBudget,
): AttentionRow {
  const { ms, peakBytes } = measure(device, start, budget);
  const scratch = 'scratchBytes' in device ? Number(device.scratchBytes) : 0;
  const extra = (heldBytes > 0 ? heldBytes : Math.max(0, peakBytes - resultBytes)) + scratch;
  return { what, pass, kernel, S, sequences, ms, gflops: flops / ms / 1e6, extra_bytes: extra };
}
