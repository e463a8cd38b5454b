/** The typed MPI functions that collectives.ts needs. Every call is checked. */
import { TrefoilError } from '../../errors.js';
import { type MpiAbi, type MpiHandles, openMpiLibrary } from './abi.js';

const handle = 'void *';
const data = 'void *';
const out = 'void *'; // memory that MPI writes to

/** Function names and argument types. All return an error code. */
const FUNCTIONS = {
  MPI_Initialized: [out],
  MPI_Init_thread: [out, out, 'int', out],
  MPI_Finalized: [out],
  MPI_Finalize: [],
  MPI_Abort: [handle, 'int'],
  MPI_Error_string: ['int', out, out],
  MPI_Comm_rank: [handle, out],
  MPI_Comm_size: [handle, out],
  MPI_Comm_dup: [handle, out],
  MPI_Comm_free: [out],
  MPI_Comm_set_errhandler: [handle, handle],
  MPI_Ialltoall: [data, 'int', handle, data, 'int', handle, handle, out],
  MPI_Iallgather: [data, 'int', handle, data, 'int', handle, handle, out],
  MPI_Ibcast: [data, 'int', handle, 'int', handle, out],
  MPI_Test: [out, out, out],
} as const;

type Name = keyof typeof FUNCTIONS;

/** MPI_THREAD_FUNNELED: the process has several threads, and only this one calls MPI. */
const FUNNELED = 1;
const ERROR_STRING_BYTES = 1024;

export class Mpi {
  readonly abi: MpiAbi;
  readonly handles: MpiHandles;
  readonly #functions: Readonly<Record<Name, (...values: unknown[]) => number>>;

  /** Initialises MPI. Under mpirun that joins the other ranks; otherwise the world size is 1. */
  constructor(abis?: readonly MpiAbi[]) {
    const { abi, library } = openMpiLibrary(abis);
    this.abi = abi;
    this.handles = abi.handles(library);
    this.#functions = Object.fromEntries(
      Object.entries(FUNCTIONS).map(([name, types]) => [name, library.func(name, 'int', [...types])]),
    ) as unknown as Record<Name, (...values: unknown[]) => number>;
    const isStarted = new Int32Array(1);
    this.call('MPI_Initialized', isStarted);
    if (isStarted[0] === 0) this.call('MPI_Init_thread', null, null, FUNNELED, new Int32Array(1));
    this.call('MPI_Comm_set_errhandler', this.handles.world, this.handles.errorsReturn);
  }

  call(name: Name, ...values: unknown[]): void {
    const code = this.#functions[name](...values);
    if (code !== 0) throw new TrefoilError(`${name} failed: ${this.#explain(code)}`);
  }

  integer(name: 'MPI_Comm_rank' | 'MPI_Comm_size', communicator: bigint): number {
    const value = new Int32Array(1);
    this.call(name, communicator, value);
    return value[0];
  }

  /** A communicator of the same ranks with independent operations. */
  duplicate(communicator: bigint): bigint {
    const copy = new BigUint64Array(1);
    this.call('MPI_Comm_dup', communicator, copy);
    this.call('MPI_Comm_set_errhandler', copy[0], this.handles.errorsReturn);
    return copy[0];
  }

  get isFinalized(): boolean {
    const value = new Int32Array(1);
    this.call('MPI_Finalized', value);
    return value[0] !== 0;
  }

  #explain(code: number): string {
    const [text, length] = [Buffer.alloc(ERROR_STRING_BYTES), new Int32Array(1)];
    const isKnown = this.#functions.MPI_Error_string(code, text, length) === 0;
    return isKnown ? text.toString('utf8', 0, length[0]) : `error ${code}`;
  }
}

/** An MPI request: a handle in native memory. */
export class Request {
  readonly #mpi: Mpi;
  readonly #what: string;
  readonly #handle = new BigUint64Array(1);
  readonly #flag = new Int32Array(1);

  constructor(mpi: Mpi, name: 'MPI_Ialltoall' | 'MPI_Iallgather' | 'MPI_Ibcast', values: readonly unknown[]) {
    this.#mpi = mpi;
    this.#what = name;
    mpi.call(name, ...values, this.#handle);
  }

  get what(): string {
    return this.#what;
  }

  /** Whether the operation has finished. All running operations progress during the call. */
  test(): boolean {
    this.#mpi.call('MPI_Test', this.#handle, this.#flag, this.#mpi.handles.ignoreStatus);
    return this.#flag[0] !== 0;
  }
}
