/** Typed functions of NCCL. Every call is checked. Loading needs no GPU; a communicator does. */

import type { Environment } from '../../environment.js';
import { TrefoilError } from '../../errors.js';
import type { Reduction, WireType } from '../collectives.js';
import koffi from '../koffi.js';
import { NCCL, openLibrary } from './libraries.js';

type Native = (...values: unknown[]) => number;

/** Values of the library's enumerations. */
export const NCCL_TYPE: Readonly<Record<WireType, number>> = { u8: 1, i32: 2, f32: 7, f64: 8, bf16: 9 };
export const NCCL_REDUCTION: Readonly<Record<Reduction, number>> = { sum: 0, max: 2, min: 3 };
const IN_PROGRESS = 7;

/** Created by rank 0 and needed by every rank to find the others. Opaque, passed by value. */
export const NCCL_ID_BYTES = 128;

const handle = 'void *';
const address = 'uint64_t';
const out = 'void *';
const size = 'size_t';

/** Function names and argument types. All return a status. A function: only those who have the library load koffi. */
const functions = () => ({
  ncclGetVersion: [out],
  ncclGetUniqueId: [out],
  ncclCommInitRank: [out, 'int', koffi.struct({ bytes: koffi.array('uint8_t', NCCL_ID_BYTES) }), 'int'],
  ncclCommGetAsyncError: [handle, out],
  ncclCommAbort: [handle],
  ncclCommFinalize: [handle],
  ncclCommDestroy: [handle],
  ncclAllReduce: [address, address, size, 'int', 'int', handle, handle],
  ncclReduceScatter: [address, address, size, 'int', 'int', handle, handle],
  ncclAllGather: [address, address, size, 'int', handle, handle],
  ncclBroadcast: [address, address, size, 'int', 'int', handle, handle],
});

type Name = keyof ReturnType<typeof functions>;

export class NcclError extends TrefoilError {
  readonly status: number;

  constructor(message: string, status: number) {
    super(message);
    this.status = status;
  }
}

export class NcclLibrary {
  readonly #calls: Record<Name, Native>;
  readonly #describe: (status: number) => string | null;
  readonly #lastError: (communicator: bigint | null) => string | null;
  readonly #word = koffi.alloc('uint64_t', 1) as bigint;
  readonly #view: DataView;

  /** Throws `LibraryMissing` if NCCL is not installed. */
  constructor(environment: Environment = process.env) {
    const library = openLibrary(NCCL, environment);
    this.#calls = Object.fromEntries(
      Object.entries(functions()).map(([name, types]) => [name, library.func(name, 'int', [...types]) as Native]),
    ) as Record<Name, Native>;
    this.#describe = library.func('ncclGetErrorString', 'str', ['int']);
    this.#lastError = library.func('ncclGetLastError', 'str', [handle]);
    this.#view = new DataView(koffi.view(this.#word, 8));
  }

  /** For example 2.28.9. */
  get version(): string {
    const code = Number(this.#get('ncclGetVersion') & 0xffff_ffffn);
    return `${Math.floor(code / 10_000)}.${Math.floor(code / 100) % 100}.${code % 100}`;
  }

  uniqueId(): Uint8Array {
    const memory = koffi.alloc('uint8_t', NCCL_ID_BYTES);
    try {
      this.call('ncclGetUniqueId', memory);
      return new Uint8Array(koffi.view(memory, NCCL_ID_BYTES)).slice();
    } finally {
      koffi.free(memory);
    }
  }

  /** Joins the ranks with the same id, on the current GPU. Returns when all have joined. */
  join(id: Uint8Array, rank: number, world: number): bigint {
    if (id.byteLength !== NCCL_ID_BYTES) throw new Error(`an NCCL id has ${NCCL_ID_BYTES} bytes, not ${id.byteLength}`);
    return this.#get('ncclCommInitRank', world, { bytes: id }, rank);
  }

  /** Throws an asynchronous error of the library's threads, if there is one. */
  check(communicator: bigint): void {
    this.#view.setBigUint64(0, 0n, true);
    this.call('ncclCommGetAsyncError', communicator, this.#word);
    const status = this.#view.getInt32(0, true);
    if (status !== 0 && status !== IN_PROGRESS) throw this.#error('an operation', status, communicator);
  }

  call(name: Name, ...values: unknown[]): void {
    const status = this.#calls[name](...values);
    if (status !== 0) throw this.#error(name, status, null);
  }

  #get(name: Name, ...values: unknown[]): bigint {
    this.#view.setBigUint64(0, 0n, true);
    this.call(name, this.#word, ...values);
    return this.#view.getBigUint64(0, true);
  }

  #error(what: string, status: number, communicator: bigint | null): NcclError {
    const detail = this.#lastError(communicator)?.trim().split('\n').at(-1);
    return new NcclError(
      `NCCL: ${what} failed: ${this.#describe(status) ?? status}${detail ? ` (${detail})` : ''}; ` +
        'NCCL_DEBUG=INFO prints what led to it',
      status,
    );
  }
}
