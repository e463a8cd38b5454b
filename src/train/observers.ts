/** Observations of attention in the forward passes of a step: statistics of gates and selection, and checks of both. */
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import type { Observer } from '../model/attention.js';
import { type ModelShape, sparseLayers, sparseShapeOf } from '../model/shape.js';
import {
  type AttendedWith,
  type Coverage,
  coverageOf,
  meanCoverage,
  type SampledToken,
  tokensToCover,
} from '../ops/attention/coverage.js';
import { gateSums, summarizeGates } from '../ops/attention/gate/op.js';
import { selectionCounts, summarizeSelection } from '../ops/attention/selection-counts/op.js';
import { sampledToken, sampleSelection } from '../ops/attention/selection-sample/op.js';
import { type ForcedBlocks, forcedBlocks } from '../ops/attention/shape.js';
import type { RunMetrics } from '../run/metrics.js';
import { Tensor } from '../tensor/tensor.js';
import type { StepResult } from './step.js';

type Observed = Pick<StepResult, 'metrics' | 'attention'>;

/** The observations of a step that collects nothing. */
export const NOTHING_OBSERVED: Observed = { metrics: {}, attention: null };

/** Tokens at which the coverage of the choice is measured, on the CPU. */
const COVERED_TOKENS = 16;

/** Pairs of neighbouring tokens that the statistics of the selection are computed from. */
const SAMPLED_PAIRS = 128;

/**
 * Collects during the forward passes of a step. Nine numbers per layer stay on the device for the gates, and in a sampled
 * step a few kilobytes per layer for the selection of the first micro-batch. Usable again after `free`.
 */
export class StepTelemetry implements Observer {
  readonly #model: { readonly device: Device; readonly shape: ModelShape };
  readonly #gateSums: Tensor[] = [];
  readonly #samples: Tensor[] = [];
  /** [1] for each layer, of the first micro-batch; empty without train.scorer_loss. */
  readonly #scorerLosses: Tensor[] = [];
  /** Indices of the layers that have gates and a selection. */
  readonly #layers: readonly number[];
  /** Mean coverage of each layer in the first micro-batch of a sampled step. */
  readonly #coverages: Coverage[] = [];
  #coveredTokens: readonly SampledToken[] = [];
  #isSampled = false;
  #selection: Tensor | null = null;

  /** The number of selected blocks in the model's shape may change between steps. */
  constructor(model: { readonly device: Device; readonly shape: ModelShape }) {
    this.#model = model;
    this.#layers = sparseLayers(model.shape);
  }

  /** Before the forward passes of a step. `first`: the first micro-batch, if the host may read tensors during them. */
  begin(isSampled: boolean, first: Pick<Batch, 'cuSeqlens'> | null = null): void {
    this.#isSampled = isSampled;
    const canCover = isSampled && first !== null && this.#model.device.kind === 'cpu';
    const { shape } = this.#model;
    this.#coveredTokens = canCover ? tokensToCover(first.cuSeqlens, sparseShapeOf(shape), COVERED_TOKENS) : [];
  }

