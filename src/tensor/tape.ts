/**
 * The eager tape. An operation runs at once and records its backward rule; `backward` walks the rules in reverse and
 * frees every activation and gradient as soon as nothing will ask for it again. All memory comes from the device's
 * pool and none waits for the garbage collector.
 *
 *   const tape = new Tape(device);
 *   const y = linear(tape, x, weight);    // runs, records
 *   tape.backward(loss);                  // gradients of parameters are in their slots
 *   tape.end();                           // everything the tape still owns goes back to the pool
 */
import type { Device } from '../device/device.js';
import { type Dtype, type GradientSlot, type Shape, type Storage, Tensor } from './tensor.js';

export interface TapeOptions {
  /** False for inference: nothing is recorded and `drop` frees at once. */
  readonly record?: boolean;
}

interface Rule {
  readonly outputs: readonly Tensor[];
  readonly saved: readonly Tensor[];
  readonly backward: () => void;
  /** Whose gradients the rule may add to, once for every use: when it is gone, these uses are over. */
  readonly leaves: readonly GradientSlot[];
  /** Uses that rules recorded by `backward` count off themselves, and that are over too when it does not run. */
  readonly inner?: ReadonlyMap<GradientSlot, number>;
}

/** How a backward kernel must write a gradient: into `gradient`, adding to what is there if `accumulate`. */
export interface GradientTarget {
  readonly gradient: Tensor;
  readonly accumulate: boolean;
}

/** Gradients can be shared by several tensors until one of them is added to (residual connections). */
interface SharedGradient {
  readonly tensor: Tensor;
  holders: number;
}

type TensorRecord = Readonly<Record<string, Tensor>>;

export class Tape {
  readonly device: Device;
  readonly recording: boolean;
  readonly #parent: Tape | null;
  readonly #rules: Rule[] = [];
  readonly #owned = new Set<Storage>();
  readonly #tracked = new Set<Storage>();
  readonly #saves = new Map<Storage, number>();
  readonly #dropped = new Set<Storage>();
  readonly #gradients = new Map<Storage, SharedGradient>();
  /** How often each parameter is still to be used by the backward pass: at zero its gradient is finished. */
  readonly #uses = new Map<GradientSlot, number>();
  /** Results of `once` in a checkpointed block: filled by its first run, taken in the same order by its second. */
  #kept: TensorRecord[] | null = null;

  constructor(device: Device, options: TapeOptions = {}, parent: Tape | null = null) {
    this.device = device;
    this.recording = options.record ?? true;
    this.#parent = parent;
  }

  /**
   * False in the second run of a checkpointed block: gradients pass through the block's result, but its values are not
   * read, so the operation that returns it need not compute them.
   */
  get isResultRead(): boolean {
    return this.#parent === null;
  }

  /** An uninitialised tensor that the tape owns. */
  empty(shape: Shape, dtype: Dtype = 'f32'): Tensor {
    return this.own(Tensor.empty(this.device, shape, dtype));
  }

  zeros(shape: Shape, dtype: Dtype = 'f32'): Tensor {
    return this.own(Tensor.zeros(this.device, shape, dtype));
  }

  from(values: ArrayLike<number>, shape: Shape, dtype: Dtype = 'f32'): Tensor {
    return this.own(Tensor.from(this.device, values, shape, dtype));
  }

  own(tensor: Tensor): Tensor {
    this.#owned.add(tensor.storage);
    return tensor;
  }

  /** Takes a tensor out of the tape's hands: the caller frees it. */
  keep(tensor: Tensor): Tensor {
    this.#owned.delete(tensor.storage);
    return tensor;
  }

  /** Declares an input that is no parameter but whose gradient the caller wants. It outlives `backward`. */
  watch(tensor: Tensor): Tensor {
    this.#tracked.add(tensor.storage);
    return tensor;
  }

  /** Whether anything that needs a gradient depends on this tensor's gradient. */
  tracks(tensor: Tensor): boolean {
    if (!this.recording) return false;
    return tensor.storage.leaf !== null || this.#tracked.has(tensor.storage) || (this.#parent?.tracks(tensor) ?? false);
  }

