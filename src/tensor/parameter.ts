/** A trained tensor: its value, and the gradient that backward passes add to. */
import type { Device } from '../device/device.js';
import { type GradientSlot, type Shape, Tensor } from './tensor.js';

export class Parameter {
  readonly name: string;
  readonly value: Tensor;
  readonly #slot: Slot;

  constructor(device: Device, name: string, shape: Shape) {
    this.name = name;
    this.value = Tensor.empty(device, shape);
    this.#slot = new Slot(device, shape);
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
    this.#slot.free();
  }
}

/** Takes memory when the first backward pass asks for it: a model that only runs needs none. */
class Slot implements GradientSlot {
  filled = false;
  readonly #device: Device;
  readonly #shape: Shape;
  #gradient: Tensor | null = null;

  constructor(device: Device, shape: Shape) {
    this.#device = device;
    this.#shape = shape;
  }

  get gradient(): Tensor {
    this.#gradient ??= Tensor.empty(this.#device, this.#shape);
    return this.#gradient;
  }

  free(): void {
    this.#gradient?.free();
    this.#gradient = null;
  }
}
