/** A trained tensor: its value, and the gradient that backward passes add to. */
import type { Device } from '../device/device.js';
import { type GradientSlot, type Shape, Tensor } from './tensor.js';

export class Parameter {
  readonly name: string;
  readonly value: Tensor;
  readonly #slot: GradientSlot;

  constructor(device: Device, name: string, shape: Shape) {
    this.name = name;
    this.value = Tensor.empty(device, shape);
    this.#slot = { gradient: Tensor.empty(device, shape), filled: false };
    this.value.storage.leaf = this.#slot;
  }

  /** Null until a backward pass reached the parameter. */
  get gradient(): Tensor | null {
    return this.#slot.filled ? this.#slot.gradient : null;
  }

  /** The next backward pass overwrites the gradient instead of adding to it. */
  clearGradient(): void {
    this.#slot.filled = false;
  }

  free(): void {
    this.value.free();
    this.#slot.gradient.free();
  }
}
