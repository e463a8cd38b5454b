/**
 * Matrix products through cuBLASLt. The algorithm of a shape is chosen once: the heuristic's first result, or the fastest of
 * its results for large products. cuBLASLt is column-major, where a row-major matrix is its transpose: D = A B is computed
 * as Dᵀ = Bᵀ Aᵀ without copies.
 */

import type { Environment } from '../../environment.js';
import { TrefoilError, UsageError } from '../../errors.js';
import koffi from '../koffi.js';
import { CUBLASLT, openLibrary } from './libraries.js';
import type { MatrixProduct } from './runtime.js';

type Native = (...values: unknown[]) => number;

/** Values of the library's enumerations. */
const COMPUTE_32F = 68;
const TYPE: Record<string, number> = { f32: 0, bf16: 14, e4m3: 28, e5m2: 29 };
const DESC_TRANSPOSE_A = 3;
const DESC_TRANSPOSE_B = 4;
const DESC_FACTOR_A = 17;
const DESC_FACTOR_B = 18;
const DESC_FAST_ACCUMULATION = 25;
const LAYOUT_BATCH_COUNT = 5;
const LAYOUT_BATCH_STRIDE = 6;
const PREFERENCE_MAX_WORKSPACE = 1;
/** Size of one heuristic result; the algorithm is its first 64 bytes. */
const HEURISTIC_BYTES = 96;
const ALGORITHM_BYTES = 64;
/** Offset of the status in a heuristic result. */
const STATE_OFFSET = 72;

const WORKSPACE_BYTES = 64 * 2 ** 20;

/** Number of heuristic results that are timed, runs of each, and the minimum advantage over the first. */
const CANDIDATES = 8;
const RUNS = 3;
const WORTH = 0.99;
/** Minimum size of a product, in operations, for which algorithms are timed. */
const LARGE = 1e9;

interface Layouts {
  readonly descriptor: bigint;
  readonly a: bigint;
  readonly b: bigint;
  readonly d: bigint;
}

interface Plan extends Layouts {
  /** Native memory with the chosen algorithm. */
  readonly algorithm: bigint;
}

/** The part of a device that products use. */
export interface CublasHost {
  readonly stream: bigint;
  /** Allocates the workspace, which all products share and which is never freed. */
  allocate(bytes: number): bigint;
  /** For timing algorithms; null to use the heuristic's first result. */
  readonly trial: Trial | null;
}

export interface Trial {
  /** Whether the device can run and be waited for; false during a capture. */
  possible(): boolean;
  /** Runs `use` with temporary memory; returns its result, or null if there is not enough memory. */
  withMemory<T>(bytes: number, use: (address: bigint) => T): T | null;
  /** GPU time of each of `repeats` runs, in milliseconds. */
  time(work: () => void, repeats: number): number[];
}

/** Name and version of the installed library. Throws `LibraryMissing` if there is none. */
export function cublasLtIdentity(environment: Environment = process.env): string {
  const version = Number(openLibrary(CUBLASLT, environment).func('cublasLtGetVersion', 'size_t', [])());
  return `cuBLASLt ${Math.floor(version / 10_000)}.${Math.floor(version / 100) % 100}.${version % 100}`;
}

export class CublasLt {
  readonly #handle: bigint;
  readonly #calls: Record<
    | 'matmul'
    | 'descriptor'
    | 'setDescriptor'
    | 'layout'
    | 'setLayout'
    | 'preference'
    | 'setPreference'
    | 'heuristic'
    | 'destroy',
    Native
  >;
  readonly #plans = new Map<string, Plan>();
  readonly #word = koffi.alloc('uint64_t', 1) as bigint;
  /** Factors in native memory, by value. */
  readonly #factors = new Map<number, bigint>();
  readonly #preference: bigint;
  readonly #host: CublasHost;
  readonly #workspace: bigint;

