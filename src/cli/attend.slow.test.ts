import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { readSafetensors, writeSafetensors } from '../run/safetensors.js';
import { type SafeTensor, toFloat64 } from '../run/safetensors-format.js';
import { float32ToBfloat16 } from '../tensor/bfloat16.js';
import { GOLDEN_SMALL, paddedLast, SHARED_GOLDEN, sharedGoldenAbsence } from '../testing/golden.js';
import { relativeError } from '../testing/numbers.js';
import { runCli } from './testing/run.js';

const OUTPUTS = ['out', 'o_cmp', 'o_sel', 'o_win'];
const GRADIENTS = ['dq', 'dk_cmp', 'dv_cmp', 'dk_sel', 'dv_sel', 'dk_win', 'dv_win', 'd_gates'];

let folder: string;
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-attend-'));
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

async function attend(from: string, ...more: string[]) {
  const to = join(folder, 'out.safetensors');
  rmSync(to, { force: true });
  const outcome = await runCli(['attend', '--in', from, '--out', to, ...more]);
  const written = existsSync(to) ? readSafetensors(to) : null;
  return { ...outcome, to, written };
}

function expectGolden(path: string, written: ReturnType<typeof readSafetensors> | null, limit: number) {
  const golden = readSafetensors(path);
  for (const name of [...OUTPUTS, ...GRADIENTS]) {
    const tensor = written!.tensors.get(name)!;
    expect(tensor.shape, name).toEqual(golden.tensors.get(name)!.shape);
    expect(tensor.dtype).toBe('F32');
    expect(relativeError(toFloat64(tensor), toFloat64(golden.tensors.get(name)!)), name).toBeLessThan(limit);
  }
  const selected = golden.tensors.get('selected')!;
  expect(toFloat64(written!.tensors.get('selected')!)).toEqual(
    Float64Array.from(paddedLast(toFloat64(selected), selected.shape[2])),
  );
  expect(written!.metadata).toMatchObject(golden.metadata);
}

describe('attend on golden files', () => {
  const files = [
    { name: 'dev-small', path: GOLDEN_SMALL, absence: null },
    ...['dev-wide', 'dev-paper'].map((name) => ({
      name,
      path: join(SHARED_GOLDEN, `${name}.safetensors`),
      absence: sharedGoldenAbsence(`${name}.safetensors`),
    })),
  ];

  for (const { name, path, absence } of files)
    for (const kernel of ['adaptive', 'v1', 'v2'])
      it(`${name}, kernel ${kernel}`, async ({ skip }) => {
        if (absence) skip(absence);
        const { code, stdout, stderr, written, to } = await attend(path, '--kernel', kernel, '--device', 'cpu');
        expect({ code, stderr }).toEqual({ code: 0, stderr: '' });
        expect(stdout).toContain(`${to}: outputs and gradients of`);
        expectGolden(path, written, 2e-5);
      });

  it('dev-small in float64', async () => {
    const { code, written } = await attend(GOLDEN_SMALL, '--kernel', 'reference');
    expect(code).toBe(0);
    expectGolden(GOLDEN_SMALL, written, 1e-6);
  });
});

/** Tensors and metadata of the golden file's first tokens, small enough to bend in every way. */
function small(tokens = 40): { tensors: Map<string, SafeTensor>; metadata: Record<string, string> } {
  const golden = readSafetensors(GOLDEN_SMALL);
  const blocks = Math.floor((tokens - 16) / 8) + 1;
  const tensors = new Map<string, SafeTensor>();
  for (const name of ['q', 'k_cmp', 'v_cmp', 'k_sel', 'v_sel', 'k_win', 'v_win', 'gates', 'd_out']) {
    const { dtype, shape, data } = golden.tensors.get(name)!;
    const rows = name.endsWith('_cmp') ? blocks : tokens;
    const bytes = (data.length / shape[0]) * rows;
    tensors.set(name, { dtype, shape: [rows, ...shape.slice(1)], data: data.slice(0, bytes) });
  }
  return { tensors, metadata: { ...golden.metadata, S: String(tokens) } };
}

function write({ tensors, metadata }: ReturnType<typeof small>): string {
  const path = join(folder, 'in.safetensors');
  writeSafetensors(
    path,
    [...tensors].map(([name, tensor]) => ({ name, ...tensor })),
    metadata,
  );
  return path;
}

const f64 = (values: Float64Array) => new Uint8Array(values.buffer);
const i32 = (...values: number[]): SafeTensor => ({
  dtype: 'I32',
  shape: [values.length],
  data: new Uint8Array(Int32Array.from(values).buffer),
});