  /**
   * Records a rule. `saved` names the tensors whose values `backward` reads; everything else may be dropped. Nothing is
   * recorded when no input needs a gradient.
   */
  record(
    inputs: readonly (Tensor | null)[],
    outputs: readonly Tensor[],
    saved: readonly Tensor[],
    backward: () => void,
  ): void {
    const leaves = inputs.flatMap((input) => input?.storage.leaf ?? []);
    this.#expectUses(leaves);
    if (!this.recording || !inputs.some((input) => input !== null && this.tracks(input))) return;
    for (const output of outputs) this.#tracked.add(output.storage);
    for (const tensor of saved) this.#saves.set(tensor.storage, (this.#saves.get(tensor.storage) ?? 0) + 1);
    this.#rules.push({ outputs, saved, backward, leaves });
  }

  /** The forward code is done with this tensor: freed now, or when the last rule that saved it has run. */
  drop(tensor: Tensor): void {
    const { storage } = tensor;
    if (!this.#owned.has(storage)) return;
    if (this.#saves.has(storage)) this.#dropped.add(storage);
    else this.#free(storage);
  }

  /** The gradient of an output inside its rule's backward, or of a watched tensor afterwards; null if nothing used it. */
  gradient(tensor: Tensor): Tensor | null {
    return this.#gradients.get(tensor.storage)?.tensor.reshape(tensor.shape) ?? null;
  }

  /** Where a backward rule writes the gradient of one of its inputs; null when nobody needs it. */
  gradientTarget(tensor: Tensor): GradientTarget | null {
    const { storage } = tensor;
    expectWhole(tensor);
    if (storage.leaf) {
      const accumulate = storage.leaf.filled;
      storage.leaf.filled = true;
      return { gradient: storage.leaf.gradient.reshape(tensor.shape), accumulate };
    }
    if (!this.#tracked.has(storage)) return this.#parent?.tracks(tensor) ? this.#parent.gradientTarget(tensor) : null;
    const held = this.#gradients.get(storage);
    if (!held) return { gradient: this.#newGradient(tensor), accumulate: false };
    return { gradient: this.#exclusive(tensor, held).reshape(tensor.shape), accumulate: true };
  }

  /** Passes a gradient on unchanged: `to` gets the gradient of `from`, without a copy where that is possible. */
  passGradient(from: Tensor, to: Tensor, add: (into: Tensor, value: Tensor) => void): void {
    const held = this.#gradients.get(from.storage);
    if (!held) return;
    expectWhole(to);
    const isOwnFresh = this.#tracked.has(to.storage) && !this.#gradients.has(to.storage);
    if (isOwnFresh) {
      held.holders += 1;
      this.#gradients.set(to.storage, held);
      return;
    }
    const target = this.gradientTarget(to);
    if (!target) return;
    if (target.accumulate) add(target.gradient, held.tensor);
    else target.gradient.copyFrom(held.tensor);
  }

  /** Starts a backward pass with a gradient for an output; `backward` uses 1 for the loss. */
  seed(tensor: Tensor, values: ArrayLike<number>): void {
    this.#seedTarget(tensor)?.write(values);
  }

  /** The same with one value everywhere, which needs no host memory: it can be captured in a graph. */
  seedFilled(tensor: Tensor, value: number): void {
    this.#seedTarget(tensor)?.fill(value);
  }

  seedWith(tensor: Tensor, gradient: Tensor): void {
    this.#seedTarget(tensor)?.copyFrom(gradient.reshape(tensor.shape));
  }

  /** Runs all rules in reverse. Give the loss, or seed outputs yourself and give nothing. */
  backward(loss?: Tensor): void {
    if (loss) this.seedFilled(loss, 1);
    for (let rule = this.#rules.pop(); rule; rule = this.#rules.pop()) {
      if (rule.outputs.some((output) => this.#gradients.has(output.storage))) rule.backward();
      else for (const [leaf, uses] of rule.inner ?? []) this.#endUses(leaf, uses);
      for (const leaf of rule.leaves) this.#endUses(leaf, 1);
      for (const output of rule.outputs) {
        this.#releaseGradient(output.storage);
      }
      for (const tensor of rule.saved) this.#unsave(tensor.storage);
      // Everything that reads an output was recorded after it, so it has run by now.
      for (const output of rule.outputs) if (this.#owned.has(output.storage)) this.#free(output.storage);
    }
  }

  /**
   * Runs `block` keeping only its result, and runs it again in the backward pass: memory for time. `block` must be a
   * pure function of its inputs and of parameters. Results of `once` inside it are kept beside the block's own.
   */
  checkpoint(inputs: readonly Tensor[], block: (tape: Tape) => Tensor): Tensor {
    const trial = new Tape(this.device, { record: false });
    const kept: TensorRecord[] = [];
    if (this.recording) trial.#kept = kept;
    const output = this.own(trial.keep(block(trial)));
    const inner = new Map(trial.#uses);
    trial.end();
    for (const tensor of kept.flatMap(Object.values<Tensor>)) this.own(tensor);
    for (const [leaf, uses] of inner) this.#expectUses(new Array(uses).fill(leaf));
    if (!this.recording) return output;
    for (const input of inputs) this.#saves.set(input.storage, (this.#saves.get(input.storage) ?? 0) + 1);
    this.#tracked.add(output.storage);
    this.#rules.push({
      outputs: [output],
      saved: inputs,
      leaves: [],
      inner,
      backward: () => {
        const rerun = new Tape(this.device, {}, this);
        for (const tensor of kept.flatMap(Object.values<Tensor>)) rerun.own(this.keep(tensor));
        rerun.#kept = kept;
        const again = block(rerun);
        rerun.seedWith(again, this.gradient(output)!);
        rerun.backward();
        rerun.end();
      },
    });
    return output;
  }

  /**
   * Computes tensors that are too expensive to compute twice. In a checkpointed block `compute` runs in the first run only,
   * and its results are held until the second run drops them; elsewhere this just calls it. The tensors must belong to
   * this tape, and `compute` must record nothing.
   */
  once<T extends { readonly [name in keyof T]: Tensor }>(compute: () => T): T {
    if (!this.#kept) return compute();
    if (this.recording) return this.#kept.shift() as T;
    const tensors = compute();
    for (const tensor of Object.values<Tensor>(tensors)) this.keep(tensor);
    this.#kept.push(tensors);
    return tensors;
  }

  /** Gives everything the tape owns back to the pool. */
  end(): void {
    this.#rules.length = 0;
    for (const storage of [...this.#gradients.keys()]) this.#releaseGradient(storage);
    for (const storage of this.#owned) storage.free();
    this.#owned.clear();
    this.#tracked.clear();
    this.#saves.clear();
    this.#dropped.clear();
    this.#uses.clear();
  }

  /** The second run of a checkpointed block does what the first did: that was counted. */
  #expectUses(leaves: readonly GradientSlot[]): void {
    if (this.#parent) return;
    for (const leaf of leaves) this.#uses.set(leaf, (this.#uses.get(leaf) ?? 0) + 1);
  }

  #endUses(leaf: GradientSlot, count: number): void {
    if (this.#parent) {
      this.#parent.#endUses(leaf, count);
      return;
    }
    const left = this.#uses.get(leaf)! - count;
    this.#uses.set(leaf, left);
    if (left === 0) leaf.finished?.();
  }

  #seedTarget(tensor: Tensor): Tensor | null {
    const target = this.gradientTarget(tensor);
    if (target?.accumulate) throw new Error('a tensor was seeded twice, or its gradient was there already');
    return target?.gradient ?? null;
  }

  #newGradient(tensor: Tensor): Tensor {
    const gradient = Tensor.empty(this.device, tensor.shape, tensor.dtype);
    this.#gradients.set(tensor.storage, { tensor: gradient, holders: 1 });
    return gradient;
  }

  /** The gradient with no other holder, copied if it has one. */
  #exclusive(tensor: Tensor, held: SharedGradient): Tensor {
    if (held.holders === 1) return held.tensor;
    held.holders -= 1;
    const copy = this.#newGradient(tensor);
    copy.copyFrom(held.tensor.reshape(copy.shape));
    return copy;
  }

  #releaseGradient(storage: Storage): void {
    const held = this.#gradients.get(storage);
    if (!held) return;
    this.#gradients.delete(storage);
    held.holders -= 1;
    if (held.holders === 0) held.tensor.free();
  }

  #unsave(storage: Storage): void {
    const count = this.#saves.get(storage);
    if (count === undefined) return;
    if (count > 1) {
      this.#saves.set(storage, count - 1);
      return;
    }
    this.#saves.delete(storage);
    if (this.#dropped.has(storage) && this.#owned.has(storage)) this.#free(storage);
  }

  #free(storage: Storage): void {
    this.#owned.delete(storage);
    this.#dropped.delete(storage);
    this.#saves.delete(storage);
    storage.free();
  }
}

/** Gradients belong to whole storages: a slice would write its gradient over the start of another's. */
function expectWhole(tensor: Tensor): void {
  if (tensor.bytes !== tensor.storage.bytes)
    throw new Error('rows of a tensor cannot be differentiated: use the whole tensor');
}