  constructor(host: CublasHost) {
    const library = openLibrary(CUBLASLT);
    const bind = (name: string, types: string[]) => library.func(name, 'int', types) as Native;
    const pointer = 'void *';
    this.#calls = {
      destroy: bind('cublasLtDestroy', [pointer]),
      descriptor: bind('cublasLtMatmulDescCreate', [pointer, 'int', 'int']),
      setDescriptor: bind('cublasLtMatmulDescSetAttribute', [pointer, 'int', pointer, 'size_t']),
      layout: bind('cublasLtMatrixLayoutCreate', [pointer, 'int', 'uint64_t', 'uint64_t', 'int64_t']),
      setLayout: bind('cublasLtMatrixLayoutSetAttribute', [pointer, 'int', pointer, 'size_t']),
      preference: bind('cublasLtMatmulPreferenceCreate', [pointer]),
      setPreference: bind('cublasLtMatmulPreferenceSetAttribute', [pointer, 'int', pointer, 'size_t']),
      heuristic: bind('cublasLtMatmulAlgoGetHeuristic', [
        ...Array.from({ length: 7 }, () => pointer),
        'int',
        pointer,
        pointer,
      ]),
      matmul: bind('cublasLtMatmul', [
        ...[pointer, pointer, pointer], // handle, descriptor, alpha
        ...['uint64_t', pointer, 'uint64_t', pointer, pointer], // a, its layout, b, its layout, beta
        ...['uint64_t', pointer, 'uint64_t', pointer], // c, its layout, d, its layout
        ...[pointer, 'uint64_t', 'size_t', pointer], // algorithm, workspace, its bytes, stream
      ]),
    };
    const create = bind('cublasLtCreate', [pointer]);
    this.#handle = this.#get('cublasLtCreate', create);
    this.#host = host;
    this.#workspace = host.allocate(WORKSPACE_BYTES);
    this.#preference = this.#get('cublasLtMatmulPreferenceCreate', this.#calls.preference);
    const bytes = koffi.alloc('uint64_t', 1) as bigint;
    new BigUint64Array(koffi.view(bytes, 8))[0] = BigInt(WORKSPACE_BYTES);
    check(
      'cublasLtMatmulPreferenceSetAttribute',
      this.#calls.setPreference(this.#preference, PREFERENCE_MAX_WORKSPACE, bytes, 8),
    );
    koffi.free(bytes);
  }

  product(product: MatrixProduct): void {
    if (product.m === 0 || product.n === 0) return;
    const plan = this.#plan(product);
    const status = this.#run(product, plan, plan.algorithm, product.d.pointer);
    if (status !== 0) throw new TrefoilError(`cuBLASLt: a product of ${sizeOf(product)} failed with status ${status}`);
  }

  /** Chooses the algorithm, which is slow the first time. `product` does so if this was not called. */
  prepare(product: MatrixProduct): void {
    if (product.m > 0 && product.n > 0) this.#plan(product);
  }

  #run(product: MatrixProduct, layouts: Layouts, algorithm: bigint, d: bigint): number {
    const { a, b, c, accumulate = false, alpha = 1, beta = 1, fp8 } = product;
    if (fp8) this.#setFactors(layouts.descriptor, fp8);
    return this.#calls.matmul(
      ...[this.#handle, layouts.descriptor, this.#factor(alpha)],
      ...[b.pointer, layouts.a, a.pointer, layouts.b, this.#factor(c ? beta : Number(accumulate))],
      ...[c?.pointer ?? d, layouts.d, d, layouts.d],
      ...[algorithm, this.#workspace, WORKSPACE_BYTES, this.#host.stream],
    );
  }

  #plan(product: MatrixProduct): Plan {
    const { a, b, c, d, m, n, k, transposeA = false, transposeB = false, accumulate = false, fp8 } = product;
    const { strideA = k, batch = 1 } = product;
    const added = `${accumulate} ${c ? c.dtype : ''} ${batch}`;
    const kind = fp8 ? `${a.dtype} ${b.dtype} ${fp8.fast} ${strideA}` : a.dtype;
    const key = `${kind} ${d.dtype} ${m} ${n} ${k} ${transposeA} ${transposeB} ${added}`;
    const known = this.#plans.get(key);
    if (known) return known;
    if (k === 0) throw new UsageError('a matrix product needs at least one term');
    if (!fp8 && a.dtype !== b.dtype)
      throw new UsageError(`a matrix product of ${a.dtype} and ${b.dtype} is not possible`);
    if (strideA !== k && !fp8) throw new UsageError('only rows of FP8 matrices may lie apart');
    if (c && (accumulate || c.dtype !== d.dtype))
      throw new UsageError(
        `a matrix product in ${d.dtype} adds either to D or to another ${d.dtype} matrix, not to both`,
      );
    const into = typeOf(d.dtype);
    const descriptor = this.#get('cublasLtMatmulDescCreate', this.#calls.descriptor, COMPUTE_32F, TYPE['f32']);
    // Column-major: the first operand is Bᵀ [n,k], the second Aᵀ [k,m]; a matrix transposed here is not transposed there.
    this.#set(descriptor, DESC_TRANSPOSE_A, Number(transposeB), 4);
    this.#set(descriptor, DESC_TRANSPOSE_B, Number(transposeA), 4);
    if (fp8) {
      this.#set(descriptor, DESC_FAST_ACCUMULATION, Number(fp8.fast), 1);
      this.#setFactors(descriptor, fp8);
    }
    const layout = (type: number, rows: number, columns: number, stride = rows) =>
      this.#layout(type, rows, columns, stride, batch);
    const first = transposeB ? layout(typeOf(b.dtype), k, n) : layout(typeOf(b.dtype), n, k);
    const second = transposeA ? layout(typeOf(a.dtype), m, k) : layout(typeOf(a.dtype), k, m, strideA);
    const layouts = { descriptor, a: first, b: second, d: layout(into, n, m) };
    const plan = { ...layouts, algorithm: this.#choose(product, layouts) };
    this.#plans.set(key, plan);
    return plan;
  }

  /**
   * The heuristic's first result is always the same for a library and a GPU, so runs are bitwise equal. The fastest of several
   * may change between runs, and with it the order of additions.
   */
  #choose(product: MatrixProduct, layouts: Layouts): bigint {
    const { m, n, k, batch = 1 } = product;
    const { trial } = this.#host;
    const isTried = trial !== null && 2 * batch * m * n * k >= LARGE && trial.possible();
    const algorithms = this.#ask(product, layouts, isTried ? CANDIDATES : 1);
    const best = isTried && algorithms.length > 1 ? this.#fastest(product, layouts, algorithms, trial) : 0;
    algorithms.forEach((algorithm, i) => {
      if (i !== best) koffi.free(algorithm);
    });
    return algorithms[best];
  }

  /** Up to `count` algorithms, each in its own native memory, best estimate first. */
  #ask(product: MatrixProduct, { descriptor, a, b, d }: Layouts, count: number): bigint[] {
    const answers = koffi.alloc('uint8_t', count * HEURISTIC_BYTES) as bigint;
    const status = this.#calls.heuristic(
      ...[this.#handle, descriptor, a, b, d, d, this.#preference],
      ...[count, answers, this.#word],
    );
    const found = status === 0 ? Number(this.#read() & 0xffffffffn) : 0;
    const bytes = new DataView(koffi.view(answers, count * HEURISTIC_BYTES));
    const algorithms: bigint[] = [];
    for (let i = 0; i < found; i++) {
      if (bytes.getInt32(i * HEURISTIC_BYTES + STATE_OFFSET, true) !== 0) continue;
      const algorithm = koffi.alloc('uint8_t', ALGORITHM_BYTES) as bigint;
      const from = new Uint8Array(bytes.buffer, bytes.byteOffset + i * HEURISTIC_BYTES, ALGORITHM_BYTES);
      new Uint8Array(koffi.view(algorithm, ALGORITHM_BYTES)).set(from);
      algorithms.push(algorithm);
    }
    koffi.free(answers);
    if (algorithms.length === 0)
      throw new TrefoilError(`cuBLASLt has no algorithm for a product of ${sizeOf(product)} (status ${status})`);
    return algorithms;
  }

  /**
   * The fastest algorithm on these operands (their values matter too: zeros take less power). Results go to temporary memory,
   * so that a product that accumulates into D does so once.
   */
  #fastest(product: MatrixProduct, layouts: Layouts, algorithms: readonly bigint[], trial: Trial): number {
    const bytes = (product.batch ?? 1) * product.m * product.n * (product.d.dtype === 'bf16' ? 2 : 4);
    const times = trial.withMemory(bytes, (into) => {
      const run = (i: number) => this.#run(product, layouts, algorithms[i], into);
      // The first run of each loads its code; some algorithms fail.
      const able = algorithms.flatMap((_, i) => (run(i) === 0 ? [i] : []));
      const least = algorithms.map(() => Number.POSITIVE_INFINITY);
      // Interleaved and without pauses, because the GPU's clock changes under load.
      let next = 0;
      const all = trial.time(() => void run(able[next++ % able.length]), RUNS * able.length);
      all.forEach((ms, at) => {
        const i = able[at % able.length];
        least[i] = Math.min(least[i], ms);
      });
      return least;
    });
    if (!times) return 0;
    const best = times.indexOf(Math.min(...times));
    return times[best] < WORTH * times[0] ? best : 0;
  }

  #layout(type: number, rows: number, columns: number, stride: number, batch: number): bigint {
    const layout = this.#get('cublasLtMatrixLayoutCreate', this.#calls.layout, type, rows, columns, stride);
    if (batch === 1) return layout;
    const set = (attribute: number, bytes: number) =>
      check('cublasLtMatrixLayoutSetAttribute', this.#calls.setLayout(layout, attribute, this.#word, bytes));
    new Int32Array(koffi.view(this.#word, 8))[0] = batch;
    set(LAYOUT_BATCH_COUNT, Int32Array.BYTES_PER_ELEMENT);
    new BigInt64Array(koffi.view(this.#word, 8))[0] = BigInt(stride * columns);
    set(LAYOUT_BATCH_STRIDE, BigInt64Array.BYTES_PER_ELEMENT);
    return layout;
  }

  /** A number in native memory. A captured product keeps its value, not its address. */
  #factor(value: number): bigint {
    const known = this.#factors.get(value) ?? constant(value);
    this.#factors.set(value, known);
    return known;
  }

  /** Their addresses may differ in every call; a captured product keeps those of the capture. */
  #setFactors(descriptor: bigint, { a, b }: NonNullable<MatrixProduct['fp8']>): void {
    this.#set(descriptor, DESC_FACTOR_A, b.pointer, 8);
    this.#set(descriptor, DESC_FACTOR_B, a.pointer, 8);
  }

  #set(descriptor: bigint, attribute: number, value: number | bigint, bytes: number): void {
    new BigUint64Array(koffi.view(this.#word, 8))[0] = BigInt(value);
    check('cublasLtMatmulDescSetAttribute', this.#calls.setDescriptor(descriptor, attribute, this.#word, bytes));
  }

  #get(name: string, create: Native, ...values: unknown[]): bigint {
    check(name, create(this.#word, ...values));
    return this.#read();
  }

  #read(): bigint {
    return new BigUint64Array(koffi.view(this.#word, 8))[0];
  }

  close(): void {
    this.#calls.destroy(this.#handle);
  }
}

function sizeOf({ m, n, k, batch = 1 }: MatrixProduct): string {
  return `${batch > 1 ? `${batch} times ` : ''}${m}x${n}x${k}`;
}

function typeOf(dtype: string | undefined): number {
  const type = dtype === undefined ? undefined : TYPE[dtype];
  if (type === undefined) throw new UsageError(`there are no matrix products of ${dtype}`);
  return type;
}

function constant(value: number): bigint {
  const memory = koffi.alloc('float', 1) as bigint;
  new Float32Array(koffi.view(memory, 4))[0] = value;
  return memory;
}

function check(name: string, status: number): void {
  if (status !== 0) throw new TrefoilError(`cuBLASLt: ${name} failed with status ${status}`);
}
