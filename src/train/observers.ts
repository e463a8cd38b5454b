/** What a step observes of attention in its forward passes: statistics of gates and selection, and checks of both. */
import type { Batch } from '../data/batch.js';
import type { Device } from '../device/device.js';
import type { Observer } from '../model/attention.js';
import { type ModelShape, sparseLayers } from '../model/shape.js';
import { type GateStatistics, gateSums, summarizeGates } from '../ops/attention/gate/op.js';
import { type SelectionStatistics, selectionCounts, summarizeSelection } from '../ops/attention/selection-counts/op.js';
import { sampleSelection } from '../ops/attention/selection-sample/op.js';
import { forcedBlocks } from '../ops/attention/shape.js';
import type { Tensor } from '../tensor/tensor.js';
import { type AttentionStatistics, attentionStatistics } from './attention-statistics.js';

/** Statistics observed during a step. */
export interface Observed {
  /** Over all layers, heads and tokens; null for dense attention. */
  readonly gates: GateStatistics | null;
  /** Selected blocks per token; null for dense attention. */
  readonly selection: SelectionStatistics | null;
  /** By layer; null for dense attention and in steps without details. */
  readonly attention: AttentionStatistics | null;
}

/** What a step observed that collects nothing. */
export const NOTHING_OBSERVED: Observed = { gates: null, selection: null, attention: null };

/** Pairs of neighbouring tokens that the statistics of the selection are computed from. */
const SAMPLED_PAIRS = 128;

/**
 * Collects during the forward passes of one step. Nine numbers per layer stay on the device for the gates, and, if `sampled`,
 * a few kilobytes per layer for the selection of the first micro-batch.
 */
export class StepTelemetry implements Observer {
  readonly #device: Device;
  readonly #gateSums: Tensor[] = [];
  readonly #shape: ModelShape;
  readonly #isSampled: boolean;
  readonly #samples: Tensor[] = [];
  /** Indices of the layers that have gates and a selection. */
  readonly #layers: readonly number[];
  #selection: Tensor | null = null;

  constructor(device: Device, shape: ModelShape, isSampled: boolean) {
    this.#device = device;
    this.#shape = shape;
    this.#isSampled = isSampled;
    this.#layers = sparseLayers(shape);
  }

  gates(_layer: number, gates: Tensor): void {
    this.#gateSums.push(gateSums(this.#device, gates));
  }

  /** The number of selected blocks depends on sequence lengths only, so one layer stands for all. */
  selected(layer: number, selected: Tensor): void {
    const index = this.#layers.indexOf(layer);
    if (index === 0) this.#selection ??= selectionCounts(this.#device, selected);
    // Recomputed layers and later micro-batches call again: the first call of each layer counts.
    if (this.#isSampled && index === this.#samples.length)
      this.#samples.push(sampleSelection(this.#device, selected, SAMPLED_PAIRS));
  }

  /**
   * Reads what was collected. A replayed graph fills the same memory again. `detailed`: the first micro-batch, if statistics
   * by layer are wanted.
   */
  read(detailed: Batch | null): Observed {
    const sums = this.#gateSums.map((tensor) => tensor.read());
    const gates = sums.length === 0 ? null : summarizeGates(sums);
    const selection = this.#selection && summarizeSelection(this.#selection.read());
    const attention = detailed && this.#samples.length > 0 ? this.#byLayer(sums, detailed) : null;
    return { gates, selection, attention };
  }

  #byLayer(sums: readonly ArrayLike<number>[], batch: Batch): AttentionStatistics {
    const { nKvGroups: groups, nsa } = this.#shape;
    const layers = this.#samples.map((sample, i) => ({ gates: sums[i], selection: sample.read() }));
    const sampled = { groups, slots: nsa.nSel, blockSize: nsa.lSel, ...forcedBlocks(nsa) };
    const statistics = attentionStatistics(layers, sampled, batch);
    const isWhole = this.#layers.length === this.#shape.nLayers;
    return isWhole ? statistics : { ...statistics, sparse_layers: this.#layers };
  }

  free(): void {
    for (const tensor of [...this.#gateSums, ...this.#samples]) tensor.free();
    this.#selection?.free();
    this.#gateSums.length = 0;
    this.#samples.length = 0;
    this.#selection = null;
  }
}

const SUM_TOLERANCE = 1e-5;

/** Checks the invariants of gates and selections in every forward pass, then calls `next`. A violation throws. */
export function strictObserver(shape: ModelShape, next?: Observer): Observer {
  return {
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
  };
}
