import { spawnSync } from 'node:child_process';
import { closeSync, mkdtempSync, openSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { defaultCompilerOptions, processorIdentity } from '../../device/cpu/compile.js';
import { CpuDevice } from '../../device/cpu/cpu.js';
import { UsageError } from '../../errors.js';
import { toFloat32 } from '../../run/safetensors-format.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../../tensor/bfloat16.js';
import { Tape } from '../../tensor/tape.js';
import { bytesOf, Tensor } from '../../tensor/tensor.js';
import { cpu } from '../../testing/devices.js';
import { randomValues } from '../../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../../testing/same-bytes.js';
import { embedding } from '../embedding/op.js';
import { linear } from './op.js';
import { PackedMatrix, WEIGHT_TYPES, type WeightType } from './packed.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-packed-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

/** Numbers as a file holds them, and the float32 that they are. */
function numbers(count: number, held: Exclude<WeightType, 'int8'>): { bytes: Uint8Array; values: Float32Array } {
  const random = Float32Array.from(randomValues(count, 7));
  if (held === 'f32') return { bytes: bytesOf(random), values: random };
  if (held === 'bf16') {
    const bits = float32ToBfloat16(random);
    return { bytes: bytesOf(bits), values: bfloat16ToFloat32(bits) };
  }
  // Every finite f16, subnormal ones among them.
  const bits = Uint16Array.from({ length: count }, (_, i) => ((i * 40_503) % 0x7c00) | ((i % 2) << 15));
  const bytes = bytesOf(bits);
  return { bytes, values: toFloat32({ dtype: 'F16', data: bytes })! };
}

/** A packed matrix that was read from a file behind `skip` bytes, in two parts if it has several rows. */
function packed(device: CpuDevice, outputs: number, inputs: number, type: WeightType, from = type, skip = 6) {
  const held = from === 'int8' ? 'f32' : from;
  const { bytes, values } = numbers(outputs * inputs, held);
  const path = join(folder, 'numbers');
  writeFileSync(path, Buffer.concat([Buffer.alloc(skip), bytes]));
  const descriptor = openSync(path, 'r');
  const matrix = new PackedMatrix(device, [outputs, inputs], type);
  const first = Math.floor(outputs / 3);
  const rowBytes = bytes.length / outputs;
  const parts = [
    { descriptor, offset: skip, rows: first },
    { descriptor, offset: skip + first * rowBytes, rows: outputs - first },
  ];
  const isWhole = matrix.readRows(parts, held);
  closeSync(descriptor);
  return { matrix, values, isWhole };
}

const OUTPUTS_AND_INPUTS: readonly (readonly [number, number])[] = [
  [1, 1],
  [3, 1],
  [64, 1],
  [17, 70],
  [70, 33],
  [64, 64],
  [129, 65],
  [200, 513],
  [130, 1100],
];
const ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 31, 70];

/** Whole numbers of 64 values, of which the largest magnitude is 127, and what one of them stands for. */
function roundedGroup(values: Float32Array): { whole: Float32Array; scale: number } {
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const inverse = Math.fround(127 / largest);
  const magic = 1.5 * 2 ** 23; // adding it rounds to an integer, ties to even
  const whole = values.map((value) => Math.fround(Math.fround(value * inverse) + magic) - magic);
  return { whole, scale: Math.fround(largest * Math.fround(1 / 127)) };
}

