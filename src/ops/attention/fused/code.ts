/** The compiled kernels of the fused attention core for one shape, and what one batch needs to launch them. */
import type { CudaCode, CudaRuntime, KernelMacros, LaunchArgument, LaunchShape } from '../../../device/cuda/runtime.js';
import { UsageError } from '../../../errors.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { Sequences } from '../../common/sequences.js';
import type { SelectedPath } from './forward.js';
import {
  type BatchPlan,
  type FusedBuild,
  type FusedShape,
  fusedMacros,
  gatherRefusal,
  hasJoint,
  headsPerGroup,
  isAlwaysUnion,
  mayUseOuter,
  planBatch,
  type SelectedLimits,
  selectedLimits,
  sharedLimit,
  unionTokens,
} from './plan.js';

type Source = 'compressed' | 'select' | 'selected' | 'window' | 'combine' | 'joint' | 'scorer';

const SOURCES: Readonly<Record<Source, URL>> = {
  compressed: new URL('./compressed.cu', import.meta.url),
  select: new URL('./select.cu', import.meta.url),
  selected: new URL('./selected.cu', import.meta.url),
  window: new URL('./window.cu', import.meta.url),
  combine: new URL('./combine.cu', import.meta.url),
  joint: new URL('./joint.cu', import.meta.url),
  scorer: new URL('./scorer.cu', import.meta.url),
};

/** One batch: compiled code, counts, and the sequence offsets on the device. */
export class FusedBatch {
  readonly shape: FusedShape;
  readonly build: FusedBuild;
  readonly plan: BatchPlan;
  readonly multiprocessors: number;
  /** Blocks of the mean union up to which tile-union and, above it, tile-gather is used. */
  readonly limits: SelectedLimits;
  readonly #gatherRefusal: string | null;
  /** cu_seqlens in tokens, in compressed keys and in selection blocks. */
  readonly tokenStarts: Tensor;
  readonly compressedStarts: Tensor;
  readonly blockStarts: Tensor;
  readonly sequences: number;
  readonly #code: Readonly<Record<Source, CudaCode | null>>;

  constructor(cuda: CudaRuntime, shape: FusedShape, build: FusedBuild, tokens: Sequences) {
    const union = unionTokens(shape, build, sharedLimit(cuda.architecture));
    const macros = fusedMacros(shape, build, union);
    const compile = (source: Source, more: KernelMacros = {}) => cuda.compile(SOURCES[source], { ...macros, ...more });
    const withoutWindow = build.windowApart ? { WINDOW: 0 } : {};
    this.#code = {
      compressed: compile('compressed', withoutWindow),
      select: compile('select'),
      selected: compile('selected', withoutWindow),
      window: compile('window'),
      combine: compile('combine'),
      joint: hasJoint(shape, build, cuda.architecture) ? compile('joint', withoutWindow) : null,
      scorer: build.scored ? compile('scorer') : null,
    };
    this.shape = shape;
    this.build = build;
    this.multiprocessors = cuda.multiprocessors;
    this.#gatherRefusal = gatherRefusal(shape, build, cuda.architecture, tokens.longest);
    this.limits = selectedLimits(shape, union, this.#gatherRefusal === null);
    this.tokenStarts = tokens.offsets;
    this.compressedStarts = tokens.compressed(shape.sparse).offsets;
    this.blockStarts = tokens.inBlocks(shape.sparse.lSel).offsets;
    this.sequences = tokens.count;
    this.plan = planBatch(tokens.lengths, shape);
  }

  /** The path of this batch: of short sequences the host knows what the device would choose. */
  pathOf(path: SelectedPath): SelectedPath {
    if (path === 'gather' && this.#gatherRefusal !== null) throw new UsageError(this.#gatherRefusal);
    const isKnown = path === 'adaptive' && isAlwaysUnion(this.shape, this.limits.union, this.plan.longest);
    return isKnown ? 'union' : path;
  }

  mayUseOuter(path: SelectedPath): boolean {
    return mayUseOuter(path, this.shape, this.limits, this.plan.longest);
  }

  /** Whether one kernel can compute all gradients of the compressed and the window branch. */
  get hasJoint(): boolean {
    return this.#code.joint !== null;
  }
  get groups(): number {
    return this.shape.heads.groups;
  }
  /** Rows (token, head). */
  get rows(): number {
    return this.plan.tokens * this.shape.heads.heads;
  }
  get headsPerGroup(): number {
    return headsPerGroup(this.shape.heads);
  }

  /** Read from the compiled code once. */
  constant(source: Source, name: string): number {
    return this.#compiled(source).constant(name);
  }

  launch(source: Source, name: string, shape: LaunchShape, ...values: LaunchArgument[]): void {
    this.#compiled(source).launch(name, shape, ...values);
  }

  #compiled(source: Source): CudaCode {
    const code = this.#code[source];
    if (!code) throw new Error(`${source}.cu is not for this shape or GPU`);
    return code;
  }

  /** A kernel that streams keys past tiles of rows: its EXPORTs give rows, threads and shared memory. */
  launchTiles(source: Source, name: string, ...values: LaunchArgument[]): void {
    this.launchTilesFrom(source, name, { skipped: 0, perBlock: 1 }, ...values);
  }

  /** The same for the tiles from number `skipped` on, several for each thread block. */
  launchTilesFrom(
    source: Source,
    name: string,
    { skipped, perBlock }: { readonly skipped: number; readonly perBlock: number },
    ...values: LaunchArgument[]
  ): void {
    const constant = (what: string) => this.constant(source, `${name}_${what}`);
    const tiles = this.plan.rowTiles(constant('rows')) - skipped;
    const grid = [Math.ceil(tiles / perBlock), this.groups] as const;
    this.launch(source, name, { grid, block: constant('threads'), shared: constant('shared') }, ...values);
  }

  packCompressed(keys: Tensor, values: Tensor, packed: Tensor): void {
    const shape = { grid: [this.plan.compressedTiles, this.groups], block: 256 } as const;
    this.launch('compressed', 'compressed_pack', shape, keys, values, packed, this.compressedStarts, this.sequences);
  }

  /** `largest`: for the largest magnitude of each block's values, which tile-gather reads. */
  packSelected(keys: Tensor, values: Tensor, packed: Tensor, largest: Tensor): void {
    const shape = { grid: [this.plan.blocks, this.groups], block: 256 } as const;
    this.launch('selected', 'selected_pack', shape, keys, values, packed, largest, this.tokenStarts, this.sequences);
  }

  packWindow(keys: Tensor, values: Tensor, packed: Tensor): void {
    const shape = { grid: [this.plan.tokenTiles(64), this.groups], block: 256 } as const;
    this.launch('window', 'window_pack', shape, keys, values, packed, this.tokenStarts, this.sequences);
  }
}
