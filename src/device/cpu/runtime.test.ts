/** The runtime of all kernels: its threads, their behaviour at exit, and the scratch memory of kernels. */
import { cpSync, mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import koffi from 'koffi';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { addInto } from '../../ops/add/op.js';
import { nativeSparseAttention } from '../../ops/attention/nsa.js';
import { Sequences } from '../../ops/common/sequences.js';
import { linear } from '../../ops/linear/op.js';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { randomInputs, upload } from '../../testing/attention.js';
import { buildChild, startChild } from '../../testing/child.js';
import { cpu } from '../../testing/devices.js';
import { randomValues } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { defineKernels } from '../device.js';
import { CpuDevice } from './cpu.js';

describe('results', () => {
  it('of linear layers are the same bits for 1, 2 and 3 threads', () => {
    const [rows, inputs, outputs] = [301, 257, 193];
    expectSameForAnyThreadCount(() => {
      const tape = new Tape(cpu());
      const x = tape.watch(tape.from(randomValues(rows * inputs, 1), [rows, inputs]));
      const weight = tape.watch(tape.from(randomValues(outputs * inputs, 2), [outputs, inputs]));
      const bias = tape.watch(tape.from(randomValues(outputs, 3), [outputs]));
      const y = linear(tape, x, weight, bias);
      const forward = y.readBytes();
      tape.backward(y, randomValues(rows * outputs, 4));
      const gradients = [x, weight, bias].map((input) => tape.gradient(input)!.readBytes());
      tape.end();
      return [forward, ...gradients];
    });
  });

  it('of sparse attention are the same bits for 1, 2 and 3 threads', () => {
    const sparse = { l: 8, d: 4, lSel: 16, nSel: 4, w: 24 };
    const lengths = [333, 1, 0, 150];
    const values = randomInputs({ name: '', lengths, heads: { heads: 6, groups: 2, dk: 20, dv: 12 }, sparse }, 7);
    expectSameForAnyThreadCount(() => {
      const device = cpu();
      const tape = new Tape(device);
      const sequences = new Sequences(device, lengths);
      const { dOut, ...named } = values;
      const inputs = Object.fromEntries(
        Object.entries(named).map(([name, input]) => [name, tape.watch(tape.own(upload(device, input)))]),
      ) as unknown as Parameters<typeof nativeSparseAttention>[1];
      const { out, selected } = nativeSparseAttention(tape, inputs, sequences, sparse, { kernel: 'v2' });
      const forward = [out.readBytes(), selected.readBytes()];
      tape.backward(out, dOut.values);
      const gradients = Object.values(inputs).map((input) => tape.gradient(input)!.readBytes());
      tape.end();
      sequences.free();
      return [...forward, ...gradients];
    });
  });
});

describe('scratch memory', () => {
  /** Functions of the runtime. The library is already loaded, so this is the same instance. */
  const runtime = () => koffi.load(cpu().compiler.library(join(import.meta.dirname, 'runtime.cpp')));

  it('is counted, grows by a quarter more than requested, and is kept', () => {
    const device = cpu();
    const take = runtime().func('trefoil_scratch', 'void *', ['int', 'size_t']) as (
      slot: number,
      bytes: number,
    ) => bigint;
    const unused = 23; // the last slot, which no kernel uses
    const before = device.scratchBytes;
    const held = () => device.scratchBytes - before;
    const first = take(unused, 1000);
    expect(held()).toBe(4096);
    expect(take(unused, 4096)).toBe(first);
    expect(held()).toBe(4096);
    const second = take(unused, 100_000);
    expect(held()).toBe(Math.ceil(125_000 / 4096) * 4096); // the smaller block is no longer counted
    expect(second % 4096n).toBe(0n);
    expect(take(unused, 10)).toBe(second);
  });

  it('stops growing once the largest shape was seen', () => {
    const device = cpu();
    const { threads } = device;
    device.threads = 1; // with more threads the assignment of tasks is not deterministic
    const run = (rows: number) => {
      const tape = new Tape(device, { record: false });
      linear(tape, tape.zeros([rows, 700]), tape.zeros([900, 700]));
      tape.end();
      return device.scratchBytes;
    };
    try {
      const small = run(8);
      const large = run(400);
      expect(large).toBeGreaterThanOrEqual(small);
      expect([run(8), run(400), run(399)]).toEqual([large, large, large]);
    } finally {
      device.threads = threads;
    }
  });
});

describe('arguments of kernels', () => {
  const { scale } = cpu().kernels(
    defineKernels(new URL('../../ops/pointwise/op.js', import.meta.url).href, {
      scale: ['ptr', 'ptr', 'i64', 'f32', 'i64'],
    }),
  );
  const call = scale as (...values: unknown[]) => void;

  it.each([
    [[0, null, 0, 1, 0], 'scale: argument 1 must be a tensor or null, not 0'],
    [[null, null, 0], 'scale: takes 5 arguments, not 3'],
  ])('%j are refused', (values, message) => {
    expect(() => call(...values)).toThrow(message);
  });
});

describe('threads', () => {
  it.each([0, -1, 1.5, Number.NaN, 4096])('cannot be %d', (threads) => {
    expect(() => new CpuDevice({ threads })).toThrow(UsageError);
    expect(() => new CpuDevice({ threads })).toThrow('threads must be an integer from 1 to 1024, not');
  });

  it('that wake too late for a short launch neither miss a task nor take one of the next launch', () => {
    const device = cpu();
    const { threads } = device;
    device.threads = 16; // more than there are cores
    const [launches, task] = [2000, 1 << 14];
    const size = 3 * task + 1;
    const total = Tensor.zeros(device, [size]);
    const one = Tensor.from(device, new Float32Array(size).fill(1), [size]);
    try {
      for (let i = 0; i < launches; i++) addInto(device, total, one);
      expect(new Set(total.read())).toEqual(new Set([launches]));
    } finally {
      device.threads = threads;
      total.free();
      one.free();
    }
  });
});

describe('a process', () => {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-runtime-'));
  const program = join(folder, 'child.mjs');
  beforeAll(async () => {
    // A bundle needs its kernels in its own folder: the runtime, its headers and the operation it uses.
    for (const from of [import.meta.dirname, join(import.meta.dirname, '../../ops/linear')])
      for (const name of readdirSync(from)) if (/\.(h|cpp)$/.test(name)) cpSync(join(from, name), join(folder, name));
    await buildChild(program, import.meta.dirname, PROGRAM);
  });
  afterAll(() => rmSync(folder, { recursive: true, force: true }));
  const run = (way: string) => startChild(program, [way]).done;

  it.each([
    ['return', 0],
    ['exit', 0],
    ['exit at once', 0],
    ['exit 3', 3],
    ['throw', 1],
  ])('that ends by %s ends with %i while its threads still live', async (way, expected) => {
    for (let repeat = 0; repeat < 3; repeat++) {
      const { code, signal, output } = await run(way);
      expect({ code, signal, output }).toEqual({ code: expected, signal: null, output: 'computed on 4 threads\n' });
    }
  });

  it('may compute in several JavaScript threads at the same time', async () => {
    const { code, output, errors } = await run('workers');
    expect({ code, output, errors }).toEqual({ code: 0, output: 'same\nsame\nsame\n', errors: '' });
  });
});

const PROGRAM = `
  import { isMainThread, Worker } from 'node:worker_threads';
  import { linear } from '../../ops/linear/op.js';
  import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
  import { CpuDevice } from './cpu.js';

  const device = new CpuDevice({ threads: 4 });
  const x = Float32Array.from({ length: 200 * 300 }, (_, i) => Math.sin(i));
  const w = Float32Array.from({ length: 500 * 300 }, (_, i) => Math.cos(i));
  function product() {
    const tape = new Tape(device, { record: false });
    const y = linear(tape, tape.from(x, [200, 300]), tape.from(w, [500, 300])).readBytes();
    tape.end();
    return Buffer.from(y);
  }
  function repeatedly() {
    const first = product();
    for (let i = 0; i < 100; i++) if (!product().equals(first)) return 'different';
    return 'same';
  }

  const way = process.argv[2];
  if (!isMainThread) {
    console.log(repeatedly());
  } else if (way === 'workers') {
    for (let i = 0; i < 2; i++) new Worker(new URL(import.meta.url), { argv: [way] });
    setTimeout(() => console.log(repeatedly()), 100);
  } else {
    product();
    console.log(\`computed on \${device.threads} threads\`);
    if (way === 'exit') setTimeout(() => process.exit(0), 50); // the threads sleep by then
    if (way === 'exit at once') process.exit(0);
    if (way === 'exit 3') process.exit(3);
    if (way === 'throw') throw new Error('on purpose');
  }`;
