/**
 * A CUDA device without a GPU that computes: kernels are compiled by the C++ compiler with a thread emulator
 * (cuda-emulator.h) and run on the CPU's memory, launched by the same TypeScript as on a GPU. For the kernels of a decode
 * step and the plain ones around them; slow, so for small shapes.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import koffi from 'koffi';
import { defaultCompilerOptions, findCompiler } from '../device/cpu/compile.js';
import { CpuDevice } from '../device/cpu/cpu.js';
import {
  type CudaCode,
  type CudaRuntime,
  Floating,
  type KernelMacros,
  type LaunchArgument,
  type LaunchShape,
  type MatrixProduct,
} from '../device/cuda/runtime.js';
import type { Addressable, Device, KernelModule, Kernels, Signatures } from '../device/device.js';
import { KernelCache, kernelCacheFolder, kernelKey } from '../device/kernel-cache.js';
import { fp8Value } from '../ops/linear/fp8-reference.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../tensor/bfloat16.js';

const HEADERS = new URL('../device/cuda/', import.meta.url);
const EMULATOR = fileURLToPath(new URL('./cuda-emulator.h', import.meta.url));

/** Functions written in PTX, by how they begin, and what stands for them. */
const REPLACED: Readonly<Record<string, string>> = {
  'float exp2_approximate(float x)': 'return exp2f(x);',
  'float reciprocal_approximate(float x)': 'return 1.0f / x;',
  'float log2_approximate(float x)': 'return log2f(x);',
  'u32 pack_bf16(float low, float high)': 'return emulator::to_bf16(low) | (u32)emulator::to_bf16(high) << 16;',
  'uint4 load_early(const void* from)': 'return *(const uint4*)from;',
  'void mma_bf16(float* d': 'emulator::product(d, a0, a1, a2, a3, b0, b1);',
  'u32 shared_address(const void* p)': 'return (u32)((const char*)p - emulator::self().block->memory());',
  'void copy16(u32 to, const void* from, bool present)':
    'present ? (void)memcpy(emulator::at(to), from, 16) : (void)memset(emulator::at(to), 0, 16);',
  'void copy16(u32 to, const void* from) {': 'memcpy(emulator::at(to), from, 16);',
  'void copy4(u32 to, const void* from, bool present)': 'memcpy(emulator::at(to), from, 4);',
  'void copies_commit()': '',
  'void copies_wait()': '',
  'void barrier_init(u32 at, int arrivals)': 'emulator::phases_init(at, arrivals);',
  'void barrier_arrive(u32 at)': 'emulator::phases_arrive(at);',
  'void barrier_arrive(u32 at, int count)': 'for (int i = 0; i < count; i++) emulator::phases_arrive(at);',
  'void barrier_wait(u32 at, int parity)': 'emulator::phases_wait(at, parity);',
  'void bulk_end(u32 full, int)': 'emulator::phases_arrive(full);',
  'void barrier(int id, int threads)': 'emulator::named_barrier(id, threads);',
  'void barrier_pass(int id, int threads)': 'emulator::named_pass(id, threads);',
  'uint4 load_unit(u32 at)': 'return *(const uint4*)emulator::at(at);',
  'void store_unit(u32 at, uint4 x)': '*(uint4*)emulator::at(at) = x;',
  'u32 pack_f16(float low, float high)': 'return emulator::to_f16(low) | (u32)emulator::to_f16(high) << 16;',
  'float low_f16(u32 x)': 'return emulator::from_f16(x);',
  'u32 add_f16(u32 a, u32 b)': 'return emulator::pairwise_f16(a, b, [](double x, double y) { return x + y; });',
  'u32 multiply_f16(u32 a, u32 b)': 'return emulator::pairwise_f16(a, b, [](double x, double y) { return x * y; });',
  'void prefetch(const void* from)': '',
  'void store_streaming(void* to, uint4 x)': '*(uint4*)to = x;',
  'void store16(void* to, uint4 x)': '*(uint4*)to = x;',
  'void load_fragment(u32 (&r)[4], u32 address)': 'emulator::load_matrices(r, address, TRANSPOSE);',
  'void hold(float (&d)[32])': '',
  'uint4 load_l2(const void* from)': 'return *(const uint4*)from;',
  'float load_l2(const float* from)': 'return *from;',
  'void await(const int* counter, int target)': 'while (*(volatile const int*)counter < target) emulator::pause();',
  'void cluster_arrive()': 'emulator::cluster_arrive();',
  'void cluster_arrive_relaxed()': 'emulator::cluster_arrive();',
  'void cluster_wait()': 'emulator::cluster_wait();',
  'void write_to(int rank, X* own, X value)': 'emulator::write_shared(rank, own, value);',
  'int cluster_rank()': 'return emulator::self().block->rank;',
  'void exchange_begin(u64* exchange, int arrivals, int bytes)': 'emulator::exchange_begin(exchange, arrivals, bytes);',
  'void exchange_arrive(u64* exchange, int rank)': 'emulator::exchange_arrive(exchange, rank);',
  'void exchange_wait(u64* exchange)': 'emulator::exchange_wait(exchange);',
  'void send_to(int rank, X* own, X value, u64* exchange)': 'emulator::send(rank, own, value, exchange);',
  'X read_from(int rank, const X* own)': 'return emulator::read_shared(rank, own);',
};

