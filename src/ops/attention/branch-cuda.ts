/** Launches of the branch kernels: branch.cuh and the cuda.cu of each branch. */
import type { CudaCode, CudaRuntime, LaunchArgument, LaunchShape } from '../../device/cuda/runtime.js';
import type { Addressable, StructArgument } from '../../device/device.js';
import type { AttentionArguments } from './branch.js';

/** Rows, keys and columns of a tile: TILE, STRIDE and THREADS of branch.cuh. */
export const TILE = 64;
const STRIDE = 68;
const THREADS = 256;
/** FORWARD_BUFFERS and BACKWARD_BUFFERS of branch.cuh. */
const FORWARD_BUFFERS = 3;
const BACKWARD_BUFFERS = 4;
/**
 * Blocks for each multiprocessor. More than it holds at once: they take turns over the tiles, whose work differs, and a
 * multiprocessor that is done early gets the next.
 */
const BLOCKS = 16;

/**
 * The code for the element type of `q` and these head sizes. Few variants cover all sizes: columns are processed in
 * chunks.
 */
export function branchCode(cuda: CudaRuntime, source: URL, q: Addressable | null, dk: number, dv: number): CudaCode {
  return cuda.compile(source, {
    ELEMENT: q?.dtype ?? 'f32',
    KEY_CHUNKS: Math.ceil(dk / TILE),
    VALUE_CHUNKS: Math.ceil(dv / TILE),
    FOURS: dk % 4 === 0 && dv % 4 === 0 ? 1 : 0,
  });
}

export function branchLaunch(cuda: CudaRuntime, { buffers = FORWARD_BUFFERS, blocks = BLOCKS } = {}): LaunchShape {
  const shared = buffers * TILE * STRIDE * Float32Array.BYTES_PER_ELEMENT;
  return { grid: cuda.multiprocessors * blocks, block: THREADS, shared };
}

/** The three kernels that ATTENTION_KERNELS(name, …) in branch.cuh defines; `extra` are the branch's own parameters. */
export class BranchKernels {
  readonly #cuda: CudaRuntime;
  readonly #source: URL;
  readonly #name: string;

  constructor(cuda: CudaRuntime, source: URL, name: string) {
    this.#cuda = cuda;
    this.#source = source;
    this.#name = name;
  }

  forward(struct: StructArgument, ...extra: LaunchArgument[]): void {
    const { q, k, v, offsets, keyOffsets, out, lse, ...given } = argumentsOf(struct);
    const { sequences, heads, groups, dk, dv } = given;
    branchCode(this.#cuda, this.#source, q, dk, dv).launch(
      `${this.#name}_forward`,
      branchLaunch(this.#cuda),
      ...[q, k, v, offsets, keyOffsets, out, lse, sequences, heads, groups, dk, dv, ...extra],
    );
  }

  backward(struct: StructArgument, ...extra: LaunchArgument[]): void {
    const { q, k, v, offsets, keyOffsets, out, lse, dOut, ...given } = argumentsOf(struct);
    const { sequences, heads, groups, dk, dv, accumulateQ, accumulateK, accumulateV } = given;
    const inputs = [q, k, v, offsets, keyOffsets, out, lse, dOut] as const;
    const sizes = [sequences, heads, groups, dk, dv] as const;
    const code = branchCode(this.#cuda, this.#source, q, dk, dv);
    const shape = branchLaunch(this.#cuda, { buffers: BACKWARD_BUFFERS });
    code.launch(`${this.#name}_backward_queries`, shape, ...[...inputs, given.dq, ...sizes, accumulateQ, ...extra]);
    code.launch(
      `${this.#name}_backward_keys`,
      shape,
      ...[...inputs, given.dKeys, given.dValues, ...sizes, accumulateK, accumulateV, ...extra],
    );
  }
}

/** `attendBranch` builds every struct that reaches these kernels. */
function argumentsOf(struct: StructArgument): AttentionArguments {
  return struct as unknown as AttentionArguments;
}
