/**
 * Counts which kernels computed the attention core. The device chooses and counts the kernels of the selected branch;
 * reading the counts waits for the device, so it belongs after a step, never inside one.
 */
import type { Device } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';

/** Counts of attention kernels. */
export interface AttentionCounts {
  /** Calls whose selected branch ran by tile-union, KV-outer and tile-gather; where stretches differ, several count. */
  readonly attention_union: number;
  readonly attention_outer: number;
  readonly attention_gather: number;
  /** Calls that the branch kernels computed because the fused kernels do not support them. */
  readonly attention_portable: number;
}

/**
 * Counts which attention kernels ran.
 *
 * @opaque
 */
export class AttentionCounters {
  /** i32 [3] on the device: union, outer, gather. */
  readonly served: Tensor;
  readonly #refusals = new Map<string, number>();

  constructor(device: Device) {
    this.served = Tensor.zeros(device, [3], 'i32');
  }

  /** Counts one refusal of the fused kernels, by its reason. */
  refused(reason: string): void {
    this.#refusals.set(reason, (this.#refusals.get(reason) ?? 0) + 1);
  }

  /** Why the fused kernels did not run, and how often. */
  get refusals(): ReadonlyMap<string, number> {
    return this.#refusals;
  }

  /** Calls that were refused so far. */
  get portable(): number {
    return [...this.#refusals.values()].reduce((total, count) => total + count, 0);
  }

  /** Waits for the device. */
  read(): AttentionCounts {
    const [union, outer, gather] = this.served.read();
    return {
      attention_union: union,
      attention_outer: outer,
      attention_gather: gather,
      attention_portable: this.portable,
    };
  }

  /** Frees the counters on the device. */
  free(): void {
    this.served.free();
  }
}
