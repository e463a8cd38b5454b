/**
 * Data parallel training: each rank computes the gradients of its own batches, and the optimizer gets the sums over all
 * ranks. A bucket of gradients is sent as soon as the backward pass has finished it, while the pass continues.
 *
 * With `zero` (ZeRO-1) a rank receives the sums of its own part of every bucket, keeps optimizer state for that part only,
 * updates it, and then the ranks exchange the new values.
 *
 * Nothing here waits for the device: on a GPU all of it can be recorded in a graph. Order of calls:
 *
 *   for each micro-batch: begin(isLast); forward; backward
 *   finish();                             // sums are in the parameters' gradients, or in this rank's parts of them
 *   norms of `gradients`, reduceSums(norms), optimizer over `trained`
 *   shareValues();                        // a no-op without zero
 */
import type { Config } from '../config/schema.js';
import type { Collectives } from '../device/collectives.js';
import type { Device, DeviceKind } from '../device/device.js';
import { castInto } from '../ops/cast/op.js';
import type { Trainable } from '../tensor/optimizer.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tensor } from '../tensor/tensor.js';
import { type GradientExchange, LocalGradients } from './gradient-exchange.js';
import { span } from './ranks/agreement.js';
import type { World } from './ranks/world.js';

const MIB = 2 ** 20;
/** On CPUs, pieces that fit into a core's cache are summed twice as fast; GPUs and their networks prefer larger ones. */
const BUCKET_MIB: Record<DeviceKind, number> = { cpu: 2, cuda: 16 };
/** Safe mode (train.ddp_safe): no overlap, and pieces small enough for the buffers of any network. */
const SAFE_BUCKET_BYTES = MIB;

/** The gradient exchange of a world, with the config's settings. */
export function createExchange(
  world: World,
  device: Device,
  parameters: readonly Parameter[],
  { train }: Config,
): GradientExchange {
  if (world.collectives === null) return new LocalGradients(parameters);
  const mib = train.bucket_mb ?? BUCKET_MIB[device.kind];
  return new DataParallel(device, world.collectives, parameters, {
    bucketBytes: train.ddp_safe ? Math.min(SAFE_BUCKET_BYTES, mib * MIB) : mib * MIB,
    overlap: !train.ddp_safe,
    wire: train.wire === 'bf16' ? 'bf16' : 'f32',
    zero: train.zero === 1,
  });
}

export interface DataParallelOptions {
  /** Approximate size of a message, in bytes. */
  readonly bucketBytes: number;
  /** Send buckets during the backward pass; false sends all of them after it. */
  readonly overlap: boolean;
  /** Number format of the messages. */
  readonly wire: 'f32' | 'bf16';
  /** ZeRO-1: each rank keeps the optimizer state of its own part only. */
  readonly zero: boolean;
}

/** The elements `from` to `to` of a parameter. */
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

export class DataParallel implements GradientExchange {
  /** A graph replays the exchange too, so all ranks must replay or launch alike. */
  readonly allowsUnequalShapes = false;
  readonly #device: Device;
  readonly #collectives: Collectives;
  readonly #parameters: readonly Parameter[];
  readonly #options: DataParallelOptions;
  readonly #buckets: readonly Bucket[];
  /** Send buffers in the wire's format; empty if buckets are sent as they are. */
  readonly #wires: readonly Tensor[];
  /** Gradients that each bucket still waits for in this backward pass. */
  readonly #missing: number[];
  /** This rank's part of each parameter; may be empty. */
  readonly #parts = new Map<Parameter, ParameterPart>();
  #isReducing = false;
  /** Buckets sent so far. All ranks send them in the same order, whichever is finished first. */
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

  get isSharded(): boolean {
    return this.#options.zero;
  }

  /** In the model's order. */
  get trained(): readonly (Parameter | ParameterPart)[] {
    if (!this.isSharded) return this.#parameters;
    return this.#parameters.map((parameter) => this.#parts.get(parameter)!).filter(({ from, to }) => to > from);
  }

