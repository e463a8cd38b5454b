import { describe, expect, it } from 'vitest';
import type { Addressable } from '../device/device.js';
import type { AttentionArguments } from '../ops/attention/branch.js';
import { Tensor } from '../tensor/tensor.js';
import { cpu } from '../testing/devices.js';
import { type Invariant, runCheck } from './check.js';
import { type Argument, type Fault, FaultyDevice, replaced, spoiled } from './testing/faulty-device.js';
import { checksFor } from './verify.js';

/** Rows of the checks of one invariant, for cases whose name holds `text`. */
function run(faults: Record<string, Fault>, invariant: Invariant, text: string) {
  const device = new FaultyDevice(cpu(), faults);
  const checks = checksFor(device, false).filter((check) => check.invariant === invariant && check.case.includes(text));
  expect(checks.length).toBeGreaterThan(0);
  return checks.map((check) => runCheck(check, device));
}

/** Every check of the selection fails with a reason that names the symptom. */
function expectFailure(faults: Record<string, Fault>, invariant: Invariant, text: string, reason: string | RegExp) {
  for (const row of run(faults, invariant, text)) {
    expect(row.ok, row.case).toBe(false);
    expect(row.reason).toMatch(reason);
  }
}

// Positions of arguments in the signatures of window_forward and of compressed_forward and _backward.
const [W, L] = [1, 1];
const anyVariant = 'phi avg, gate softmax, rope after';

describe('a broken kernel is found', () => {
  it('by none of the checks when nothing is broken', () => {
    for (const invariant of ['1 reference', '2 causality', '3 prefix', '4 packing', '6 gradients'] as const)
      for (const row of run({}, invariant, anyVariant)) expect(row).toMatchObject({ ok: true, reason: null });
  });

  it('1: a window of w + 1 keys, as several public codes have', () => {
    const faults = { window_forward: replaced(W, (w) => w + 1) };
    expectFailure(faults, '1 reference', anyVariant, 'the output is off');
    expectFailure(faults, '9 shapes', 'h = 6', 'is off');
  });

  it('1: blocks that are not the best', () => {
    // Block 1 in place of the second one chosen: right in number and order, wrong in score.
    const faults: Record<string, Fault> = {
      select_forward: (kernel, values, device) => {
        kernel(...values);
        const [, , , offsets, , selected] = values as Addressable[];
        const [sequences, , groups] = values.slice(6) as number[];
        const count = values[13] as number;
        const ends = new Int32Array(sequences + 1);
        device.download(offsets.pointer, new Uint8Array(ends.buffer));
        const blocks = new Int32Array(ends[sequences] * groups * count);
        device.download(selected.pointer, new Uint8Array(blocks.buffer));
        for (let i = 1; i < blocks.length; i += count) if (blocks[i] > 1) blocks[i] = 1;
        device.upload(selected.pointer, new Uint8Array(blocks.buffer));
      },
    };
    expectFailure(faults, '1 reference', 'core', 'which are not its best blocks');
    expectFailure(faults, '9 shapes', "S no multiple of l'", 'which are not its best blocks');
  });

  it('1: one wrong number in a gradient', () => {
    const faults = { window_backward: spoiled('dKeys', 3, (value) => value + 1) };
    expectFailure(faults, '9 shapes', 'G = H', 'dk_win is off');
  });

  it('1: NaN', () => {
    const faults = { combine_forward: spoiled(4, 0, () => Number.NaN) };
    expectFailure(faults, '9 shapes', 'S = w + 1', 'the error is NaN: v1: out is off');
  });

  it('2: compressed blocks that are seen before they end', () => {
    const faults = { compressed_forward: replaced(L, (l) => l - 4) };
    expectFailure(faults, '2 causality', anyVariant, /values up to token \d+ change with the tokens after it/);
    expectFailure(faults, '2 causality', 'language model', /hidden values up to token \d+ change/);
  });

  it('2: gradients that reach tokens after the output', () => {
    const faults = { compressed_backward: replaced(L, (l) => l - 4) };
    expectFailure(faults, '2 causality', anyVariant, 'tokens after t get a gradient');
  });

  it('3: a result that depends on how long the sequence is', () => {
    const faults: Record<string, Fault> = {
      window_forward: (kernel, values, device) => {
        const ends = new Int32Array(2);
        device.download(branch(values).offsets.pointer, new Uint8Array(ends.buffer));
        replaced(W, (w) => (ends[1] > 40 ? w : w - 1))(kernel, values, device);
      },
    };
    expectFailure(faults, '3 prefix', anyVariant, 'tokens alone give another output');
  });

  it('4: sequences that see each other', () => {
    const faults: Record<string, Fault> = {
      window_forward: (kernel, values, device) => {
        const given = branch(values);
        const ends = new Int32Array(given.sequences + 1);
        device.download(given.offsets.pointer, new Uint8Array(ends.buffer));
        const offsets = Tensor.from(device, [0, ends[given.sequences]], [2], 'i32');
        kernel({ ...given, offsets, keyOffsets: offsets, sequences: 1 }, ...values.slice(1));
        offsets.free();
      },
    };
    expectFailure(faults, '4 packing', anyVariant, /sequence \d alone (gives another output|gets another gradient)/);
  });

  it('5: a selection that leaves out a block', () => {
    const faults = { selected_forward: replaced(2, (block) => block - 1) };
    expectFailure(faults, '5 dense', 'selected', 'is not that of dense attention');
  });

  it('6: a gradient that is one per cent too large', () => {
    const faults: Record<string, Fault> = {
      gate_backward: (kernel, values) =>
        kernel(...values.map((value, i) => (i === 5 ? (value as number) / 1.01 : value))),
    };
    expectFailure(faults, '6 gradients', anyVariant, /the gradient of (x|gate\.weight|gate\.bias) is off/);
  });

  it('7: a window that sees the next token', () => {
    const [row] = run({ window_forward: shiftedForward, window_backward: shiftedBackward }, '7 random tokens', '');
    expect(row.ok).toBe(false);
    expect(row.error).toBeGreaterThan(0.1);
    expect(row.reason).toMatch(/the loss was [0-3]\.\d+ at step \d+, below ln 64/);
  });

  it('8: results that change from run to run, or with the threads', () => {
    let calls = 0;
    const again = { combine_forward: spoiled(4, 5, (value) => value + ++calls * 1e-6) };
    expectFailure(again, '8 repeat', 'core', 'values differ when it is run again');
    const threads: Record<string, Fault> = {
      combine_forward: (kernel, values, device) =>
        spoiled(4, 5, (value) => value * (device.threads === 1 ? 1.001 : 1))(kernel, values, device),
    };
    expectFailure(threads, '8 repeat', 'core', 'values differ with 1 thread');
  });

  it('as a failed row, not as a crash, when a kernel throws', () => {
    const faults: Record<string, Fault> = {
      window_forward: () => {
        throw new Error('the kernel could not be launched');
      },
    };
    expectFailure(faults, '9 shapes', 'S = l', 'the kernel could not be launched');
    expect(cpu().pool.bytesInUse).toBe(0);
  });
});