/** x wᵀ with both in int8, number by number, as f32 computes it: `isFused` if products and sums are rounded once. */
function productInt8(x: Float32Array, w: Float32Array, inputs: number, isFused: boolean): Float32Array {
  const slabs = Math.ceil(inputs / 512);
  const slab = 64 * Math.ceil(Math.ceil(inputs / slabs) / 64);
  const groups = (all: Float32Array) =>
    Array.from({ length: all.length / inputs }, (_, row) =>
      Array.from({ length: Math.ceil(inputs / 64) }, (_, g) =>
        roundedGroup(all.subarray(row * inputs + 64 * g, row * inputs + Math.min(inputs, 64 * (g + 1)))),
      ),
    );
  const weights = groups(w);
  return Float32Array.from(
    groups(x).flatMap((row) =>
      weights.map((output) => {
        let [y, total] = [0, 0];
        for (let g = 0; g < row.length; g++) {
          if (g > 0 && (64 * g) % slab === 0) [y, total] = [Math.fround(y + total), 0];
          const [left, right] = [row[g].whole, output[g].whole];
          let sum = 0;
          for (let i = 0; i < left.length; i++) sum += left[i] * right[i];
          const product = sum * Math.fround(output[g].scale * row[g].scale); // exact in float64
          total = Math.fround((isFused ? product : Math.fround(product)) + total);
        }
        return Math.fround(y + total);
      }),
    ),
  );
}

/** Other vector widths and instruction sets that this processor can run. */
function widths(): { name: string; device: () => CpuDevice }[] {
  const flags = new Set(processorIdentity().split(/[\s|]+/));
  const needs = { 'x86-64': 'fpu', 'x86-64-v3': 'avx2', 'x86-64-v4': 'avx512f' };
  const targets = Object.entries(needs).flatMap(([target, flag]) => (flags.has(flag) ? [target] : []));
  return [
    { name: 'this processor', device: cpu },
    ...targets.map((target) => {
      let device: CpuDevice | undefined;
      const compiler = { ...defaultCompilerOptions(process.env), target };
      return { name: target, device: () => (device ??= new CpuDevice({ compiler })) };
    }),
  ];
}

describe.each(widths())('packed weights on $name', ({ device }) => {
  const exactTypes = WEIGHT_TYPES.filter((type) => type !== 'int8');
  const shapes = exactTypes.flatMap((type) => OUTPUTS_AND_INPUTS.map((shape) => [type, ...shape] as const));

  it.each(shapes)('%s: [%i, %i] has the bits of the plain product, for any number of rows', (type, outputs, inputs) => {
    const { matrix, values, isWhole } = packed(device(), outputs, inputs, type);
    expect(isWhole).toBe(true);
    expect(matrix.read()).toEqual(values);
    const tape = new Tape(device(), { record: false });
    const plain = tape.from(values, [outputs, inputs]);
    for (const rows of ROWS) {
      const x = tape.from(randomValues(rows * inputs, rows), [rows, inputs]);
      const residual = rows % 2 === 0 ? tape.from(randomValues(rows * outputs, 5), [rows, outputs]) : null;
      const bias = rows % 3 === 0 ? tape.from(randomValues(outputs, 6), [outputs]) : null;
      const [ours, theirs] = [matrix, plain].map((weight) => linear(tape, x, weight, bias, residual).readBytes());
      expect(Buffer.from(ours).equals(Buffer.from(theirs)), `${rows} rows`).toBe(true);
    }
    tape.end();
    matrix.free();
  });

  it.each(OUTPUTS_AND_INPUTS)('int8: [%i, %i] has the bits of the product of whole numbers', (outputs, inputs) => {
    const { matrix, values } = packed(device(), outputs, inputs, 'int8');
    const tape = new Tape(device(), { record: false });
    const most = Math.max(...ROWS);
    const [x, residual] = [inputs, outputs].map((width) => Float32Array.from(randomValues(most * width, 2)));
    const plain = productInt8(x, values, inputs, device().kernelSource.isFused);
    const added = plain.map((value, i) => value + residual[i]);
    for (const rows of ROWS) {
      const part = (all: Float32Array, width: number) => all.subarray(0, rows * width);
      const plus = rows % 2 === 0 ? tape.from(part(residual, outputs), [rows, outputs]) : null;
      const y = linear(tape, tape.from(part(x, inputs), [rows, inputs]), matrix, null, plus).read();
      expect(Buffer.from(bytesOf(y)).equals(bytesOf(part(plus ? added : plain, outputs))), `${rows} rows`).toBe(true);
    }
    tape.end();
    matrix.free();
  });

  it.each(WEIGHT_TYPES)('%s: rows for an embedding', (type) => {
    const { matrix } = packed(device(), 70, 33, type);
    const tape = new Tape(device(), { record: false });
    const table = tape.from(matrix.read(), [70, 33]);
    const ids = tape.from([69, 0, 64, 63, 5, 5], [6], 'i32');
    expect(embedding(tape, matrix, ids).read()).toEqual(embedding(tape, table, ids).read());
    const bad = tape.from([1, 70], [2], 'i32');
    expect(() => embedding(tape, matrix, bad)).toThrow('token 1 has id 70, outside the vocabulary of 70');
    tape.end();
    matrix.free();
  });

  it.each(['f32', 'bf16', 'f16'] as const)('int8 of %s: the nearest of 255 steps of each group', (from) => {
    const [outputs, inputs] = [70, 300];
    const { matrix, values } = packed(device(), outputs, inputs, 'int8', from);
    const read = matrix.read();
    for (let row = 0; row < outputs; row++)
      for (let k = 0; k < inputs; k += 64) {
        const [group, ours] = [values, read].map((all) =>
          all.subarray(row * inputs + k, row * inputs + Math.min(k + 64, inputs)),
        );
        const step = Math.max(...group.map(Math.abs)) / 127;
        expect(Math.max(...group.map((value, i) => Math.abs(value - ours[i])))).toBeLessThanOrEqual(0.5001 * step);
      }
    matrix.free();
  });
});

