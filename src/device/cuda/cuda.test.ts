import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, it } from 'vitest';
import { Tensor } from '../../tensor/tensor.js';
import { cuda, cudaCompilerAbsence } from '../../testing/devices.js';
import { randomValues, relativeError } from '../../testing/numbers.js';
import { CudaCompiler, findBackend } from './compile.js';
import { CopyQueue } from './copy-queue.js';
import { CudaDevice, capabilityRefusal, cudaAbsence } from './cuda.js';
import { LibraryMissing, libraryFolders, openLibrary } from './libraries.js';
import { f32, f64 } from './runtime.js';

const absence = cudaAbsence();
const ARGUMENTS = new URL('./testing/arguments.cu', import.meta.url);

it('refuses GPUs without bf16 by name: V100 and T4', () => {
  for (const architecture of [70, 75]) {
    const refusal = capabilityRefusal('Tesla T4', architecture);
    expect(refusal).toContain(`Tesla T4 has compute capability ${(architecture / 10).toFixed(1)}`);
    expect(refusal).toContain('V100 (7.0) and T4 (7.5) are not supported; use --device cpu');
  }
  expect([80, 86, 89, 90].map((architecture) => capabilityRefusal('x', architecture))).toEqual([
    null,
    null,
    null,
    null,
  ]);
});

describe('CUDA libraries', () => {
  it('names what is missing and the remedy', () => {
    const name = {
      title: 'the library of nothing (libnothing.so)',
      files: ['libnothing-trefoil.so'],
      remedy: 'install it',
    };
    expect(() => openLibrary(name, {})).toThrow(LibraryMissing);
    expect(() => openLibrary(name, {})).toThrow('the library of nothing (libnothing.so) was not found: install it');
  });

  it('reports why an existing file does not load', () => {
    const home = mkdtempSync(join(tmpdir(), 'trefoil-cuda-'));
    writeFileSync(join(home, 'libbroken-trefoil.so'), 'no library');
    const name = { title: 'a broken library', files: ['libbroken-trefoil.so'], remedy: 'install it again' };
    const folders = libraryFolders({ CUDA_HOME: home });
    expect(folders).not.toContain(join(home, 'lib64')); // only folders that exist are searched
    expect(() => openLibrary(name, { CONDA_PREFIX: home })).toThrow(LibraryMissing);
    rmSync(home, { recursive: true });
  });

  it('reports in one line whether there is a GPU', () => {
    if (absence === null) expect(new CudaDevice().name).not.toBe('');
    else {
      expect(absence).toMatch(/^no CUDA device: .+/);
      expect(absence).not.toContain('\n');
      if (!existsSync('/dev/nvidia0')) expect(absence.length).toBeLessThan(80); // no GPU: nothing to explain
      expect(() => new CudaDevice()).toThrow(absence);
    }
  });
});

