/**
 * The eager tape. An operation runs at once and records its backward rule; `backward` walks the rules in reverse and
 * frees every activation and gradient after its last use. All memory comes from the device's pool and none waits for
 * the garbage collector.
 *
 *   const tape = new Tape(device);
 *   const y = linear(tape, x, weight);    // computes and records
 *   tape.backward(loss);                  // fills the gradients of parameters
 *   tape.end();                           // returns everything the tape still owns to the pool
 *
 * `withTape(device, (tape) => …)` and `using tape = new Tape(device)` call `end` by themselves.
 */
import type { Device } from '../device/device.js';
import { callSite } from '../device/pool.js';
import { UsageError } from '../errors.js';
import { dispose } from './dispose.js';
import { type Dtype, type GradientSlot, type Shape, type Storage, Tensor } from './tensor.js';

/** Options of a tape. */
export interface TapeOptions {
  /** False for inference: nothing is recorded and `drop` frees immediately. Default true. */
  readonly record?: boolean;
  /** Computes large linear layers in FP8 where the GPU has it and time is saved (`runtime.fp8`). Default false. */
  readonly fp8?: boolean;
}

/** The gradient that a backward pass starts from: one value for every element, all values, or a tensor of them. */
export type OutputGradient = number | ArrayLike<number> | Tensor;

interface Rule {
  readonly outputs: readonly Tensor[];
  readonly saved: readonly Tensor[];
  readonly backward: () => void;
  /** Parameters the rule may add gradients to, one entry per use; each use ends when the rule has run. */
  readonly leaves: readonly GradientSlot[];
  /** Uses inside a checkpointed block: its second run ends them, or this rule does if that run is skipped. */
  readonly inner?: ReadonlyMap<GradientSlot, number>;
}

/** How a backward kernel must write a gradient: into `gradient`, added to its content if `accumulate`. */
export interface GradientTarget {
  readonly gradient: Tensor;
  readonly accumulate: boolean;
}

/** Several tensors can share a gradient until one of them is added to (residual connections). */
interface SharedGradient {
  readonly tensor: Tensor;
  holders: number;
}

type TensorRecord = Readonly<Record<string, Tensor>>;

/** Records operations and owns the memory they need. One tape serves one forward and one backward pass. */
export class Tape implements Disposable {
  readonly device: Device;
  /** Whether operations record backward rules. */
  readonly recording: boolean;
  /** Whether large linear layers may be computed in FP8. */
  readonly fp8: boolean;
  readonly #parent: Tape | null;
  readonly #rules: Rule[] = [];
  readonly #owned = new Set<Storage>();
  readonly #held: Disposable[] = [];
  readonly #tracked = new Set<Storage>();
  readonly #saves = new Map<Storage, number>();
  readonly #dropped = new Set<Storage>();
  readonly #gradients = new Map<Storage, SharedGradient>();
  /** Uses of each parameter that the backward pass has not reached yet: at zero its gradient is finished. */
  readonly #uses = new Map<GradientSlot, number>();
  /** Scalar outputs of `backward`, which stay readable until `end`. */
  readonly #retained = new Set<Storage>();
  /** Results of `once` in a checkpointed block: filled by its first run, taken in the same order by its second. */
  #onceResults: TensorRecord[] | null = null;
  #hasRunBackward = false;
  #hasEnded = false;