describe('attend', () => {
  it('writes outputs alone when there is no d_out', async () => {
    const file = small();
    const whole = await attend(write(file));
    file.tensors.delete('d_out');
    for (const kernel of ['adaptive', 'reference']) {
      const { code, stdout, written } = await attend(write(file), '--kernel', kernel);
      expect(code).toBe(0);
      expect(stdout).toContain(': outputs of 40 tokens');
      expect([...written!.tensors.keys()].sort()).toEqual([...OUTPUTS, 'selected'].sort());
      const [alone, out] = [written, whole.written].map((one) => toFloat64(one!.tensors.get('out')!));
      expect(relativeError(alone, out)).toBeLessThan(2e-5);
    }
  });

  it('pads selections at the end, as selectBlocks does', async () => {
    const { written } = await attend(write(small()));
    const { shape, data } = written!.tensors.get('selected')!;
    expect(shape).toEqual([40, 2, 6]);
    const rows = new Int32Array(data.slice().buffer);
    expect([...rows.subarray(0, 6)]).toEqual([0, -1, -1, -1, -1, -1]);
    expect([...rows.subarray(-6)]).toEqual([0, 1, -1, -1, -1, -1]);
  });

  it('takes F64, BF16 and F16', async () => {
    const file = small();
    const expected = toFloat64((await attend(write(file))).written!.tensors.get('out')!);
    for (const [name, tensor] of file.tensors) {
      const data = f64(toFloat64(tensor));
      file.tensors.set(name, { ...tensor, dtype: 'F64', data });
    }
    const wide = await attend(write(file));
    expect(toFloat64(wide.written!.tensors.get('out')!)).toEqual(expected);
    for (const [dtype, encode] of [
      ['BF16', float32ToBfloat16],
      ['F16', toF16],
    ] as const) {
      const halved = small();
      for (const [name, tensor] of halved.tensors) {
        const half = encode(Float32Array.from(toFloat64(tensor)));
        halved.tensors.set(name, { ...tensor, dtype, data: new Uint8Array(half.buffer) });
      }
      const { code, written } = await attend(write(halved));
      expect(code).toBe(0);
      const error = relativeError(toFloat64(written!.tensors.get('out')!), expected);
      expect(error).toBeGreaterThan(1e-5);
      expect(error).toBeLessThan(2e-2);
    }
  });

  it('takes several sequences in one file', async () => {
    const file = small(40);
    const alone = (await attend(write(small(24)))).written!;
    // 24 tokens have 2 blocks of 16 each 8, and 16 tokens have 1: one less than 40 tokens in a row.
    for (const name of ['k_cmp', 'v_cmp']) {
      const { shape, data, dtype } = file.tensors.get(name)!;
      file.tensors.set(name, { dtype, shape: [3, ...shape.slice(1)], data: data.slice(0, (data.length / 4) * 3) });
    }
    for (const dtype of ['I32', 'I64'] as const) {
      const starts = i32(0, 24, 40);
      if (dtype === 'I64') {
        starts.data = new Uint8Array(BigInt64Array.of(0n, 24n, 40n).buffer);
        starts.dtype = dtype;
      }
      file.tensors.set('cu_seqlens', starts);
      const { code, written } = await attend(write(file));
      expect(code).toBe(0);
      for (const name of [...OUTPUTS, 'dq', 'dk_sel', 'dv_win']) {
        const values = toFloat64(alone.tensors.get(name)!);
        const packed = toFloat64(written!.tensors.get(name)!).subarray(0, values.length);
        expect(relativeError(packed, values), name).toBeLessThan(2e-5);
      }
    }
  });

  it('lets NaN through', async () => {
    const file = small();
    const { data } = file.tensors.get('v_win')!;
    new DataView(data.buffer, data.byteOffset).setFloat32(39 * 2 * 16 * 4, Number.NaN, true); // the last token
    const { code, written } = await attend(write(file));
    expect(code).toBe(0);
    const out = toFloat64(written!.tensors.get('out')!);
    expect(out[39 * 4 * 16]).toBeNaN();
    expect(out.subarray(0, 39 * 4 * 16).every(Number.isFinite)).toBe(true);
  });

  it('takes a sequence shorter than a block, and no token at all', async () => {
    for (const tokens of [0, 5]) {
      const file = small(tokens);
      for (const name of ['k_cmp', 'v_cmp'])
        file.tensors.set(name, { dtype: 'F32', shape: [0, 2, 16], data: new Uint8Array() });
      for (const kernel of ['adaptive', 'reference']) {
        const { code, written } = await attend(write(file), '--kernel', kernel);
        expect(code).toBe(0);
        expect(written!.tensors.get('out')!.shape).toEqual([tokens, 4, 16]);
        expect(written!.tensors.get('dk_cmp')!.shape).toEqual([0, 2, 16]);
      }
    }
  });

  it('prints one JSON value', async () => {
    const path = write(small());
    const { code, stdout, to } = await attend(path, '--json');
    expect(code).toBe(0);
    expect(JSON.parse(stdout)).toMatchObject({
      in: path,
      out: to,
      device: 'cpu',
      kernel: 'adaptive',
      ms: expect.any(Number),
      tensors: expect.arrayContaining([...OUTPUTS, 'selected', ...GRADIENTS]),
    });
  });
});