describe('the CUDA compiler', () => {
  const missing = cudaCompilerAbsence();
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-cubin-'));
  afterAll(() => rmSync(folder, { recursive: true, force: true }));

  it('compiles once, then reads the cache', (context) => {
    if (missing) return context.skip(missing);
    let compiled = 0;
    const progress = { begin: () => void compiled++, end: () => {} };
    const compiler = new CudaCompiler(90, findBackend(), { cache: folder, progress });
    const source = fileURLToPath(ARGUMENTS);
    const first = compiler.cubin(source, { OFFSET: 1 });
    expect(Buffer.from(first.subarray(1, 4)).toString()).toBe('ELF');
    expect(Buffer.compare(first, compiler.cubin(source, { OFFSET: 1 }))).toBe(0);
    expect(compiled).toBe(1);
    compiler.cubin(source, { OFFSET: 2 });
    expect(compiled).toBe(2);
  });

  it('uses entries of any compiler when there is none, and names a missing kernel', () => {
    const source = fileURLToPath(ARGUMENTS);
    const code = Buffer.from('code of another machine');
    const cache = join(folder, 'elsewhere');
    const backend = { identity: 'a compiler of another machine', compile: () => code };
    new CudaCompiler(90, backend, { cache }).cubin(source, { OFFSET: 1 });
    const without = new CudaCompiler(90, new LibraryMissing('NVRTC was not found', 'install it'), { cache });
    expect(Buffer.from(without.cubin(source, { OFFSET: 1 }))).toEqual(code);
    expect(() => without.cubin(source, { OFFSET: 2 })).toThrow(
      new RegExp(`^the kernel cache ${cache} lacks .* for sm_90a, and NVRTC was not found`),
    );
    const other = { identity: 'a newer compiler', compile: () => Buffer.from('newer code') };
    const newer = new CudaCompiler(90, other, { cache });
    expect(Buffer.from(newer.cubin(source, { OFFSET: 1 })).toString()).toBe('newer code');
  });

  it('compiles several at once, and what is compiled already not again', async (context) => {
    if (missing) return context.skip(missing);
    const begun: (readonly [number, number | null])[] = [];
    const progress = {
      begin: (_: string, compiled: number, total: number | null) => void begun.push([compiled, total]),
      end: () => {},
    };
    const compiler = new CudaCompiler(90, findBackend(), { cache: join(folder, 'several'), progress });
    const source = fileURLToPath(ARGUMENTS);
    const requests = [1, 2, 3].map((offset) => ({ source, macros: { OFFSET: offset } }));
    const first = compiler.cubin(source, { OFFSET: 1 });
    await compiler.compileAll(requests);
    await compiler.compileAll(requests);
    const expected = [
      [0, null],
      [1, 3],
      [2, 3],
    ];
    expect(begun).toEqual(expected);
    const codes = requests.map(({ macros }) => Buffer.from(compiler.cubin(source, macros)).toString('latin1'));
    expect(begun).toEqual(expected);
    expect(codes[0]).toBe(Buffer.from(first).toString('latin1'));
    expect(new Set(codes).size).toBe(3);
    for (const code of codes) expect(code.slice(1, 4)).toBe('ELF');
  });

  it('names the error of an invalid source among several', async (context) => {
    if (missing) return context.skip(missing);
    const compiler = new CudaCompiler(90, findBackend(), { cache: join(folder, 'invalid') });
    const source = fileURLToPath(ARGUMENTS);
    const requests = [1, 'nothing_by_that_name', 3].map((offset) => ({ source, macros: { OFFSET: offset } }));
    const message = /could not compile .*arguments\.cu.*nothing_by_that_name/;
    await expect(compiler.compileAll(requests)).rejects.toThrow(message);
  });

  it('reports the first error of an invalid source', (context) => {
    if (missing) return context.skip(missing);
    const compiler = new CudaCompiler(90, findBackend(), { cache: folder });
    expect(() => compiler.cubin(fileURLToPath(ARGUMENTS), { OFFSET: 'nothing_by_that_name' })).toThrow(
      /could not compile .*arguments\.cu.*nothing_by_that_name/,
    );
  });
});

