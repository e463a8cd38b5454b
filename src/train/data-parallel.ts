/**
 * Data parallel training: every rank computes the gradients of its own batches, and the sums over all ranks are what the
 * optimizer sees. A bucket of gradients is sent as soon as the backward pass is done with it, while the pass goes on.
 *
 * With `zero` (ZeRO-1) a rank gets the sums of its own part of every bucket only, updates that part, keeps optimizer state
 * for no more, and the ranks then hand each other the new values.
 *
 * Nothing here waits for the device: on a GPU all of it can be recorded in a graph.
 *
 *   for each micro-batch: begin(isLast); forward; backward
 *   finish();                             // sums are in the parameters' gradients, or in this rank's parts of them
 *   norms of `gradients`, reduceSums(norms), optimizer over `trained`
 *   shareValues();                        // nothing to do without zero
 */
import type { Collectives, Span } from '../device/collectives.js';
import type { Device } from '../device/device.js';
import type { Trainable } from '../ops/adamw/op.js';
import { castInto } from '../ops/cast/op.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tensor } from '../tensor/tensor.js';
import { type Bucket, makeBuckets, type Place } from './gradient-buckets.js';

export interface DataParallelOptions {
  /** About how many bytes of gradients are sent at a time. */
  readonly bucketBytes: number;
  /** Send buckets while the backward pass goes on; false sends all of them after it. */
  readonly overlap: boolean;
  /** What gradients are rounded to on the wire. */
  readonly wire: 'f32' | 'bf16';
  /** ZeRO-1: optimizer state of this rank's part only. */
  readonly zero: boolean;
}

/** The numbers `from` to `to` of a parameter. */
export class ParameterPart implements Trainable {
  readonly name: string;
  readonly from: number;
  readonly to: number;
  readonly #parameter: Parameter;

  constructor(parameter: Parameter, from: number, to: number) {
    this.name = parameter.name;
    this.from = from;
    this.to = to;
    this.#parameter = parameter;
  }

  get value(): Tensor {
    return this.#rows(this.#parameter.value);
  }
  get gradient(): Tensor | null {
    return this.#parameter.gradient && this.#rows(this.#parameter.gradient);
  }
  get rounded(): Tensor | null {
    return this.#parameter.rounded && this.#rows(this.#parameter.rounded);
  }

  #rows(tensor: Tensor): Tensor {
    return tensor.reshape([tensor.size]).rows(this.from, this.to);
  }
}

export class DataParallel {
  readonly #device: Device;
  readonly #collectives: Collectives;
  readonly #parameters: readonly Parameter[];
  readonly #options: DataParallelOptions;
  readonly #buckets: readonly Bucket[];
  /** What goes over the wire, when that is not the bucket itself. */
  readonly #wires: readonly Tensor[];
  /** Gradients each bucket still waits for in this backward pass. */
  readonly #missing: number[];
  /** This rank's share of every parameter, in the model's order; may be empty. */
  readonly #parts = new Map<Parameter, ParameterPart>();
  #isReducing = false;
  /** Buckets sent so far. They go in order on every rank, whatever order they are finished in. */
  #sent = 0;

