/** Launches of the portable attention kernels (plain.cu beside each operation, src/device/cuda/plain.cuh). */
import type { CudaCode, CudaRuntime, LaunchArgument, LaunchShape } from '../../device/cuda/runtime.js';
import type { Addressable } from '../../device/device.js';

/** Rows, keys and columns of a tile: TILE, STRIDE and THREADS of plain.cuh. */
export const TILE = 64;
const STRIDE = 68;
const THREADS = 256;
/** FORWARD_BUFFERS and BACKWARD_BUFFERS of plain.cuh. */
const FORWARD_BUFFERS = 3;
const BACKWARD_BUFFERS = 4;
/**
 * Blocks for each multiprocessor. More than it holds at once: they take turns over the tiles, whose work differs, and a
 * multiprocessor that is done early gets the next.
 */
const BLOCKS = 16;

/** The code for the element type of `q` and these head sizes. Few variants serve all sizes: columns come in chunks. */
export function plainCode(cuda: CudaRuntime, source: URL, q: Addressable | null, dk: number, dv: number): CudaCode {
  return cuda.compile(source, {
    ELEMENT: q?.dtype ?? 'f32',
    KEY_CHUNKS: Math.ceil(dk / TILE),
    VALUE_CHUNKS: Math.ceil(dv / TILE),
    FOURS: dk % 4 === 0 && dv % 4 === 0 ? 1 : 0,
  });
}

export function plainShape(cuda: CudaRuntime, { buffers = FORWARD_BUFFERS, blocks = BLOCKS } = {}): LaunchShape {
  const shared = buffers * TILE * STRIDE * Float32Array.BYTES_PER_ELEMENT;
  return { grid: cuda.multiprocessors * blocks, block: THREADS, shared };
}

type Memory = Addressable | null;

interface Common {
  readonly q: Memory;
  readonly k: Memory;
  readonly v: Memory;
  readonly offsets: Memory;
  readonly keyOffsets: Memory;
  readonly out: Memory;
  readonly lse: Memory;
  readonly sequences: number;
  readonly heads: number;
  readonly groups: number;
  readonly dk: number;
  readonly dv: number;
}

interface Backward extends Common {
  readonly dOut: Memory;
  readonly dq: Memory;
  readonly dKeys: Memory;
  readonly dValues: Memory;
  /** Accumulate flags of dq, dKeys and dValues. */
  readonly flags: readonly [number, number, number];
}

/** The three kernels that ATTENTION_KERNELS(name, …) defines; `also` are the operation's own parameters. */
export class PlainAttention {
  readonly #cuda: CudaRuntime;
  readonly #source: URL;
  readonly #name: string;

  constructor(cuda: CudaRuntime, source: URL, name: string) {
    this.#cuda = cuda;
    this.#source = source;
    this.#name = name;
  }

  forward(given: Common, ...also: LaunchArgument[]): void {
    const { q, k, v, offsets, keyOffsets, out, lse, sequences, heads, groups, dk, dv } = given;
    const inputs = [q, k, v, offsets, keyOffsets] as const;
    plainCode(this.#cuda, this.#source, q, dk, dv).launch(
      `${this.#name}_forward`,
      plainShape(this.#cuda),
      ...[...inputs, out, lse, sequences, heads, groups, dk, dv, ...also],
    );
  }

  backward(given: Backward, ...also: LaunchArgument[]): void {
    const { q, k, v, offsets, keyOffsets, out, lse, dOut, sequences, heads, groups, dk, dv } = given;
    const inputs = [q, k, v, offsets, keyOffsets, out, lse, dOut] as const;
    const sizes = [sequences, heads, groups, dk, dv] as const;
    const [accumulateQ, accumulateK, accumulateV] = given.flags;
    const code = plainCode(this.#cuda, this.#source, q, dk, dv);
    const shape = plainShape(this.#cuda, { buffers: BACKWARD_BUFFERS });
    code.launch(`${this.#name}_backward_queries`, shape, ...[...inputs, given.dq, ...sizes, accumulateQ, ...also]);
    code.launch(
      `${this.#name}_backward_keys`,
      shape,
      ...[...inputs, given.dKeys, given.dValues, ...sizes, accumulateK, accumulateV, ...also],
    );
  }
}
