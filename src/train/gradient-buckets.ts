/**
 * Gradients in a few large buffers, so that ranks exchange buffers instead of hundreds of tensors. Buckets follow the
 * backward pass: the gradients of the last layer are finished first and lie in the first bucket.
 */
import type { Device } from '../device/device.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tensor } from '../tensor/tensor.js';

/** Elements: each gradient starts at a multiple of 256 bytes, for aligned vector loads. */
const ALIGNMENT = 64;
const F32_BYTES = 4;

/** The position of a parameter in its bucket, in elements. */
export interface Place {
  readonly parameter: Parameter;
  readonly offset: number;
  readonly size: number;
}

export class Bucket {
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
