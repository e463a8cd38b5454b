/**
 * The forward pass of the fused attention core, kernel by kernel: keys are packed into tiles, the compressed branch
 * gives output and log-sum-exp, blocks are ranked, the lists of the tokens that chose each block are built, and the
 * selected branch ends with the gated sum of all three, unless the window branch has queries and a kernel of its own.
 * The host never waits: the device decides which path the selected branch takes.
 */
import { f32 } from '../../../device/cuda/runtime.js';
import type { Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import type { SparseInputs } from '../nsa.js';
import type { FusedBatch } from './code.js';
import { packedTileBytes, rowLanes } from './plan.js';

/** How the selected branch reads keys: `adaptive` lets the device choose by how much neighbouring tokens agree. */
export const SELECTED_PATHS = ['adaptive', 'union', 'outer', 'gather'] as const;
/** Kernel paths of the selected branch. */
export type SelectedPath = (typeof SELECTED_PATHS)[number];

/** The constants of plan.cuh. */
const CHOICE: Record<SelectedPath, number> = { adaptive: 0, union: 1, outer: 2, gather: 3 };

/** Outputs, and what the backward pass reads. */
export interface ForwardResults {
  readonly out: Tensor;
  readonly oCmp: Tensor;
  readonly oSel: Tensor;
  readonly oWin: Tensor;
  readonly selected: Tensor;
  readonly lseCmp: Tensor;
  readonly lseSel: Tensor;
  readonly lseWin: Tensor;
  readonly lists: Tensor;
  /** Where each list begins, then where its backward work items do. */
  readonly offsets: Tensor;
  readonly backwardItems: Tensor;
}

/** Memory that only the forward pass needs. */
export interface ForwardScratch {
  readonly packedCmp: Tensor;
  readonly packedSel: Tensor;
  readonly packedWin: Tensor;
  /** Choices per (list, stretch), and the rank of each choice in it. */
  readonly counts: Tensor;
  readonly ranks: Tensor;
  readonly begins: Tensor;
  readonly places: Tensor;
  readonly totals: Tensor;
  readonly schedule: Tensor;
  /** Bits of the largest magnitude of the values of each (selection block, group). */
  readonly largest: Tensor;
  readonly forwardItems: Tensor;
  /** Null if KV-outer does not run. */
  readonly partial: Tensor | null;
  readonly partialLse: Tensor | null;
}

/** Results that depend on the compressed keys: the only part whose cost grows with the square of the length. */
export type Ranked = Pick<ForwardResults, 'oCmp' | 'lseCmp' | 'selected'> & Pick<ForwardScratch, 'counts' | 'ranks'>;

export function allocateRanked(tape: Tape, { plan, shape }: FusedBatch): Ranked {
  const { heads, groups, dv } = shape.heads;
  return {
    oCmp: tape.empty([plan.tokens, heads, dv], 'bf16'),
    lseCmp: tape.empty([plan.tokens, heads]),
    selected: tape.empty([plan.tokens, groups, shape.sparse.nSel], 'i32'),
    counts: tape.empty([plan.lists, plan.stretches], 'i32'),
    ranks: tape.empty([plan.choices], 'i32'),
  };
}

export function allocateResults(tape: Tape, { plan, shape }: FusedBatch, ranked: Ranked): ForwardResults {
  const { heads, dv } = shape.heads;
  const { oCmp, lseCmp, selected } = ranked;
  const output = () => tape.empty([plan.tokens, heads, dv], 'bf16');
  const lse = () => tape.empty([plan.tokens, heads]);
  return {
    out: output(),
    oCmp,
    oSel: output(),
    oWin: output(),
    selected,
    lseCmp,
    lseSel: lse(),
    lseWin: lse(),
    lists: tape.empty([plan.choices], 'i32'),
    offsets: tape.empty([2, plan.lists + 1], 'i32'),
    backwardItems: tape.empty([plan.backwardItems, 2], 'i32'),
  };
}

export function allocateScratch(
  tape: Tape,
  batch: FusedBatch,
  path: SelectedPath,
  { counts, ranks }: Ranked,
): ForwardScratch {
  const { plan, shape } = batch;
  const tile = packedTileBytes(shape.heads) / 2;
  const perStretch = () => tape.empty([plan.lists, plan.stretches], 'i32');
  const partials = batch.mayUseOuter(path);
  return {
    packedCmp: tape.empty([plan.compressedTiles, tile], 'bf16'),
    packedSel: tape.empty([plan.blocks, tile], 'bf16'),
    packedWin: tape.empty([plan.tokenTiles(64), tile], 'bf16'),
    counts,
    ranks,
    begins: perStretch(),
    places: perStretch(),
    totals: tape.empty([plan.lists], 'i32'),
    schedule: tape.empty([batch.constant('select', 'select_plan_words')], 'i32'),
    largest: tape.empty([plan.blocks, batch.groups], 'i32'),
    forwardItems: tape.empty([plan.forwardItems, 2], 'i32'),
    partial: partials ? tape.empty([plan.partialRows, shape.heads.dv], 'bf16') : null,
    partialLse: partials ? tape.empty([plan.partialRows]) : null,
  };
}

export class FusedForward {
  readonly batch: FusedBatch;
  readonly inputs: SparseInputs;
  readonly results: ForwardResults;
  readonly scratch: ForwardScratch;
  /** Only tokens from here on are computed (and some before them); above 0 for a batch of one sequence. */
  readonly #start: number;

  constructor(batch: FusedBatch, inputs: SparseInputs, results: ForwardResults, scratch: ForwardScratch, start = 0) {
    this.batch = batch;
    this.inputs = inputs;
    this.results = results;
    this.scratch = scratch;
    this.#start = start;
  }

  /** All of it for the tokens from the start on, forward only: one path, and no lists of tokens. */
  attendFrom(): void {
    this.results.selected.zero(); // a tile of the selected branch may begin before the tokens that were ranked
    this.rank();
    this.packSelected();
    this.packWindow();
    this.#union(null, null);
    if (this.inputs.qWin) this.#windowApart();
  }

  /** Attends to the compressed keys and ranks blocks: `attend` needs it. */
  rank(): void {
    this.packCompressed();
    this.compressed();
    this.select();
  }

  /** The rest, in the order that the kernels need. `served` counts on the device which path ran. */
  attend(path: SelectedPath, options: { readonly sorted: boolean; readonly served: Tensor | null }): void {
    this.packSelected();
    this.packWindow();
    this.index(path);
    if (options.sorted) this.sort();
    this.selected(path, options.served);
    if (this.inputs.qWin) this.#windowApart();
  }

  packCompressed(): void {
    this.batch.packCompressed(this.inputs.kCmp, this.inputs.vCmp, this.scratch.packedCmp);
  }

  packSelected(): void {
    const { packedSel, largest } = this.scratch;
    this.batch.packSelected(this.inputs.kSel, this.inputs.vSel, packedSel, largest);
  }

  packWindow(): void {
    this.batch.packWindow(this.inputs.kWin, this.inputs.vWin, this.scratch.packedWin);
  }

  compressed(): void {
    const { batch, results } = this;
    const { oCmp, lseCmp } = results;
    const constant = (name: string) => batch.constant('compressed', `compressed_forward_${name}`);
    // Ranking reads what this computes, from the beginning of its first tile on.
    const first = this.#start - (this.#start % batch.constant('select', 'select_blocks_tokens'));
    const skipped = Math.floor((first * batch.headsPerGroup) / constant('rows'));
    const tiles = { skipped, perBlock: constant('tiles') };
    batch.launchTilesFrom(
      ...(['compressed', 'compressed_forward', tiles, this.inputs.q, this.scratch.packedCmp] as const),
      ...[oCmp, lseCmp, batch.tokenStarts, batch.sequences, skipped],
    );
  }

  /** The window branch alone: kernels of the selected branch include it, unless it has queries of its own. */
  window(): void {
    const { batch, inputs, results } = this;
    const { oWin, lseWin } = results;
    const skipped = Math.floor((this.#start * batch.headsPerGroup) / batch.constant('window', 'window_forward_rows'));
    batch.launchTilesFrom(
      ...(['window', 'window_forward', { skipped, perBlock: 1 }, inputs.qWin ?? inputs.q] as const),
      ...[this.scratch.packedWin, oWin, lseWin, batch.tokenStarts, batch.sequences, skipped],
    );
  }

  /** The window branch with queries of its own, and the gated sum. */
  #windowApart(): void {
    const { batch, inputs, results } = this;
    this.window();
    const total = batch.plan.tokens;
    const rows = (total - this.#start) * batch.shape.heads.heads;
    const grid = Math.ceil((rows * rowLanes(batch.shape.heads.dv)) / 256);
    const tensors = [results.oCmp, results.oSel, results.oWin, inputs.gates, results.out];
    batch.launch(
      ...(['combine', 'combine_forward', { grid, block: 256 }] as const),
      ...[...tensors.map((tensor) => tensor.rows(this.#start, total)), total - this.#start],
    );
  }

  /** The gated sum as the kernels of the selected branch compute it; null where it is left to `combine_forward`. */
  get #combined(): Tensor | null {
    return this.inputs.qWin ? null : this.results.out;
  }

  /** Ranks blocks, and counts the tokens that chose each. */
  select(): void {
    const { batch, inputs, scratch, results } = this;
    const { plan } = batch;
    const tile = batch.constant('select', 'select_blocks_tokens');
    const skipped = Math.floor(this.#start / tile);
    const counts = this.#start > 0 ? null : scratch.counts;
    counts?.zero();
    batch.launch(
      'select',
      'select_blocks',
      {
        grid: [plan.tokenTiles(tile) - skipped, batch.groups],
        block: batch.constant('select', 'select_blocks_threads'),
        shared: batch.constant('select', 'select_blocks_shared'),
      },
      ...[inputs.q, inputs.kCmp, scratch.packedCmp, results.lseCmp, results.selected, counts, scratch.ranks],
      ...[batch.tokenStarts, batch.compressedStarts, batch.blockStarts, batch.sequences, plan.stretch, plan.stretches],
      skipped,
    );
  }

  /**
   * From counts and ranks: the list of every block, the work items of both passes, and, unless the path is `union`,
   * which kernel works on which stretch of tokens, by the mean union of its tiles.
   */
  index(path: SelectedPath): void {
    const { batch, scratch, results } = this;
    const { plan, blockStarts, tokenStarts, sequences } = batch;
    const { counts, begins, totals, places, schedule, forwardItems, ranks } = scratch;
    const { offsets, backwardItems, selected, lists } = results;
    const launch = batch.launch.bind(batch, 'select');
    const perList = Math.ceil(plan.lists / 8);
    schedule.zero();
    const counted = [counts, begins, totals, places, schedule] as const;
    launch('select_totals', { grid: perList, block: 256 }, ...counted, blockStarts, sequences, plan.stretches);
    launch(
      'select_index',
      { grid: 1, block: 1024 },
      ...[totals, offsets, schedule, tokenStarts, blockStarts, sequences, plan.stretches],
    );
    const tiles = plan.tokenTiles(batch.constant('select', 'select_union_tokens')) * batch.groups;
    const choosers = path === 'union' ? 0 : Math.ceil(tiles / 8);
    launch(
      'select_finish',
      { grid: choosers + perList + Math.ceil(plan.choices / 256), block: 256, shared: 8 * plan.words * 4 },
      ...[selected, ranks, offsets, begins, places, schedule, forwardItems, backwardItems, lists],
      ...[tokenStarts, blockStarts, sequences, plan.words, plan.stretch, plan.stretches],
      ...[CHOICE[path], f32(batch.limits.union), f32(batch.limits.gather), choosers, perList],
    );
  }

  /** Sorts lists by token: they are filled in the nondeterministic order in which thread blocks run. */
  sort(): void {
    const { batch, results } = this;
    const { plan } = batch;
    batch.launch(
      'select',
      'select_sort',
      { grid: [plan.blocks, batch.groups], block: 256, shared: 4 * Math.ceil(plan.longest / 32) },
      ...[results.selected, results.offsets, results.lists, batch.tokenStarts, batch.blockStarts, batch.sequences],
    );
  }

  /** The selected and the window branch, and the gated sum. */
  selected(path: SelectedPath, served: Tensor | null): void {
    const { batch } = this;
    if (path === 'union') {
      this.#union(null, served);
      return;
    }
    this.#dense();
    if (path === 'adaptive') this.#union(this.scratch.schedule, served);
    if (batch.mayUseOuter(path)) this.#outer(served);
    if (path === 'gather' || (path === 'adaptive' && batch.limits.gather > 0)) this.#gather(served);
  }

  /**
   * The window branch; then the tokens of a tile share one stream over the union of their blocks. Without a schedule it
   * works on all tokens.
   */
  #union(schedule: Tensor | null, served: Tensor | null): void {
    const { batch, inputs, results, scratch } = this;
    const { plan } = batch;
    const constant = (name: string) => batch.constant('selected', `selected_union_${name}`);
    const skipped = Math.floor(this.#start / constant('tokens'));
    batch.launch(
      'selected',
      'selected_union',
      {
        grid: [plan.tokenTiles(constant('tokens')) - skipped, batch.groups],
        block: constant('threads'),
        shared: constant('shared') + plan.words * 4,
      },
      ...[inputs.q, scratch.packedSel, scratch.packedWin, results.selected, results.oCmp, inputs.gates],
      ...[results.oSel, results.lseSel, results.oWin, results.lseWin, this.#combined, schedule, served],
      ...[batch.tokenStarts, batch.sequences, plan.words, plan.stretch, skipped],
    );
  }

  /** For the stretches of KV-outer and tile-gather: the window branch, and the forced blocks with the same queries. */
  #dense(): void {
    const { batch, inputs, results, scratch } = this;
    const { oSel, lseSel, oWin, lseWin } = results;
    batch.launchTiles(
      'selected',
      'selected_dense',
      ...[inputs.q, scratch.packedSel, scratch.packedWin, oSel, lseSel, oWin, lseWin],
      ...[scratch.schedule, batch.tokenStarts, batch.sequences, batch.plan.stretch],
    );
  }

  /** Each chosen block over its list: partial results, merged in the same kernel. */
  #outer(served: Tensor | null): void {
    const { batch, inputs, results, scratch } = this;
    const { plan, tokenStarts, blockStarts, sequences } = batch;
    const { oSel, lseSel } = results;
    batch.launch(
      'selected',
      'selected_outer',
      {
        grid: batch.multiprocessors * batch.constant('selected', 'selected_outer_blocks'),
        block: 128,
        shared: batch.constant('selected', 'selected_outer_shared'),
      },
      ...[inputs.q, scratch.packedSel, scratch.forwardItems, results.offsets, scratch.begins, results.lists],
      ...[scratch.partial, scratch.partialLse, results.oCmp, results.oWin, inputs.gates, oSel, lseSel, this.#combined],
      ...[scratch.schedule, served, tokenStarts, blockStarts, sequences, plan.stretch, plan.stretches],
    );
  }

  /** The tokens of a block share a stream over the union of their chosen blocks, with sums in shared memory. */
  #gather(served: Tensor | null): void {
    const { batch, inputs, results, scratch } = this;
    const { plan, tokenStarts, sequences } = batch;
    const constant = (name: string) => batch.constant('selected', `selected_gather_${name}`);
    batch.launch(
      'selected',
      'selected_gather',
      { grid: [plan.blocks, batch.groups], block: constant('threads'), shared: constant('shared') },
      ...[inputs.q, scratch.packedSel, results.selected, results.oCmp, results.oWin, inputs.gates, scratch.largest],
      ...[results.oSel, results.lseSel, this.#combined],
      ...[scratch.schedule, served, tokenStarts, sequences, plan.stretch],
    );
  }
}