  /** Recomputed layers and later micro-batches call again: the first call of each layer counts. */
  attended(layer: number, given: AttendedWith): void {
    if (this.#coveredTokens.length === 0 || this.#layers.indexOf(layer) !== this.#coverages.length) return;
    const covered = coverageOf(given, this.#coveredTokens, sparseShapeOf(this.#model.shape));
    this.#coverages.push(meanCoverage(covered.flat()));
  }

  gates(_layer: number, gates: Tensor): void {
    this.#gateSums.push(gateSums(this.#model.device, gates));
  }

  /** The number of selected blocks depends on sequence lengths only, so one layer stands for all. */
  selected(layer: number, selected: Tensor): void {
    const index = this.#layers.indexOf(layer);
    if (index === 0) this.#selection ??= selectionCounts(this.#model.device, selected);
    // Recomputed layers and later micro-batches call again: the first call of each layer counts.
    if (this.#isSampled && index === this.#samples.length)
      this.#samples.push(sampleSelection(this.#model.device, selected, SAMPLED_PAIRS));
  }

  scorerLoss(layer: number, loss: Tensor): void {
    if (this.#layers.indexOf(layer) !== this.#scorerLosses.length) return;
    const kept = Tensor.empty(this.#model.device, loss.shape);
    kept.copyFrom(loss);
    this.#scorerLosses.push(kept);
  }

  /**
   * Reads what was collected. A replayed graph fills the same memory again. `detailed`: the first micro-batch, if statistics
   * by layer are wanted.
   */
  read(detailed: Batch | null): Observed {
    const sums = this.#gateSums.map((tensor) => tensor.read());
    const gates = sums.length === 0 ? null : summarizeGates(sums);
    const selection = this.#selection && summarizeSelection(this.#selection.read());
    const scorer = this.#scorerLosses.map((loss) => loss.item());
    const metrics: RunMetrics = {
      ...(gates && {
        gate_entropy_mean: gates.entropyMean,
        gate_entropy_min: gates.entropyMin,
        gate_max_gate: gates.max,
        gate_max_gate_mean: gates.maxMean,
        gate_collapse_frac: gates.collapseFraction,
        gate_branch_shares: gates.shares,
      }),
      ...(selection && {
        sel_k_mean: selection.mean,
        sel_k_max: selection.max,
        sel_pct_at_max: selection.percentAtMax,
      }),
      ...(scorer.length > 0 && { scorer_loss: scorer.reduce((sum, loss) => sum + loss) / scorer.length }),
    };
    const attention = detailed && this.#samples.length > 0 ? this.#byLayer(sums, scorer, detailed) : null;
    return { metrics, attention };
  }

  #byLayer(sums: readonly ArrayLike<number>[], scorer: readonly number[], batch: Batch): AttentionStatistics {
    const { nKvGroups: groups, nsa, nLayers } = this.#model.shape;
    const layers = this.#samples.map((sample, i) => ({ gates: sums[i], selection: sample.read() }));
    const sampled = { groups, slots: nsa.nSel, blockSize: nsa.lSel, ...forcedBlocks(nsa) };
    const isWhole = this.#layers.length === nLayers;
    return {
      ...attentionStatistics(layers, sampled, batch),
      ...(scorer.length > 0 && { scorer_loss: scorer.map(digits) }),
      ...(this.#coverages.length > 0 && {
        coverage: this.#coverages.map(({ chosen }) => digits(chosen)),
        coverage_forced: this.#coverages.map(({ forced }) => digits(forced)),
        coverage_best: this.#coverages.map(({ best }) => digits(best)),
      }),
      ...(!isWhole && { sparse_layers: this.#layers }),
    };
  }

  free(): void {
    for (const tensor of [...this.#gateSums, ...this.#samples, ...this.#scorerLosses]) tensor.free();
    this.#selection?.free();
    this.#gateSums.length = 0;
    this.#samples.length = 0;
    this.#scorerLosses.length = 0;
    this.#coverages.length = 0;
    this.#selection = null;
  }
}

const SUM_TOLERANCE = 1e-5;

/** Checks the invariants of gates and selections in every forward pass, then calls `next`. A violation throws. */
export function strictObserver(shape: ModelShape, next?: Observer): Observer {
  return {
    attended: (layer, attended) => next?.attended?.(layer, attended),
    gates(layer, gates) {
      const values = gates.read();
      for (let i = 0; i < values.length; i += 3) {
        const [a, b, c] = [values[i], values[i + 1], values[i + 2]];
        const sum = a + b + c;
        const isValid =
          a >= 0 && b >= 0 && c >= 0 && (shape.nsa.gate === 'sigmoid' ? sum <= 3 : Math.abs(sum - 1) < SUM_TOLERANCE);
        if (!isValid) throw new Error(`layer ${layer}: gates [${a}, ${b}, ${c}] of row ${i / 3} are not valid weights`);
      }
      next?.gates?.(layer, gates);
    },
    selected(layer, selected) {
      const [, , slots] = selected.shape;
      const blocks = selected.read();
      for (let row = 0; row < blocks.length; row += slots) {
        let previous = -1;
        for (let slot = 0; slot < slots && blocks[row + slot] >= 0; slot++) {
          if (blocks[row + slot] <= previous)
            throw new Error(
              `layer ${layer}: the selection [${blocks.slice(row, row + slots).join(', ')}] is not ascending`,
            );
          previous = blocks[row + slot];
        }
        if (shape.nsa.initBlocks > 0 && blocks[row] !== 0)
          throw new Error(`layer ${layer}: a selection does not contain block 0`);
      }
      next?.selected?.(layer, selected);
    },
    scorerLoss: (layer, loss) => next?.scorerLoss?.(layer, loss),
  };
}

/** A line of attention.jsonl. Arrays are by sparse layer; shares and overlaps are between 0 and 1. */
export interface AttentionStatistics {
  /** Indices of the layers in the arrays, if others have only a window (`model.layer_pattern`); absent if all are. */
  readonly sparse_layers?: readonly number[];
  /** Mean entropy of the gates in nats. */
  readonly entropy: readonly number[];
  /** Share of (token, head) rows whose gate has collapsed. */
  readonly collapse: readonly number[];
  /** Mean share of the compressed branch. */
  readonly cmp: readonly number[];
  /** Mean share of the selected branch. */
  readonly sel: readonly number[];
  /** Mean share of the window branch. */
  readonly win: readonly number[];
  /** Share of selected blocks that every token reads: by default the first, the previous and its own. */
  readonly forced: readonly number[];
  /** Share of a token's blocks that the previous token selected too. */
  readonly neighbours: readonly number[];
  /** Entry i: share of the blocks of sparse layer i + 1 that sparse layer i selected too, for the same token and group. */
  readonly layers: readonly number[];
  /** [layer][bin]: selected blocks by distance. Bin 0: the own block; bin b: 2^(b-1) to 2^b - 1 blocks back. */
  readonly distance: readonly (readonly number[])[];
  /** Mean scorer loss in nats; absent without `train.scorer_loss`. */
  readonly scorer_loss?: readonly number[];
  /**
   * Share of the attention of 16 tokens that their selected blocks cover (ops/attention/coverage.ts); absent on a GPU and
   * in batches where every token reads all of its blocks.
   */
  readonly coverage?: readonly number[];
  /** The same for the forced blocks alone, and for the best choice of as many blocks. */
  readonly coverage_forced?: readonly number[];
  readonly coverage_best?: readonly number[];
}

/** Statistics collected for one layer in the first micro-batch of a step. */
export interface LayerSample {
  /** Result of `gateSums`. */
  readonly gates: ArrayLike<number>;
  /** Result of `sampleSelection`, [pairs, 2, G, n]. */
  readonly selection: ArrayLike<number>;
}

export interface SampleShape extends ForcedBlocks {
  readonly groups: number;
  /** Blocks per token and group. */
  readonly slots: number;
  /** Tokens per block. */
  readonly blockSize: number;
}

export function attentionStatistics(
  layers: readonly LayerSample[],
  shape: SampleShape,
  { cuSeqlens, inputs }: Pick<Batch, 'cuSeqlens' | 'inputs'>,
): AttentionStatistics {
  const { groups, slots, blockSize } = shape;
  const { initBlocks, localBlocks } = forcedBlocks(shape);
  const gates = layers.map((layer) => summarizeGates([layer.gates]));
  const width = groups * slots;
  const pairs = (layers[0]?.selection.length ?? 0) / (2 * width);
  const blocksOf = ({ selection }: LayerSample, row: number): number[] => {
    const blocks: number[] = [];
    for (let i = row * slots; i < (row + 1) * slots && selection[i] >= 0; i++) blocks.push(selection[i]);
    return blocks;
  };
  const sampled = layers.map((layer, l) => {
    const distance: number[] = [];
    let [total, forced, compared, same, above, shared] = [0, 0, 0, 0, 0, 0];
    for (let pair = 0; pair < pairs; pair++) {
      const token = sampledToken(pair, pairs, inputs.length);
      const start = sequenceStart(cuSeqlens, token);
      const own = Math.floor((token - start) / blockSize);
      for (let group = 0; group < groups; group++) {
        const row = (2 * pair + 1) * groups + group;
        const blocks = blocksOf(layer, row);
        total += blocks.length;
        for (const block of blocks) {
          const bin = block >= own ? 0 : Math.floor(Math.log2(own - block)) + 1;
          while (distance.length <= bin) distance.push(0);
          distance[bin] += 1;
          forced += Number(block < initBlocks || block > own - localBlocks);
        }
        // The first token of a sequence has no neighbour in it.
        if (token > start) {
          compared += blocks.length;
          same += common(blocks, blocksOf(layer, 2 * pair * groups + group));
        }
        if (l > 0) {
          above += blocks.length;
          shared += common(blocks, blocksOf(layers[l - 1], row));
        }
      }
    }
    return { distance, forced: share(forced, total), neighbours: share(same, compared), below: share(shared, above) };
  });
  return {
    entropy: gates.map(({ entropyMean }) => digits(entropyMean)),
    collapse: gates.map(({ collapseFraction }) => digits(collapseFraction)),
    cmp: gates.map(({ shares }) => digits(shares[0])),
    sel: gates.map(({ shares }) => digits(shares[1])),
    win: gates.map(({ shares }) => digits(shares[2])),
    forced: sampled.map(({ forced }) => forced),
    neighbours: sampled.map(({ neighbours }) => neighbours),
    layers: sampled.slice(1).map(({ below }) => below),
    distance: sampled.map(({ distance }) => distance),
  };
}

/** The first token of the sequence that holds `token`. */
function sequenceStart(cuSeqlens: ArrayLike<number>, token: number): number {
  let start = 0;
  for (let i = 0; i < cuSeqlens.length && cuSeqlens[i] <= token; i++) start = cuSeqlens[i];
  return start;
}

/** How many elements two ascending lists share. */
function common(a: readonly number[], b: readonly number[]): number {
  let [count, j] = [0, 0];
  for (const value of a) {
    while (j < b.length && b[j] < value) j++;
    count += Number(b[j] === value);
  }
  return count;
}

function share(part: number, whole: number): number {
  return whole === 0 ? 0 : digits(part / whole);
}

function digits(value: number): number {
  return Number(value.toFixed(4));
}
