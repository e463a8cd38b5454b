/** What a step tells about its attention: gates over all layers and heads, and how many blocks were selected. */
import type { Device } from '../device/device.js';
import type { Observer } from '../model/attention.js';
import { type GateStatistics, gateSums, summarizeGates } from '../ops/gate/op.js';
import type { Tensor } from '../tensor/tensor.js';

export interface SelectionStatistics {
  /** Selected blocks per (token, group). */
  readonly mean: number;
  readonly max: number;
  /** Share of them with the largest number, in percent. */
  readonly percentAtMax: number;
}

/** Collects during the forward passes of one step; gates leave only nine numbers per layer behind. */
export class StepTelemetry implements Observer {
  readonly #device: Device;
  readonly #gateSums: Tensor[] = [];
  #selection: SelectionStatistics | null = null;

  constructor(device: Device) {
    this.#device = device;
  }

  gates(_layer: number, gates: Tensor): void {
    this.#gateSums.push(gateSums(this.#device, gates));
  }

  /** Lengths decide how many blocks a token has, so one layer speaks for all. */
  selected(layer: number, selected: Tensor): void {
    if (layer === 0) this.#selection ??= countSelected(selected);
  }

  /** Ends the collection: null where nothing was seen (dense attention). */
  finish(): { gates: GateStatistics | null; selection: SelectionStatistics | null } {
    const sums = this.#gateSums.map((tensor) => {
      const values = tensor.read();
      tensor.free();
      return values;
    });
    this.#gateSums.length = 0;
    return { gates: sums.length === 0 ? null : summarizeGates(sums), selection: this.#selection };
  }
}

function countSelected(selected: Tensor): SelectionStatistics {
  const slots = selected.shape[2];
  const blocks = selected.read();
  const rows = blocks.length / slots;
  let [total, max, atMax] = [0, 0, 0];
  for (let row = 0; row < rows; row++) {
    let count = 0;
    for (let slot = 0; slot < slots; slot++) if (blocks[row * slots + slot] >= 0) count += 1;
    total += count;
    if (count > max) [max, atMax] = [count, 0];
    if (count === max) atMax += 1;
  }
  return { mean: rows ? total / rows : 0, max, percentAtMax: rows ? (100 * atMax) / rows : 0 };
}
