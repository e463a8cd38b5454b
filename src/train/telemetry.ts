/** What a step tells about its attention: gates over all layers and heads, and how many blocks were selected. */
import type { Device } from '../device/device.js';
import type { Observer } from '../model/attention.js';
import { type GateStatistics, gateSums, summarizeGates } from '../ops/attention/gate/op.js';
import { type SelectionStatistics, selectionCounts, summarizeSelection } from '../ops/attention/selection-counts/op.js';
import type { Tensor } from '../tensor/tensor.js';

export interface Observed {
  readonly gates: GateStatistics | null;
  readonly selection: SelectionStatistics | null;
}

/** Collects during the forward passes of one step; gates leave only nine numbers per layer behind. */
export class StepTelemetry implements Observer {
  readonly #device: Device;
  readonly #gateSums: Tensor[] = [];
  #selection: Tensor | null = null;

  constructor(device: Device) {
    this.#device = device;
  }

  gates(_layer: number, gates: Tensor): void {
    this.#gateSums.push(gateSums(this.#device, gates));
  }

  /** Lengths decide how many blocks a token has, so one layer speaks for all. */
  selected(layer: number, selected: Tensor): void {
    if (layer === 0) this.#selection ??= selectionCounts(this.#device, selected);
  }

  /** Reads what was collected: null where nothing was seen (dense attention). A graph's replay fills it anew. */
  read(): Observed {
    const sums = this.#gateSums.map((tensor) => tensor.read());
    const gates = sums.length === 0 ? null : summarizeGates(sums);
    return { gates, selection: this.#selection && summarizeSelection(this.#selection.read()) };
  }

  free(): void {
    for (const tensor of this.#gateSums) tensor.free();
    this.#selection?.free();
    this.#gateSums.length = 0;
    this.#selection = null;
  }
}
