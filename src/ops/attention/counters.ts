/**
 * Who served the attention core. The kernels of the selected branch are chosen on the device, which also counts there;
 * reading waits for the device, so it belongs after a step, never inside.
 */
import type { Device } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';

export interface AttentionCounts {
  /** Calls whose selected branch ran by tile-union, and by KV-outer; where stretches of a batch differ, both count. */
  readonly attention_union: number;
  readonly attention_outer: number;
  /** Calls that the fused kernels refused, so that the kernels of each operation served. */
  readonly attention_portable: number;
}

export class AttentionCounters {
  /** i32 [2] on the device: union, outer. */
  readonly served: Tensor;
  readonly #refusals = new Map<string, number>();

  constructor(device: Device) {
    this.served = Tensor.zeros(device, [2], 'i32');
  }

  refused(reason: string): void {
    this.#refusals.set(reason, (this.#refusals.get(reason) ?? 0) + 1);
  }

  /** Why the fused kernels did not serve, and how often. */
  get refusals(): ReadonlyMap<string, number> {
    return this.#refusals;
  }

  /** Calls that were refused so far. */
  get portable(): number {
    return [...this.#refusals.values()].reduce((total, count) => total + count, 0);
  }

  /** Waits for the device. */
  read(): AttentionCounts {
    const [union, outer] = this.served.read();
    return { attention_union: union, attention_outer: outer, attention_portable: this.portable };
  }

  free(): void {
    this.served.free();
  }
}
