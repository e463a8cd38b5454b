/**
 * A trained tensor: its value in f32, the gradient that backward passes add to (f32 too), and, once a model computes in
 * bf16, a rounded copy of the value for matrix products. The value is the truth: checkpoints and the optimizer see it.
 */
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import { dispose } from './dispose.js';
import { type Dtype, type GradientSlot, type Shape, Tensor } from './tensor.js';

/**
 * An adapter: scale * `up` [rows, rank] `down` [rank, inputs], added to the rows of a matrix from `from` on.
 *
 * @opaque
 */
export interface LowRankAddition {
  readonly down: Parameter;
  readonly up: Parameter;
  readonly scale: number;
  readonly from: number;
}

/** A trained tensor with its gradient. */
export class Parameter implements Disposable {
  readonly name: string;
  readonly value: Tensor;
  /**
   * Row counts of the weight matrices of linear layers that the value holds, one below the other: [768, 128, 128] for a
   * fused projection. Empty for an embedding, a head, a gate, a gain, a bias. `Muon` updates each matrix by itself.
   */
  readonly matrices: readonly number[];
  /** Adapters that linear layers compute beside the value (`src/model/adapters.ts`). */
  readonly additions: LowRankAddition[] = [];
  readonly #slot: Slot;
  /** It lies in memory of its own, or in a part of a stack's. */
  #rounded: Tensor | null = null;
  #roundedIsStale = true;
  #isFrozen = false;

  /** `value`: memory that is filled already, of the given shape; by default it is allocated and not initialised. */
  constructor(
    device: Device,
    name: string,
    shape: Shape,
    matrices: readonly number[] = [],
    value: Tensor = Tensor.empty(device, shape),
  ) {
    const rows = matrices.reduce((sum, count) => sum + count, 0);
    if (matrices.length > 0 && (shape.length !== 2 || rows !== shape[0]))
      throw new UsageError(`${name}: matrices of ${matrices.join(' + ')} rows are not those of [${shape.join(', ')}]`);
    this.name = name;
    this.matrices = matrices;
    this.value = value;
    this.#slot = new Slot(device, shape);
    this.value.storage.leaf = this.#slot;
    this.value.storage.name = name;
  }

  /**
   * The value as an operand of this dtype; its gradient is the parameter's. `round` makes the copy if it does not exist
   * or the value was changed behind its back.
   */
  as(dtype: Dtype, round: (from: Tensor, into: Tensor) => void): Tensor {
    if (dtype === this.value.dtype) return this.value;
    if (!this.#rounded) {
      this.#rounded = Tensor.empty(this.value.device, this.value.shape, dtype);
      this.#rounded.storage.leaf = this.#leaf;
    }
    if (this.#roundedIsStale) round(this.value, this.#rounded);
    this.#roundedIsStale = false;
    return this.#rounded;
  }

  /** The rounded copy, if one is in use: code that changes the value must write it too, or call `changed`. */
  get rounded(): Tensor | null {
    return this.#roundedIsStale ? null : this.#rounded;
  }

  /** The value was written by something that knows no copies: loading a checkpoint. */
  changed(): void {
    this.#roundedIsStale = true;
  }

  /** The rounded copy lies in memory that belongs to the caller from now on: beside others, see ParameterStack. */
  placeRounded(place: Tensor): void {
    if (this.#rounded) throw new Error(`the rounded copy of ${this.name} is in use already`);
    this.#rounded = place.withOwnStorage();
    this.#rounded.storage.leaf = this.#leaf;
  }

  /** Not trained from now on: no backward pass computes its gradient, and it takes no memory for one. */
  freeze(): void {
    this.#slot.free();
    this.#isFrozen = true;
    for (const { storage } of this.#rounded ? [this.value, this.#rounded] : [this.value]) storage.leaf = null;
  }

  /** Whether `freeze` was called. */
  get isFrozen(): boolean {
    return this.#isFrozen;
  }

  get #leaf(): GradientSlot | null {
    return this.#isFrozen ? null : this.#slot;
  }

  /** Null until a backward pass reached the parameter. */
  get gradient(): Tensor | null {
    return this.#slot.filled ? this.#slot.gradient : null;
  }

  /** The next backward pass overwrites the gradient instead of adding to it. */
  clearGradient(): void {
    this.#slot.filled = false;
  }

  /** A parameter that no backward pass has reached has a gradient of zero from now on. */
  fillGradient(): void {
    if (this.#slot.filled) return;
    this.#slot.gradient.zero();
    this.#slot.filled = true;
  }

  /** From now on gradients lie in memory that belongs to the caller: a part of a larger piece that is sent as a whole. */
  placeGradient(place: Tensor | null): void {
    this.#slot.place(place);
  }

  /** Whom to tell when a backward pass is done with this parameter, while it still goes on for others. */
  set onGradient(listener: (() => void) | null) {
    this.#slot.finished = listener;
  }

  /** `free`, for `using`. */
  [dispose](): void {
    if (!this.value.storage.isFreed) this.free();
  }

  /** Frees the value, its bf16 copy and the gradient. */
  free(): void {
    this.value.free();
    this.#rounded?.free();
    this.#slot.free();
  }
}

/** Takes memory when the first backward pass asks for it: a model that only runs needs none. */
class Slot implements GradientSlot {
  filled = false;
  finished: (() => void) | null = null;
  readonly #device: Device;
  readonly #shape: Shape;
  #gradient: Tensor | null = null;
  #isPlaced = false;

  constructor(device: Device, shape: Shape) {
    this.#device = device;
    this.#shape = shape;
  }

  get gradient(): Tensor {
    this.#gradient ??= Tensor.empty(this.#device, this.#shape);
    return this.#gradient;
  }

  place(place: Tensor | null): void {
    this.free();
    this.filled = false;
    this.#isPlaced = place !== null;
    this.#gradient = place?.reshape(this.#shape) ?? null;
  }

  /** Frees the gradient unless its memory belongs to a larger tensor. */
  free(): void {
    if (!this.#isPlaced) this.#gradient?.free();
    this.#gradient = null;
  }
}