  /** One per parameter: whole gradients, or this rank's parts of them, which may be empty. */
  get gradients(): readonly Tensor[] {
    const source = this.isSharded ? this.#parameters.map((one) => this.#parts.get(one)!) : this.#parameters;
    return source.flatMap(({ gradient }) => (gradient ? [gradient] : []));
  }

  /** Call before the forward pass of a micro-batch. Gradients are sent only for the last one of a step. */
  begin(isLast: boolean): void {
    this.#isReducing = isLast;
    this.#sent = 0;
    this.#buckets.forEach(({ places }, index) => {
      this.#missing[index] = places.length;
    });
  }

  /** Call after the last backward pass: later launches see the sums. */
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

  /** Turns sums over this rank's parts (f64, any shape) into sums over all parts. */
  reduceSums(sums: Tensor): void {
    if (!this.isSharded) return;
    this.#collectives.allReduce(span(sums));
    this.#collectives.join();
  }

  /** Call after the update: every rank gets the new values of all parts, through the gradients' memory. */
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
    this.#collectives.check(); // MPI makes progress only inside calls
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

/** Elements: each gradient starts at a multiple of 256 bytes, for aligned vector loads. */
const ALIGNMENT = 64;
const F32_BYTES = 4;

/** The position of a parameter in its bucket, in elements. */
interface Place {
  readonly parameter: Parameter;
  readonly offset: number;
  readonly size: number;
}

/**
 * Gradients in one large buffer, so that ranks exchange buffers instead of hundreds of tensors. Buckets follow the backward
 * pass: the gradients of the last layer are finished first and lie in the first bucket.
 */
class Bucket {
  readonly places: readonly Place[];
  /** f32; its size is a multiple of the number of ranks, padded with zeros. */
  readonly flat: Tensor;
  /** Elements of one rank's part. */
  readonly partSize: number;

  constructor(device: Device, parameters: readonly Parameter[], world: number) {
    let offset = 0;
    this.places = parameters.map((parameter) => {
      const place = { parameter, offset, size: parameter.value.size };
      offset = roundUp(offset + place.size, ALIGNMENT);
      return place;
    });
    this.partSize = roundUp(Math.ceil(offset / world), ALIGNMENT);
    this.flat = Tensor.zeros(device, [this.partSize * world]);
    for (const place of this.places) place.parameter.placeGradient(this.view(place));
  }

  /** A gradient in the bucket, or its elements `from` to `to`, as a flat tensor. */
  view({ offset, size }: Place, from = 0, to = size): Tensor {
    return this.flat.rows(offset + from, offset + to);
  }

  /** The part of a rank. */
  part(rank: number): Tensor {
    return this.flat.rows(rank * this.partSize, (rank + 1) * this.partSize);
  }

  /** The elements of a parameter that lie in a rank's part; may be empty. */
  share({ offset, size }: Place, rank: number): { from: number; to: number } {
    const from = Math.min(size, Math.max(0, rank * this.partSize - offset));
    const to = Math.min(size, Math.max(from, (rank + 1) * this.partSize - offset));
    return { from, to };
  }

  free(): void {
    for (const { parameter } of this.places) {
      parameter.onGradient = null;
      parameter.placeGradient(null);
    }
    this.flat.free();
  }
}

/** Buckets of about `bucketBytes`, in the order in which a backward pass finishes them. */
export function makeBuckets(
  device: Device,
  parameters: readonly Parameter[],
  world: number,
  bucketBytes: number,
): Bucket[] {
  const groups: Parameter[][] = [];
  let bytes = Number.POSITIVE_INFINITY;
  for (const parameter of [...parameters].reverse()) {
    const own = parameter.value.size * F32_BYTES;
    if (bytes + own > bucketBytes) {
      groups.push([]);
      bytes = 0;
    }
    groups.at(-1)!.push(parameter);
    bytes += own;
  }
  return groups.map((group) => new Bucket(device, group, world));
}

function roundUp(value: number, multiple: number): number {
  return Math.ceil(value / multiple) * multiple;
}
