/** Observers of the attention during a step: statistics for the records, and the checks of runtime.strict_asserts. */
import type { Device } from '../device/device.js';
import type { Observer } from '../model/attention.js';
import type { ModelShape } from '../model/shape.js';
import { type GateStatistics, gateSums, summarizeGates } from '../ops/attention/gate/op.js';
import { type SelectionStatistics, selectionCounts, summarizeSelection } from '../ops/attention/selection-counts/op.js';
import type { Tensor } from '../tensor/tensor.js';

/** Statistics observed during a step. */
export interface Observed {
  /** Over all layers, heads and tokens; null for dense attention. */
  readonly gates: GateStatistics | null;
  /** Selected blocks per token; null for dense attention. */
  readonly selection: SelectionStatistics | null;
}

/** Collects during the forward passes of one step. Nine numbers per layer stay on the device for the gates. */
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

  /** The number of selected blocks depends on sequence lengths only, so one layer stands for all. */
  selected(layer: number, selected: Tensor): void {
    if (layer === 0) this.#selection ??= selectionCounts(this.#device, selected);
  }

  /** Reads what was collected. A replayed graph fills the same memory again. */
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
        if (blocks[row] !== 0) throw new Error(`layer ${layer}: a selection does not contain block 0`);
      }
      next?.selected?.(layer, selected);
    },
  };
}