/** The body of the function whose text begins so, exchanged. */
function replaceBody(source: string, beginning: string, body: string): string {
  const at = source.indexOf(beginning);
  if (at < 0) return source;
  const start = source.indexOf('{', at);
  let end = start;
  let depth = 0;
  do {
    if (source[end] === '{') depth += 1;
    if (source[end] === '}') depth -= 1;
    end += 1;
  } while (depth > 0);
  return `${source.slice(0, start)}{ ${body} }${source.slice(end)}`;
}

/** One text with all headers, each once. A header is beside the file that includes it, or in src/device/cuda. */
function joined(source: URL, seen = new Set<string>()): string {
  return readFileSync(source, 'utf8').replace(/^#include "(.*)"$|^#pragma once$/gm, (_, header?: string) => {
    if (header === undefined) return '';
    const beside = new URL(header, source);
    const found = existsSync(beside) ? beside : new URL(header, HEADERS);
    if (seen.has(found.href)) return '';
    seen.add(found.href);
    return joined(found, seen);
  });
}

/** Without the attributes between `__global__ void` and the kernel's name, whose arguments may hold parentheses. */
function withoutAttributes(text: string): string {
  const [first, ...others] = text.split(/__(?:launch_bounds|cluster_dims)__/);
  return [
    first,
    ...others.map((rest) => {
      let end = rest.indexOf('(');
      let depth = 0;
      do {
        if (rest[end] === '(') depth += 1;
        if (rest[end] === ')') depth -= 1;
        end += 1;
      } while (depth > 0);
      return rest.slice(end);
    }),
  ].join('');
}

function emulatedSource(source: URL, preprocess: (text: string) => string): string {
  let text = joined(source);
  for (const [beginning, body] of Object.entries(REPLACED)) text = replaceBody(text, beginning, body);
  text = text.replaceAll('extern __shared__ float4 shared_memory[];', ''); // a macro of the emulator
  text = text.replace(
    /extern __shared__ ([\w ]+) (\w+)\[\];/g,
    (_, type: string, name: string) => `${type}* ${name} = (${type}*)emulator::self().block->memory();`,
  );
  // Names of kernels as the preprocessor leaves them: some are made by macros.
  const bare = withoutAttributes(preprocess(text));
  const kernels = [...bare.matchAll(/__global__\s+void\s+(\w+)\s*\(/g)].map(
    ([, name]) =>
      `extern "C" int launch_${name}(const int* shape, void** values) { return emulator::launch(${name}, shape, values); }`,
  );
  const constants = [...bare.matchAll(/extern "C" __device__ int (\w+) =/g)].map(
    ([, name]) => `extern "C" int constant_${name}() { return ${name}; }`,
  );
  return [`#include "${EMULATOR}"`, text, ...kernels, ...constants, ''].join('\n');
}

class EmulatedCode implements CudaCode {
  readonly #library: ReturnType<typeof koffi.load>;
  readonly #cluster: number;
  readonly #run: (work: () => void) => void;

  constructor(path: string, cluster: number, run: (work: () => void) => void) {
    this.#library = koffi.load(path);
    this.#cluster = cluster;
    this.#run = run;
  }

  launch(name: string, shape: LaunchShape, ...values: LaunchArgument[]): void {
    const call = this.#library.func(`launch_${name}`, 'int', ['void *', 'void *']);
    const [x, y = 1, z = 1] = typeof shape.grid === 'number' ? [shape.grid] : shape.grid;
    const together = this.#cluster;
    const numbers = Int32Array.of(x, y, z, shape.block, together, shape.shared ?? 0);
    const words = new BigUint64Array(values.length);
    const view = new DataView(words.buffer);
    values.forEach((value, i) => {
      if (typeof value === 'number') view.setBigInt64(8 * i, BigInt(value), true);
      else if (typeof value === 'bigint') words[i] = value;
      else if (value instanceof Floating)
        if (value.double) view.setFloat64(8 * i, value.value, true);
        else view.setFloat32(8 * i, value.value, true);
      else words[i] = value === null ? 0n : value.pointer;
    });
    this.#run(() => {
      const memory = koffi.alloc('uint64_t', 2 * words.length);
      const from = koffi.address(memory);
      const table = words.map((_, i) => from + BigInt(8 * (words.length + i)));
      new BigUint64Array(koffi.view(memory, 16 * words.length)).set([...table, ...words]);
      const isDone = x * y * z === 0 || call(numbers, memory) === 1;
      koffi.free(memory);
      if (!isDone)
        throw new Error(`threads of ${name} wait for each other, or use shared memory of a block that may not run`);
    });
  }

  constant(name: string): number {
    return this.#library.func(`constant_${name}`, 'int', [])() as number;
  }
}