  constructor(device: Device, options: TapeOptions = {}, parent: Tape | null = null) {
    this.device = device;
    this.recording = options.record ?? true;
    this.fp8 = options.fp8 ?? false;
    this.#parent = parent;
    if (warnsHere()) watchForEnd(this, this.#owned, device);
  }

  /**
   * False in the second run of a checkpointed block: gradients pass through the block's result, but its values are not
   * read, so the operation that returns it need not compute them.
   */
  get computesResult(): boolean {
    return this.#parent === null;
  }

  /** An uninitialised tensor that the tape owns. */
  empty<D extends Dtype = 'f32'>(shape: Shape, dtype = 'f32' as D): Tensor<D> {
    this.#expectOpen();
    return this.own(Tensor.empty(this.device, shape, dtype));
  }

  /** A tensor of zeros that the tape owns. */
  zeros<D extends Dtype = 'f32'>(shape: Shape, dtype = 'f32' as D): Tensor<D> {
    this.#expectOpen();
    return this.own(Tensor.zeros(this.device, shape, dtype));
  }

  /** A tensor of the given values that the tape owns. */
  from<D extends Dtype = 'f32'>(values: ArrayLike<number>, shape: Shape, dtype = 'f32' as D): Tensor<D> {
    this.#expectOpen();
    return this.own(Tensor.from(this.device, values, shape, dtype));
  }

  /** Makes the tape the owner of a tensor: `drop` or `end` frees it. */
  own<T extends Tensor>(tensor: T): T {
    this.#expectOpen();
    this.#owned.add(tensor.storage);
    return tensor;
  }

  /** Makes the tape the owner of an object that is not a tensor, such as the `Sequences` of a pass: `end` disposes of it. */
  hold<T extends Disposable>(value: T): T {
    this.#expectOpen();
    this.#held.push(value);
    return value;
  }

  /** Releases a tensor from the tape's ownership: the caller frees it. */
  release<T extends Tensor>(tensor: T): T {
    this.#owned.delete(tensor.storage);
    return tensor;
  }

  /** Asks for the gradient of an input that is not a parameter. It is available after `backward`. */
  watch<T extends Tensor>(tensor: T): T {
    this.#expectOpen();
    this.#tracked.add(tensor.storage);
    return tensor;
  }

  /** Whether a backward pass would compute the gradient of this tensor. */
  tracks(tensor: Tensor): boolean {
    if (!this.recording) return false;
    return tensor.storage.leaf !== null || this.#tracked.has(tensor.storage) || (this.#parent?.tracks(tensor) ?? false);
  }

  /**
   * Records a rule. `saved` lists the tensors whose values `backward` reads; all others may be dropped. Records nothing
   * when no input needs a gradient.
   */
  record(
    inputs: readonly (Tensor | null)[],
    outputs: readonly Tensor[],
    saved: readonly Tensor[],
    backward: () => void,
  ): void {
    this.#expectOpen();
    const leaves = inputs.flatMap((input) => input?.storage.leaf ?? []);
    this.#countUses(leaves); // also when nothing is recorded: the first run of a checkpointed block does not record
    if (!this.recording || !inputs.some((input) => input !== null && this.tracks(input))) return;
    for (const output of outputs) this.#tracked.add(output.storage);
    for (const tensor of saved) this.#saves.set(tensor.storage, (this.#saves.get(tensor.storage) ?? 0) + 1);
    this.#rules.push({ outputs, saved, backward, leaves });
  }

  /** Ends the forward pass's use of a tensor: freed now, or when the last rule that saved it has run. */
  drop(tensor: Tensor): void {
    const { storage } = tensor;
    if (!this.#owned.has(storage)) return;
    if (this.#saves.has(storage)) this.#dropped.add(storage);
    else this.#free(storage, 'Tape.drop()');
  }

  /** The gradient of an output inside its rule, or of a watched tensor after `backward`; null if nothing used it. */
  gradient<D extends Dtype>(tensor: Tensor<D>): Tensor<D> | null {
    const held = this.#gradients.get(tensor.storage)?.tensor.reshape(tensor.shape) ?? null;
    return held as Tensor<D> | null; // #newGradient gives a gradient the dtype of its tensor
  }

  /** Where a rule writes the gradient of one of its inputs; null when it is not needed. */
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

  /**
   * Passes the gradient of `from` to `to` unchanged, without a copy where possible. `add` is the addition of tensors, an
   * operation that this module must not import.
   */
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

  /**
   * Computes the gradients of all parameters and watched tensors that `output` depends on. `gradient` is the gradient of
   * the output, 1 for a scalar by default; with several outputs there is one for each. Activations are freed on the
   * way; a scalar output stays readable until `end`. Runs once per tape.
   */
  backward(output: Tensor, gradient?: OutputGradient): void;
  backward(outputs: readonly Tensor[], gradients: readonly OutputGradient[]): void;
  backward(output: Tensor | readonly Tensor[], gradient?: OutputGradient | readonly OutputGradient[]): void {
    const outputs = output instanceof Tensor ? [output] : output;
    const gradients = output instanceof Tensor ? [gradient] : ((gradient ?? []) as readonly OutputGradient[]);
    this.#expectOpen();
    if (!this.recording) throw new UsageError('backward: this tape does not record (record: false)');
    if (this.#hasRunBackward)
      throw new UsageError(
        'backward: has already run on this tape and has freed its activations; use a new Tape for the next pass',
      );
    if (outputs.length !== gradients.length)
      throw new UsageError(`backward: ${outputs.length} outputs need as many gradients, not ${gradients.length}`);
    for (const tensor of outputs) {
      if (!this.tracks(tensor))
        throw new UsageError(
          `backward: ${tensor} was not recorded on this tape: it comes from another tape, or depends on no parameter ` +
            'and no watched tensor',
        );
    }
    outputs.forEach((tensor, i) => {
      this.#start(tensor, gradients[i] as OutputGradient | undefined);
    });
    this.#hasRunBackward = true;
    for (const tensor of outputs) if (tensor.size === 1) this.#retained.add(tensor.storage);
    this.#runRules();
  }

  /**
   * Runs `block` keeping only its result, and runs it again in the backward pass: less memory for more time. `block`
   * must be a pure function of its inputs and of parameters. Results of `once` inside it are kept too.
   */
  checkpoint<T extends Tensor>(inputs: readonly Tensor[], block: (tape: Tape) => T): T {
    const firstRun = new Tape(this.device, { record: false, fp8: this.fp8 });
    const kept: TensorRecord[] = [];
    if (this.recording) firstRun.#onceResults = kept;
    let output: T;
    let inner: Map<GradientSlot, number>;
    try {
      output = this.own(firstRun.release(block(firstRun)));
      inner = new Map(firstRun.#uses);
    } finally {
      firstRun.end();
    }
    for (const tensor of kept.flatMap(Object.values<Tensor>)) this.own(tensor);
    for (const [leaf, uses] of inner) this.#countUses(new Array(uses).fill(leaf));
    if (!this.recording) return output;
    // Nothing in it is trained: it has no gradient, as without checkpointing.
    if (inner.size === 0 && !inputs.some((input) => this.tracks(input))) {
      for (const tensor of kept.flatMap(Object.values<Tensor>)) this.drop(tensor);
      return output;
    }
    for (const input of inputs) this.#saves.set(input.storage, (this.#saves.get(input.storage) ?? 0) + 1);
    this.#tracked.add(output.storage);
    this.#rules.push({
      outputs: [output],
      saved: inputs,
      leaves: [],
      inner,
      backward: () => {
        const rerun = new Tape(this.device, { fp8: this.fp8 }, this);
        for (const tensor of kept.flatMap(Object.values<Tensor>)) rerun.own(this.release(tensor));
        rerun.#onceResults = kept;
        try {
          rerun.#start(block(rerun), this.gradient(output)!);
          rerun.#runRules();
        } finally {
          rerun.end();
        }
      },
    });
    return output;
  }

  /**
   * Computes tensors that are too expensive to compute twice. In a checkpointed block `compute` runs in the first run
   * only, and its results are held until the second run drops them; elsewhere this just calls it. The tensors must
   * belong to this tape, and `compute` must record nothing.
   */
  once<T extends { readonly [name in keyof T]: Tensor }>(compute: () => T): T {
    if (!this.#onceResults) return compute();
    if (this.recording) return this.#onceResults.shift() as T;
    const tensors = compute();
    for (const tensor of Object.values<Tensor>(tensors)) this.release(tensor);
    this.#onceResults.push(tensors);
    return tensors;
  }

  /** Returns everything the tape owns to the pool. Further operations on this tape throw. */
  end(): void {
    if (this.#hasEnded) return;
    this.#hasEnded = true;
    endings.unregister(this);
    this.#rules.length = 0;
    for (const storage of [...this.#gradients.keys()]) this.#releaseGradient(storage);
    for (const storage of this.#owned) storage.free('Tape.end()');
    this.#owned.clear();
    for (const value of this.#held.splice(0)) value[dispose]();
    this.#tracked.clear();
    this.#saves.clear();
    this.#dropped.clear();
    this.#uses.clear();
    this.#retained.clear();
  }

  /** `end`, for `using`. */
  [dispose](): void {
    this.end();
  }

  #expectOpen(): void {
    if (this.#hasEnded) throw new UsageError('this tape has ended: use a new Tape for each pass');
  }

  #runRules(): void {
    for (let rule = this.#rules.pop(); rule; rule = this.#rules.pop()) {
      if (rule.outputs.some((output) => this.#gradients.has(output.storage))) rule.backward();
      else for (const [leaf, uses] of rule.inner ?? []) this.#endUses(leaf, uses);
      for (const leaf of rule.leaves) this.#endUses(leaf, 1);
      for (const output of rule.outputs) this.#releaseGradient(output.storage);
      for (const tensor of rule.saved) this.#unsave(tensor.storage);
      // Rules that read an output were recorded after this one, so they have run.
      for (const { storage } of rule.outputs)
        if (this.#owned.has(storage) && !this.#retained.has(storage)) this.#free(storage, 'Tape.backward()');
    }
  }

  /** Sets the gradient of an output. One value for all elements needs no host memory: a CUDA graph can record it. */
  #start(tensor: Tensor, gradient: OutputGradient | undefined): void {
    if (gradient === undefined && tensor.size !== 1)
      throw new UsageError(`backward: ${tensor} is not a scalar: pass its gradient as the second argument`);
    if (gradient instanceof Tensor && this.#borrowGradient(tensor, gradient)) return;
    const target = this.gradientTarget(tensor);
    if (!target) return;
    if (target.accumulate) throw new UsageError(`backward: ${tensor} was given twice, or already has a gradient`);
    if (gradient instanceof Tensor) target.gradient.copyFrom(gradient);
    else if (typeof gradient === 'object') target.gradient.write(gradient);
    else if (tensor.dtype === 'f32') target.gradient.fill(gradient ?? 1);
    else target.gradient.write(new Float32Array(tensor.size).fill(gradient ?? 1));
  }

  /** Uses the caller's tensor as the gradient, without a copy, where nothing else holds one. */
  #borrowGradient(tensor: Tensor, gradient: Tensor): boolean {
    const { storage } = tensor;
    const fits = gradient.dtype === tensor.dtype && gradient.size === tensor.size && gradient.device === this.device;
    if (!fits || !this.#tracked.has(storage) || this.#gradients.has(storage)) return false;
    expectWhole(tensor);
    // The second holder is the caller: rules that add to the gradient copy it first, and the tape does not free it.
    this.#gradients.set(storage, { tensor: gradient, holders: 2 });
    return true;
  }

  /** The second run of a checkpointed block repeats the uses of the first, which are counted already. */
  #countUses(leaves: readonly GradientSlot[]): void {
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

  #newGradient(tensor: Tensor): Tensor {
    const gradient = Tensor.empty(this.device, tensor.shape, tensor.dtype);
    this.#gradients.set(tensor.storage, { tensor: gradient, holders: 1 });
    return gradient;
  }

  /** The gradient without other holders, copied if it has any. */
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
    if (held.holders === 0) held.tensor.storage.free(this.#hasEnded ? 'Tape.end()' : 'Tape.backward()');
  }

  #unsave(storage: Storage): void {
    const count = this.#saves.get(storage);
    if (count === undefined) return;
    if (count > 1) {
      this.#saves.set(storage, count - 1);
      return;
    }
    this.#saves.delete(storage);
    if (this.#dropped.has(storage) && this.#owned.has(storage)) this.#free(storage, 'Tape.backward()');
  }

  #free(storage: Storage, by: string): void {
    this.#owned.delete(storage);
    this.#dropped.delete(storage);
    this.#saves.delete(storage);
    storage.free(by);
  }
}

/** Runs `body` with a new tape and ends the tape afterwards, also when `body` throws or returns a promise. */
export function withTape<T>(device: Device, body: (tape: Tape) => T, options: TapeOptions = {}): T {
  const tape = new Tape(device, options);
  let result: T;
  try {
    result = body(tape);
  } catch (error) {
    tape.end();
    throw error;
  }
  if (result instanceof Promise) return result.finally(() => tape.end()) as T;
  tape.end();
  return result;
}

/** Gradients belong to whole storages: a slice would overwrite the gradient of the storage's beginning. */
function expectWhole(tensor: Tensor): void {
  if (tensor.bytes !== tensor.storage.bytes)
    throw new UsageError(`${tensor} is a part of a larger tensor: rows cannot be differentiated, use the whole tensor`);
}

/** Record of a tape that outlives it. It must not refer to the tape. */
interface TapeRecord {
  readonly owned: ReadonlySet<Storage>;
  readonly where: string | null;
}

/** In Node, but for production: a page has no warnings of a process. */
function warnsHere(): boolean {
  return typeof process !== 'undefined' && process.env['NODE_ENV'] !== 'production';
}

let hasWarned = false;
const endings = new FinalizationRegistry<TapeRecord>(({ owned, where }) => {
  if (owned.size === 0 || hasWarned) return;
  hasWarned = true;
  const bytes = [...owned].reduce((total, storage) => total + storage.bytes, 0);
  const place = where === null ? 'device.pool.trace() shows where such a tape is created' : `created ${where}`;
  process.emitWarning(
    `a Tape was garbage-collected without end(): ${bytes} bytes of device memory are lost; ` +
      `call tape.end() or use withTape (${place})`,
    'TrefoilWarning',
  );
});

/** Warns when a tape that owns memory is collected before its end. */
function watchForEnd(tape: Tape, owned: ReadonlySet<Storage>, { pool }: Device): void {
  endings.register(tape, { owned, where: pool.isTracing ? callSite() : null }, tape);
}