it('packed weights on NEON have the bits of the plain product', ({ skip }) => {
  const compiler = 'aarch64-linux-gnu-g++';
  const emulators = ['qemu-aarch64-static', 'qemu-aarch64'];
  const emulator = emulators.find((command) => !spawnSync(command, ['--version']).error) ?? emulators[0];
  const absent = [compiler, emulator].filter((command) => spawnSync(command, ['--version']).error);
  if (absent.length > 0) skip(`no ${absent.join(' and no ')}: apt-get install g++-aarch64-linux-gnu qemu-user-static`);
  const headers = join(import.meta.dirname, '../../device/cpu');
  const sources = [join(import.meta.dirname, 'testing/packed-check.cpp'), join(headers, 'runtime.cpp')];
  const program = join(folder, 'packed-check');
  const flags = ['-std=c++17', '-O3', '-ffp-contract=off', '-static', '-pthread', `-I${headers}`];
  const built = spawnSync(compiler, [...flags, ...sources, '-o', program], { encoding: 'utf8' });
  expect(built.status, built.stderr).toBe(0);
  const { stdout } = spawnSync(emulator, [program], { encoding: 'utf8' });
  expect(stdout).toBe('4 lanes: 1200 cases, 0 wrong\n');
});

describe('packed weights', () => {
  it('in int8 show an activation that is not finite in its row alone', () => {
    const { matrix } = packed(cpu(), 70, 130, 'int8');
    const tape = new Tape(cpu(), { record: false });
    for (const bad of [Number.NaN, Number.NEGATIVE_INFINITY]) {
      const values = Float32Array.from(randomValues(14 * 130, 3));
      const sound = linear(tape, tape.from(values, [14, 130]), matrix).read();
      values[3 * 130 + 100] = bad;
      const y = linear(tape, tape.from(values, [14, 130]), matrix).read();
      const [first, end] = [3 * 70, 4 * 70];
      expect(y.subarray(first, end).every(Number.isNaN)).toBe(true);
      sound.set(y.subarray(first, end), first);
      expect(y).toEqual(sound);
    }
    const zeros = linear(tape, tape.from(new Float32Array(130), [1, 130]), matrix).read();
    expect(zeros.every((value) => value === 0)).toBe(true);
    tape.end();
    matrix.free();
  });

  it('in int8 keep a NaN and an infinity visible, and zeros zero', () => {
    const values = new Float32Array(3 * 128);
    values[5] = Number.NaN;
    values[128 + 70] = Number.POSITIVE_INFINITY;
    const tensor = Tensor.from(cpu(), values, [3, 128]);
    const matrix = PackedMatrix.of(tensor, 'int8');
    const read = matrix.read();
    expect(read.slice(0, 64).every(Number.isNaN)).toBe(true);
    expect(read.slice(64, 128 + 64).every((value) => value === 0)).toBe(true);
    expect(read.slice(128 + 64, 256).every(Number.isNaN)).toBe(true);
    expect(read.slice(256).every((value) => value === 0)).toBe(true);
    for (const each of [tensor, matrix]) each.free();
  });

  it.each(WEIGHT_TYPES)('%s: the same bits for any number of threads', (type) => {
    const { matrix } = packed(cpu(), 200, 513, type);
    const tape = new Tape(cpu(), { record: false });
    expectSameForAnyThreadCount(() =>
      [1, 7, 40].map((rows) => linear(tape, tape.from(randomValues(rows * 513, 1), [rows, 513]), matrix).readBytes()),
    );
    tape.end();
    matrix.free();
  });

  it('take the memory of their numbers', () => {
    const bytes = (type: WeightType) => {
      const matrix = new PackedMatrix(cpu(), [1024, 2048], type);
      matrix.free();
      return matrix.memory.bytes / (1024 * 2048);
    };
    expect(WEIGHT_TYPES.map(bytes)).toEqual([4, 2, 2, 1 + 4 / 64]);
  });

  it.each(WEIGHT_TYPES)('%s: all bytes depend on the numbers alone', (type) => {
    const [garbage, filled] = [0xff, 0x3c].map((byte) => {
      const room = new PackedMatrix(cpu(), [70, 513], type);
      room.memory.writeBytes(new Uint8Array(room.memory.bytes).fill(byte));
      room.free(); // the next matrix of this size has the same memory
      const { matrix } = packed(cpu(), 70, 513, type);
      const bytes = matrix.memory.readBytes();
      matrix.free();
      return bytes;
    });
    expect(Buffer.from(garbage).equals(Buffer.from(filled))).toBe(true);
  });

  it('are not packed again by a product: no kernel takes memory for a copy', () => {
    const { matrix } = packed(cpu(), 1300, 1100, 'f32');
    const tape = new Tape(cpu(), { record: false });
    const before = cpu().scratchBytes;
    for (const rows of [1, 5, 9]) linear(tape, tape.from(randomValues(rows * 1100, 1), [rows, 1100]), matrix);
    expect(cpu().scratchBytes).toBe(before);
    tape.end();
    matrix.free();
  });

  it('report a file that ends too early', () => {
    const path = join(folder, 'short');
    writeFileSync(path, Buffer.alloc(100));
    const descriptor = openSync(path, 'r');
    const matrix = new PackedMatrix(cpu(), [8, 4], 'f32');
    expect(matrix.readRows([{ descriptor, offset: 0, rows: 8 }], 'f32')).toBe(false);
    closeSync(descriptor);
    matrix.free();
  });

  it('refuse kernels that know rows only, with the remedy', () => {
    const { matrix } = packed(cpu(), 4, 4, 'bf16');
    matrix.storage.name = 'head';
    const refusals = [
      () => matrix.pointer,
      () => matrix.rows(),
      () => matrix.reshape(),
      () => matrix.write(new Float32Array(16)),
    ];
    for (const refused of refusals) {
      expect(refused).toThrow(UsageError);
      expect(refused).toThrow(
        'parameter head f32[4, 4] is packed in bf16 for reading only: load the model with { trainable: true }',
      );
    }
    matrix.free();
  });
});