export class EmulatedCuda implements Device, CudaRuntime {
  readonly kind = 'cuda';
  readonly name = 'emulated GPU';
  readonly multiprocessors: number;
  readonly architecture: number;
  /** Holds the memory; its own, so that tensors of another device are refused. */
  readonly #host = new CpuDevice();
  readonly #compiler = findCompiler(defaultCompilerOptions(process.env).candidates);
  readonly #cache = new KernelCache(kernelCacheFolder(process.env), 'so');
  readonly #code = new Map<string, CudaCode>();
  readonly #modules = new Map<KernelModule, unknown>();
  #recorded: (() => void)[] | null = null;

  constructor({ multiprocessors = 4, architecture = 90 } = {}) {
    this.multiprocessors = multiprocessors;
    this.architecture = architecture;
    const { pool } = this.#host;
    const take = pool.take.bind(pool);
    pool.take = (bytes) => {
      const block = take(bytes);
      // NaN in every type of float, as in shared memory, so that a read before the first write shows.
      this.#host.upload(block.address, new Uint8Array(block.bytes).fill(0xff));
      return block;
    };
  }

  get pool() {
    return this.#host.pool;
  }
  get memory() {
    return this.#host.memory;
  }

  /** As if the GPU had 16 GiB. */
  freeBytes() {
    return 2 ** 34 - this.memory.reservedBytes;
  }

