/**
 * The kernels of the window branch alone, on tensor cores (CUDA, bf16): for layers that have only a window, and, with a
 * window longer than any sequence, for dense attention, the baseline that is built from the same kernels.
 */
import type { CudaCode, LaunchArgument } from '../../../device/cuda/runtime.js';
import { cudaRuntime } from '../../../device/cuda/runtime.js';
import type { Device } from '../../../device/device.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Dtype, Tensor } from '../../../tensor/tensor.js';
import { OverwrittenGradients } from '../../common/gradient-targets.js';
import type { Sequences } from '../../common/sequences.js';
import { expectShape } from '../../common/shapes.js';
import type { AttentionInputs } from '../branch.js';
import type { HeadShape } from '../shape.js';
import {
  headMacros,
  headsPerGroup,
  headsRefusal,
  packedTileBytes,
  rowLanes,
  sharedLimit,
  UNBOUNDED_WINDOW,
  windowShared,
} from './plan.js';

const WINDOW_SOURCE = new URL('./window.cu', import.meta.url);
const PREPARE_SOURCE = new URL('./dense.cu', import.meta.url);
const LARGEST_INT = 2 ** 31 - 1;

/** Which kernel computes dense attention. */
export interface DenseOptions {
  /** Minimum length of the longest sequence for the fused kernels. `Infinity` disables them. */
  readonly fusedFrom?: number;
}

/** Why the fused kernels cannot run here, as a sentence; null if they can. */
export function denseRefusal(
  problem: {
    readonly heads: HeadShape;
    readonly dtype: Dtype;
    readonly tokens: Pick<Sequences, 'total' | 'longest'>;
  },
  device: Device,
  { fusedFrom = 0 }: DenseOptions = {},
): string | null {
  const { heads, dtype, tokens } = problem;
  const cuda = cudaRuntime(device);
  if (!cuda) return `the fused kernels run on CUDA, not on ${device.kind}`;
  if (dtype !== 'bf16') return `the fused kernels take bf16, not ${dtype}`;
  if (tokens.longest < fusedFrom) return 'the fused kernels are switched off at this length';
  const refused = headsRefusal(heads);
  if (refused) return refused;
  const limit = sharedLimit(cuda.architecture);
  const needed = Math.max(...Object.values(windowShared(heads)));
  if (needed > limit) return `${needed} bytes of shared memory are needed, and this GPU has ${limit}`;
  if (tokens.total * heads.heads > LARGEST_INT) return `${tokens.total} tokens: queries are counted in 32 bits`;
  return null;
}

/** A token sees itself and the `w` - 1 tokens before it; all by default. Requires that `denseRefusal` returns null. */
export function fusedDenseAttention(
  tape: Tape,
  inputs: AttentionInputs,
  sequences: Sequences,
  w = UNBOUNDED_WINDOW,
): Tensor {
  const { q, k, v } = inputs;
  const kernels = new DenseKernels(tape.device, headsOf(inputs, sequences), sequences, w);
  const { heads, dv } = kernels.heads;
  const out = tape.empty([sequences.total, heads, dv], 'bf16');
  const lse = tape.empty([sequences.total, heads]);
  kernels.forward(tape, inputs, out, lse);
  tape.record([q, k, v], [out], [q, k, v, out, lse], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const gradients = new OverwrittenGradients(tape, [q, k, v]);
    kernels.backward(tape, inputs, { out, lse, dOut }, gradients.into);
    gradients.finish();
  });
  tape.drop(lse);
  return out;
}

class DenseKernels {
  readonly heads: HeadShape;
  readonly #sequences: Sequences;
  readonly #window: CudaCode;
  readonly #prepare: CudaCode;

  constructor(device: Device, heads: HeadShape, sequences: Sequences, w: number) {
    const cuda = cudaRuntime(device);
    if (!cuda) throw new Error('the fused attention kernels need a CUDA device');
    this.heads = heads;
    this.#sequences = sequences;
    const isDense = w >= UNBOUNDED_WINDOW;
    // Rows of dense attention take the longer the later they are. A window takes equally long everywhere.
    const macros = isDense ? { WINDOW: UNBOUNDED_WINDOW, LONGEST_FIRST: 1 } : { WINDOW: w };
    this.#window = cuda.compile(WINDOW_SOURCE, { ...headMacros(heads), ...macros });
    this.#prepare = cuda.compile(PREPARE_SOURCE, headMacros(heads));
  }

  forward(tape: Tape, { q, k, v }: AttentionInputs, out: Tensor, lse: Tensor): void {
    const packed = this.#pack(tape, k, v);
    this.#launchTiles('window_forward', q, packed, out, lse, ...this.#place);
    tape.drop(packed);
  }

  backward(
    tape: Tape,
    { q, k, v }: AttentionInputs,
    { out, lse, dOut }: Readonly<Record<'out' | 'lse' | 'dOut', Tensor>>,
    [dq, dk, dv]: readonly Tensor[],
  ): void {
    const { total } = this.#sequences;
    const { heads, groups } = this.heads;
    const [delta, shift] = [tape.empty([total, heads]), tape.empty([total, heads])];
    const grid = Math.ceil((total * heads * rowLanes(this.heads.dv)) / 256);
    this.#prepare.launch('dense_prepare', { grid, block: 256 }, dOut, out, lse, delta, shift, total);
    this.#window.launch(
      'window_backward',
      { grid: [this.#tiles(64, 1), groups], block: 128, shared: this.#window.constant('window_backward_shared') },
      ...[q, k, v, dOut, shift, delta, dk, dv, ...this.#place],
    );
    const packed = this.#pack(tape, k, v);
    this.#launchTiles('window_query_gradient', q, packed, dOut, shift, delta, dq, ...this.#place);
    for (const tensor of [packed, delta, shift]) tape.drop(tensor);
  }

  /** Packs keys and values into the layout of the tensor cores. */
  #pack(tape: Tape, k: Tensor, v: Tensor): Tensor {
    const tiles = this.#tiles(64, 1);
    const packed = tape.empty([tiles, packedTileBytes(this.heads) / 2], 'bf16');
    this.#window.launch('window_pack', { grid: [tiles, this.heads.groups], block: 256 }, k, v, packed, ...this.#place);
    return packed;
  }

  #launchTiles(name: string, ...values: LaunchArgument[]): void {
    const constant = (what: string) => this.#window.constant(`${name}_${what}`);
    const grid = [this.#tiles(constant('rows'), headsPerGroup(this.heads)), this.heads.groups] as const;
    this.#window.launch(name, { grid, block: constant('threads'), shared: constant('shared') }, ...values);
  }

  #tiles(per: number, rowsPerToken: number): number {
    return this.#sequences.lengths.reduce((total, length) => total + Math.ceil((length * rowsPerToken) / per), 0);
  }

  get #place(): [Tensor, number] {
    return [this.#sequences.offsets, this.#sequences.count];
  }
}

function headsOf({ q, k, v }: AttentionInputs, { total }: Sequences): HeadShape {
  const [, heads, dk] = expectShape('dense attention: q', q, [total, -1, -1], 'bf16');
  const [, groups] = expectShape('dense attention: k', k, [total, -1, dk], 'bf16');
  const [, , dv] = expectShape('dense attention: v', v, [total, groups, -1], 'bf16');
  return { heads, groups, dk, dv };
}