describe('a CUDA device', () => {
  const onGpu = (name: string, body: (device: CudaDevice) => void) =>
    it(name, (context) => {
      if (absence) return context.skip(absence);
      body(cuda());
    });

  onGpu('uploads and downloads bytes', (device) => {
    const values = Float32Array.from(randomValues(3_000_001, 1));
    const tensor = Tensor.from(device, values, [values.length]);
    expect(Buffer.compare(Buffer.from(tensor.readBytes()), Buffer.from(values.buffer))).toBe(0);
    const copy = Tensor.empty(device, [values.length]);
    copy.copyFrom(tensor);
    expect(copy.item(3_000_000)).toBe(values[3_000_000]);
    copy.fill(2.5);
    expect(copy.item(1234)).toBe(2.5);
    copy.zero();
    expect(copy.item(1234)).toBe(0);
    tensor.free();
    copy.free();
  });

  onGpu('passes every kind of argument', (device) => {
    const from = Tensor.from(device, [1, 2, 3], [3]);
    const to = Tensor.zeros(device, [3]);
    const code = device.compile(ARGUMENTS, { OFFSET: 100 });
    code.launch('every_argument', { grid: 1, block: 32 }, to, from, 3, 2 ** 33, f32(0.5), f64(10));
    expect([...to.read()]).toEqual([112.5, 113, 113.5]);
    expect(code.constant('answer')).toBe(42);
    code.launch('shared_sum', { grid: 1, block: 64, shared: 200_000 }, to, 50_000);
    expect(to.item(0)).toBe(Math.fround((50_000 * 49_999) / 2));
    code.launch('every_argument', { grid: 0, block: 32 }, to, from, 3, 0, f32(0), f64(0)); // an empty grid is a no-op
    expect(() => code.launch('missing', { grid: 1, block: 1 })).toThrow('has no kernel missing');
    expect(() => code.launch('shared_sum', { grid: 1, block: 64, shared: 10 ** 6 }, to, 1)).toThrow(/CUDA: /);
    from.free();
    to.free();
  });

  onGpu('multiplies matrices, straight and transposed, f32 and bf16', (device) => {
    const [m, n, k] = [48, 72, 40];
    const shapes = { a: [m, k], b: [k, n] } as const;
    for (const [from, into] of [
      ['f32', 'f32'],
      ['bf16', 'bf16'],
      ['bf16', 'f32'],
    ] as const)
      for (const transposeA of [false, true])
        for (const transposeB of [false, true])
          for (const accumulate of [false, true]) {
            const a = Tensor.from(device, randomValues(m * k, 1), transposeA ? [k, m] : shapes.a, from);
            const b = Tensor.from(device, randomValues(k * n, 2), transposeB ? [n, k] : shapes.b, from);
            const start = randomValues(m * n, 3);
            const d = Tensor.from(device, start, [m, n], into);
            const [av, bv, dv] = [a.read(), b.read(), d.read()];
            device.matrixProduct({ a, b, d, m, n, k, transposeA, transposeB, accumulate });
            const expected = Float64Array.from({ length: m * n }, (_, at) => {
              const [i, j] = [Math.floor(at / n), at % n];
              let sum = accumulate ? dv[at] : 0;
              for (let t = 0; t < k; t++)
                sum += av[transposeA ? t * m + i : i * k + t] * bv[transposeB ? j * k + t : t * n + j];
              return sum;
            });
            expect(relativeError(d.read(), expected)).toBeLessThan(into === 'f32' ? 1e-6 : 4e-3);
            for (const tensor of [a, b, d]) tensor.free();
          }
  });

  onGpu('accumulates a large product once, with any number of trials', (shared) => {
    const [m, n, k] = [1024, 1024, 520];
    for (const device of [shared, new CudaDevice({ deterministic: true })]) {
      const filled = (value: number, shape: readonly [number, number]) => {
        const tensor = Tensor.empty(device, shape);
        tensor.fill(value);
        return tensor;
      };
      const [a, b, c, d] = [filled(0.5, [m, k]), filled(2, [k, n]), filled(7, [m, n]), filled(3, [m, n])];
      const values = (tensor: Tensor) => [...new Set(tensor.read())];
      device.matrixProduct({ a, b, d, m, n, k, accumulate: true });
      expect(values(d)).toEqual([k + 3]);
      device.matrixProduct({ a, b, c, d, m, n, k });
      expect([values(c), values(d)]).toEqual([[7], [k + 7]]);
      expect(() => device.matrixProduct({ a, b, c, d, m, n, k, accumulate: true })).toThrow('adds either');
      for (const tensor of [a, b, c, d]) tensor.free();
    }
  });

  onGpu('replays a captured graph', (device) => {
    const x = Tensor.from(device, [1, 2, 3], [3]);
    const y = Tensor.zeros(device, [3]);
    const code = device.compile(ARGUMENTS, { OFFSET: 0 });
    const pool = device.newPool();
    const work = () => {
      const middle = Tensor.empty(device, [3]);
      code.launch('every_argument', { grid: 1, block: 32 }, middle, x, 3, 0, f32(2), f64(0));
      code.launch('every_argument', { grid: 1, block: 32 }, y, middle, 3, 0, f32(1), f64(1));
      middle.free();
    };
    device.withPool(pool, work);
    const graph = device.withPool(pool, () => device.record(work));
    expect([...y.read()]).toEqual([3, 5, 7]); // from the first run: recording does not run
    expect(pool.systemAllocations).toBe(1);
    const elsewhere = Tensor.from(device, [7, 7, 7], [3]); // must not use the graph's memory
    x.write([10, 20, 30]);
    graph.replay();
    expect([...y.read()]).toEqual([21, 41, 61]);
    expect([...elsewhere.read()]).toEqual([7, 7, 7]);
    graph.free();
    expect(() => graph.replay()).toThrow('freed');
    for (const tensor of [x, y, elsewhere]) tensor.free();
  });

  onGpu('uses bytes of the copy queue in stream order', (device) => {
    const count = 2 ** 20;
    const queue = new CopyQueue(device, 8 * count);
    const [a, b, busy, copy] = [count, count, 16 * count, 16 * count].map((size) =>
      Tensor.zeros(device, [size], 'i32'),
    );
    const places = [a, b].map(({ pointer, bytes }) => ({ address: pointer, bytes }));
    const batch = (step: number) => [1, 2].map((part) => new Int32Array(count).fill(10 * step + part));
    const bytes = (values: Int32Array) => new Uint8Array(values.buffer);
    const ends = (tensor: Tensor) => [tensor.item(0), tensor.item(count - 1)];
    queue.send(batch(0).map(bytes));
    for (let step = 0; step < 5; step++) {
      queue.take(places);
      for (let i = 0; i < 30; i++) copy.copyFrom(busy); // the next batch arrives meanwhile and must not be visible yet
      queue.send(batch(step + 1).map(bytes));
      expect([ends(a), ends(b)]).toEqual([
        [10 * step + 1, 10 * step + 1],
        [10 * step + 2, 10 * step + 2],
      ]);
    }
    expect(() => queue.send([new Uint8Array(8 * count + 1)])).toThrow('do not fit');
    device.synchronize();
    queue.free();
    for (const tensor of [a, b, busy, copy]) tensor.free();
  });

  onGpu('has a timeline, and calls the wait monitor while it waits', (device) => {
    const [x, y] = [0, 1].map(() => Tensor.zeros(device, [2 ** 26]));
    const work = () => {
      for (let i = 0; i < 40; i++) y.copyFrom(x);
    };
    const timeline = device.timeline(work);
    expect(timeline).toHaveLength(40);
    for (const { name, isBeside, from, to } of timeline) {
      expect([name, isBeside]).toEqual(['(copy)', false]);
      expect(to).toBeGreaterThan(from);
    }
    expect(timeline[39].from).toBeGreaterThanOrEqual(timeline[38].to - 0.001);
    expect(device.profile(work).get('(copy)')?.calls).toBe(40);
    const seen: string[] = [];
    device.waitMonitor = { look: () => seen.push('look'), resume: () => seen.push('resume') };
    work();
    device.synchronize();
    expect([seen[0], seen.at(-1)]).toEqual(['look', 'resume']);
    device.waitMonitor = {
      look: () => {
        throw new Error('enough');
      },
      resume: () => {},
    };
    work();
    expect(() => device.synchronize()).toThrow('enough');
    device.waitMonitor = null;
    device.synchronize();
    for (const tensor of [x, y]) tensor.free();
  });

  onGpu('reports requested and free memory when it runs out', (device) => {
    expect(() => Tensor.empty(device, [2 ** 40])).toThrow(
      /out of GPU memory: \d+ MiB were requested, \d+ MiB of \d+ MiB are free and this run holds \d+ MiB; lower/,
    );
    const after = Tensor.from(device, [1], [1]);
    expect(after.item()).toBe(1);
    after.free();
  });

  onGpu('measures GPU time', (device) => {
    const x = Tensor.zeros(device, [2 ** 24]);
    const times = device.time(() => x.fill(1), 5);
    expect(times).toHaveLength(5);
    for (const time of times) expect(time).toBeGreaterThan(0.001);
    x.free();
  });
});