  compile(source: URL, given: KernelMacros = {}): CudaCode {
    const macros: KernelMacros = { ...given, EMULATED: 1 };
    const flags = Object.entries(macros).map(([name, value]) => `-D${name}=${value}`);
    const key = JSON.stringify([source.href, flags]);
    let code = this.#code.get(key);
    if (!code) {
      const text = emulatedSource(source, (plain) => this.#compileText(plain, ['-E', '-P', ...flags, '-']));
      const cluster = text.includes('__cluster_dims__(CLUSTER') ? Number(macros['CLUSTER']) : 1;
      code = new EmulatedCode(this.#library(text, flags), cluster, (work) => this.#run(work));
      this.#code.set(key, code);
    }
    return code;
  }

  kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    const made = this.#modules.get(module) ?? module.cuda?.(this);
    this.#modules.set(module, made);
    return made as Kernels<S>;
  }

  /** As a GPU's graph: launches that `work` makes are kept, not run, and replayed with the same arguments. */
  record(work: () => void): { replay(): void; free(): void } {
    const launches: (() => void)[] = [];
    this.#recorded = launches;
    try {
      work();
    } finally {
      this.#recorded = null;
    }
    return {
      replay: () => {
        for (const launch of launches) launch();
      },
      free: () => {},
    };
  }

  /** In float64; operands and result of one row-major layout or the other. */
  matrixProduct(product: MatrixProduct): void {
    const { a, b, d, m, n, k, transposeA, transposeB, accumulate, c, strideA = k, fp8 } = product;
    const { alpha = 1, beta = 1, batch = 1 } = product;
    const rows = batch * m; // of A; a stride is given for one matrix only
    for (const factor of fp8 ? [fp8.a, fp8.b] : [])
      if (factor.pointer % 16n !== 0n) throw new Error('cuBLASLt refuses factors that are not aligned to 16 bytes');
    this.#run(() => {
      const [left, right] = [this.#read(a, strideA * (rows - 1) + k), this.#read(b, batch * k * n)];
      const factor = alpha * (fp8 ? this.#read(fp8.a, 1)[0] * this.#read(fp8.b, 1)[0] : 1);
      const before = accumulate ? this.#read(d, batch * m * n) : c ? this.#read(c, batch * m * n) : null;
      const sums = Float64Array.from({ length: batch * m * n }, (_, at) => {
        const [which, i, j] = [Math.floor(at / (m * n)), Math.floor(at / n) % m, at % n];
        const [x, y] = [which * m * k, which * k * n];
        let sum = (before?.[at] ?? 0) * (c ? beta : 1);
        for (let p = 0; p < k; p++)
          sum +=
            factor *
            left[x + (transposeA ? p * m + i : i * strideA + p)] *
            right[y + (transposeB ? j * k + p : p * n + j)];
        return sum;
      });
      const stored = d.dtype === 'bf16' ? float32ToBfloat16(sums) : Float32Array.from(sums);
      this.#host.upload(d.pointer, new Uint8Array(stored.buffer, stored.byteOffset, stored.byteLength));
    });
  }
  withScratch<T>(bytes: number, use: (address: bigint) => T): T {
    const block = this.pool.take(bytes);
    try {
      return use(block.address);
    } finally {
      this.pool.give(block);
    }
  }
  upload(address: bigint, bytes: Uint8Array): void {
    this.#host.upload(address, bytes);
  }
  download(address: bigint, into: Uint8Array): void {
    this.#host.download(address, into);
  }
  fillZero(address: bigint, bytes: number): void {
    this.#run(() => this.#host.fillZero(address, bytes));
  }
  fill(address: bigint, value: number, count: number): void {
    this.#run(() => this.#host.fill(address, value, count));
  }
  copy(to: bigint, from: bigint, bytes: number): void {
    this.#run(() => this.#host.copy(to, from, bytes));
  }
  synchronize(): void {}

  #read({ pointer, dtype }: Addressable, count: number): ArrayLike<number> {
    const isFp8 = dtype === 'e4m3' || dtype === 'e5m2';
    const bytes = new Uint8Array(count * (isFp8 ? 1 : dtype === 'bf16' ? 2 : 4));
    this.#host.download(pointer, bytes);
    if (isFp8) return Float64Array.from(bytes, (code) => fp8Value(code, dtype));
    return dtype === 'bf16' ? bfloat16ToFloat32(new Uint16Array(bytes.buffer)) : new Float32Array(bytes.buffer);
  }

  #run(work: () => void): void {
    if (this.#recorded) this.#recorded.push(work);
    else work();
  }

  #library(text: string, macros: readonly string[]): string {
    const { command, version } = this.#compiler;
    // -O1: most of the time of a test is the compiler's, and -O2 takes half as long again for the same numbers.
    const flags = [
      '-std=c++17',
      '-O1',
      '-ffp-contract=off',
      '-w',
      '-fPIC',
      '-shared',
      '-U_FORTIFY_SOURCE',
      '-Wl,-Bsymbolic',
      ...macros,
    ];
    const key = kernelKey([text, readFileSync(EMULATOR, 'utf8'), flags.join(' ')]);
    const compiler = `${command} ${version}`;
    return (
      this.#cache.find(key, compiler) ?? this.#cache.store(key, compiler, (path) => this.#build(text, flags, path))
    );
  }

  #build(text: string, flags: readonly string[], path: string): void {
    this.#compileText(text, [...flags, '-', '-o', path]);
  }

  #compileText(input: string, words: readonly string[]): string {
    const done = spawnSync(this.#compiler.command, ['-x', 'c++', ...words], {
      encoding: 'utf8',
      input,
      maxBuffer: 2 ** 26,
    });
    if (done.status !== 0) throw new Error(`the emulator does not take this source: ${done.stderr.slice(0, 3000)}`);
    return done.stdout;
  }
}