/** Keys and values one token to the right: token t reads t + 1, its own label. The last row reads itself. */
function shifted(device: ReturnType<typeof cpu>, from: Addressable, rows: number, width: number): Tensor {
  const copy = Tensor.empty(device, [rows, width]);
  const bytes = width * 4;
  device.copy(copy.pointer, from.pointer + BigInt(bytes), (rows - 1) * bytes);
  device.copy(copy.pointer + BigInt((rows - 1) * bytes), from.pointer + BigInt((rows - 1) * bytes), bytes);
  return copy;
}

/** The struct that a branch kernel is given. */
function branch(values: Argument[]): AttentionArguments {
  return values[0] as unknown as AttentionArguments;
}

function sizes({ offsets, sequences, groups, dk, dv }: AttentionArguments, device: ReturnType<typeof cpu>) {
  const ends = new Int32Array(sequences + 1);
  device.download(offsets.pointer, new Uint8Array(ends.buffer));
  return { rows: ends[sequences], keyWidth: groups * dk, valueWidth: groups * dv };
}

function shiftedForward(...[kernel, values, device]: Parameters<Fault>): void {
  const given = branch(values);
  const { rows, keyWidth, valueWidth } = sizes(given, device);
  const [k, v] = [shifted(device, given.k, rows, keyWidth), shifted(device, given.v, rows, valueWidth)];
  kernel({ ...given, k, v }, ...values.slice(1));
  k.free();
  v.free();
}

/** The gradients of such a window: computed for the shifted rows, and shifted back. */
function shiftedBackward(...[kernel, values, device]: Parameters<Fault>): void {
  shiftedForward(kernel, values, device);
  const given = branch(values);
  const { rows, keyWidth, valueWidth } = sizes(given, device);
  for (const [gradient, width] of [
    [given.dKeys!, keyWidth],
    [given.dValues!, valueWidth],
  ] as const) {
    const copy = Tensor.zeros(device, [rows, width]);
    const bytes = width * 4;
    device.copy(copy.pointer + BigInt(bytes), gradient.pointer, (rows - 1) * bytes);
    device.copy(gradient.pointer, copy.pointer, rows * bytes);
    copy.free();
  }
}