describe('attend refuses', () => {
  type File = ReturnType<typeof small>;
  const reshape = (file: File, name: string, shape: number[]) =>
    file.tensors.set(name, { ...file.tensors.get(name)!, shape });

  it.each<[string, (file: File) => unknown, string]>([
    ['a missing tensor', (f) => f.tensors.delete('k_sel'), 'there is no tensor "k_sel"'],
    [
      'a wrong shape',
      (f) => reshape(f, 'gates', [40, 3, 4]),
      'tensor gates must have shape [40, 4, 3], not [40, 3, 4]',
    ],
    ['a wrong rank', (f) => reshape(f, 'q', [160, 16]), 'tensor q must have shape [40, 4, 16], not [160, 16]'],
    ['a wrong d_out', (f) => reshape(f, 'd_out', [40, 16, 4]), 'tensor d_out must have shape [40, 4, 16]'],
    [
      'keys of another length',
      (f) => {
        f.metadata['S'] = '41';
      },
      'tensor q must have shape [41, 4, 16], not [40, 4, 16]',
    ],
    [
      'whole numbers for floats',
      (f) => f.tensors.set('q', { ...f.tensors.get('q')!, dtype: 'I32' }),
      'tensor q must be F32, F64, BF16, F16, not I32',
    ],
    [
      'missing metadata',
      (f) => delete f.metadata['n_sel'],
      'the metadata has no n_sel; it must state S H G d_k d_v l d l_sel n_sel w',
    ],
    [
      'metadata that is not a number',
      (f) => {
        f.metadata['w'] = '64.5';
      },
      'the metadata w must be a whole number, not "64.5"',
    ],
    [
      'sizes that do not fit each other',
      (f) => {
        f.metadata['d'] = '7';
      },
      'the metadata is wrong: d must divide l: 7 does not divide 16',
    ],
    [
      'sequences that do not fill S',
      (f) => f.tensors.set('cu_seqlens', i32(0, 24, 39)),
      'cu_seqlens must start with 0, never fall and end with S = 40, not [0, 24, 39]',
    ],
    ['sequences that fall', (f) => f.tensors.set('cu_seqlens', i32(0, 24, 8, 40)), 'not [0, 24, 8, 40]'],
    ['empty cu_seqlens', (f) => f.tensors.set('cu_seqlens', i32()), 'tensor cu_seqlens must have shape [1], not [0]'],
    [
      'floats for cu_seqlens',
      (f) => f.tensors.set('cu_seqlens', { dtype: 'F32', shape: [2], data: new Uint8Array(8) }),
      'tensor cu_seqlens must be I32, I64, not F32',
    ],
  ])('%s', async (_, bend, message) => {
    const file = small();
    bend(file);
    const path = write(file);
    const { code, stdout, stderr, written } = await attend(path);
    expect({ code, stdout, written }).toEqual({ code: 2, stdout: '', written: null });
    expect(stderr).toBe(`trefoil: ${path}: ${stderr.slice(stderr.indexOf(': ', 10) + 2)}`);
    expect(stderr).toContain(message);
    expect(readdirSync(folder)).toEqual(['in.safetensors']);
  });

  it('a damaged file, a missing file, or a folder', async () => {
    const path = join(folder, 'in.safetensors');
    writeFileSync(path, 'not a tensor file');
    expect(await attend(path)).toMatchObject({ code: 2, written: null });
    expect((await attend(join(folder, 'nowhere'))).stderr).toContain('there is no such file or folder');
    expect((await attend(folder)).stderr).toContain('is a folder');
  });

  it('to write over its input or into a folder that is not there', async () => {
    const path = write(small());
    const over = await runCli(['attend', '--in', path, '--out', join(folder, '.', 'in.safetensors')]);
    expect(over).toMatchObject({ code: 2, stderr: expect.stringContaining('--out: must differ from --in') });
    const nowhere = join(folder, 'no', 'out.safetensors');
    const outcome = await runCli(['attend', '--in', path, '--out', nowhere]);
    expect(outcome).toMatchObject({ code: 2, stderr: expect.stringContaining('no such folder') });
    mkdirSync(join(folder, 'taken.safetensors'));
    const taken = await runCli(['attend', '--in', path, '--out', join(folder, 'taken.safetensors')]);
    expect(taken.code).toBe(2);
    expect(readdirSync(folder).sort()).toEqual(['in.safetensors', 'taken.safetensors']);
  });
});

/** Rounds to float16 by cutting bits off: exact enough for numbers of ordinary size. */
function toF16(values: Float32Array): Uint16Array {
  const bits = new Uint32Array(values.buffer);
  return Uint16Array.from(bits, (value) => {
    const exponent = ((value >>> 23) & 0xff) - 112;
    const sign = (value >>> 16) & 0x8000;
    return exponent <= 0 ? sign : sign | (exponent << 10) | ((value >>> 13) & 0x3ff);
  });
}