  constructor(
    device: Device,
    collectives: Collectives,
    parameters: readonly Parameter[],
    options: DataParallelOptions,
  ) {
    const { rank, world } = collectives;
    this.#device = device;
    this.#collectives = collectives;
    this.#parameters = parameters;
    this.#options = options;
    this.#buckets = makeBuckets(device, parameters, world, options.bucketBytes);
    this.#wires =
      options.wire === 'f32' ? [] : this.#buckets.map(({ flat }) => Tensor.empty(device, flat.shape, options.wire));
    this.#missing = this.#buckets.map(() => 0);
    this.#buckets.forEach((bucket, index) => {
      for (const place of bucket.places) {
        const { from, to } = bucket.share(place, rank);
        this.#parts.set(place.parameter, new ParameterPart(place.parameter, from, to));
        place.parameter.onGradient = () => this.#finished(index);
      }
    });
  }

  get bucketCount(): number {
    return this.#buckets.length;
  }

  /** Whether the optimizer of this rank holds parts of the parameters only. */
  get isSharded(): boolean {
    return this.#options.zero;
  }

  /** What this rank's optimizer updates, in the model's order: parameters, or this rank's parts of them. */
  get trained(): readonly (Parameter | ParameterPart)[] {
    if (!this.isSharded) return this.#parameters;
    return this.#parameters.map((parameter) => this.#parts.get(parameter)!).filter(({ from, to }) => to > from);
  }

  /** One for each parameter, for the norm: whole gradients, or this rank's parts of them, which may be empty. */
  get gradients(): readonly Tensor[] {
    const source = this.isSharded ? this.#parameters.map((one) => this.#parts.get(one)!) : this.#parameters;
    return source.flatMap(({ gradient }) => (gradient ? [gradient] : []));
  }

  /** Before the forward pass of a micro-batch. Only after the last one of a step are gradients sent. */
  begin(isLast: boolean): void {
    this.#isReducing = isLast;
    this.#sent = 0;
    this.#buckets.forEach(({ places }, index) => {
      this.#missing[index] = places.length;
    });
  }

  /** After the last backward pass: what is launched from here on finds the sums. */
  finish(): void {
    while (this.#sent < this.#buckets.length) this.#send(this.#sent);
    this.#collectives.join();
    this.#wires.forEach((wire, index) => {
      const { flat, partSize } = this.#buckets[index];
      const { rank } = this.#collectives;
      const [first, last] = this.isSharded ? [rank * partSize, (rank + 1) * partSize] : [0, flat.size];
      castInto(this.#device, wire.rows(first, last), flat.rows(first, last));
    });
    this.#isReducing = false;
  }

  /** Sums over this rank's parts (f64, of any shape) become sums over all. */
  reduceSums(sums: Tensor): void {
    if (!this.isSharded) return;
    this.#collectives.allReduce(span(sums));
    this.#collectives.join();
  }

  /** After the update: every rank gets the new values of all parts. The gradients' memory carries them. */
  shareValues(): void {
    if (!this.isSharded) return;
    const { rank } = this.#collectives;
    for (const bucket of this.#buckets) {
      for (const place of bucket.places) {
        const { from, to, value } = this.#parts.get(place.parameter)!;
        if (to > from) bucket.view(place, from, to).copyFrom(value);
      }
      this.#collectives.allGather(span(bucket.part(rank)), span(bucket.flat));
    }
    this.#collectives.join();
    for (const bucket of this.#buckets) for (const place of bucket.places) this.#take(bucket, place);
  }

  free(): void {
    for (const wire of this.#wires) wire.free();
    for (const bucket of this.#buckets) bucket.free();
  }

  #take(bucket: Bucket, place: Place): void {
    const { parameter } = place;
    const { value, rounded } = parameter;
    value.reshape([value.size]).copyFrom(bucket.view(place));
    if (rounded) castInto(this.#device, value, rounded);
    parameter.clearGradient(); // it is overwritten
  }

  #finished(index: number): void {
    if (!this.#isReducing) return;
    this.#missing[index] -= 1;
    if (!this.#options.overlap) return;
    while (this.#sent < this.#buckets.length && this.#missing[this.#sent] === 0) this.#send(this.#sent);
    this.#collectives.check(); // MPI moves on only when it is called
  }

  #send(index: number): void {
    this.#sent = index + 1;
    const bucket = this.#buckets[index];
    for (const { parameter } of bucket.places) parameter.fillGradient();
    const wire = this.#wires[index];
    if (wire) castInto(this.#device, bucket.flat, wire);
    const content = wire ?? bucket.flat;
    if (!this.isSharded) {
      this.#collectives.allReduce(span(content));
      return;
    }
    const first = this.#collectives.rank * bucket.partSize;
    this.#collectives.reduceScatter(span(content), span(content.rows(first, first + bucket.partSize)));
  }
}

function span(tensor: Tensor): Span {
  return { address: tensor.pointer, count: tensor.size, dtype: tensor.dtype };
}
