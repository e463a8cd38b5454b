/**
 * Gradients in a few large pieces of memory, so that ranks exchange pieces and not hundreds of tensors. The pieces follow
 * the backward pass: the last layer's gradients are finished first, and lie in the first bucket.
 */
import type { Device } from '../device/device.js';
import type { Parameter } from '../tensor/parameter.js';
import { Tensor } from '../tensor/tensor.js';

/** Every gradient begins at a multiple of this many numbers: 256 bytes, what vector loads and matrix products like best. */
const ALIGNMENT = 64;
const F32_BYTES = 4;

/** Where a parameter lies in its bucket. */
export interface Place {
  readonly parameter: Parameter;
  readonly offset: number;
  readonly size: number;
}

export class Bucket {
  readonly places: readonly Place[];
  /** f32; its size is a multiple of the world's, the rest behind the last gradient is zero. */
  readonly flat: Tensor;
  /** Numbers of one rank's part. */
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

  /** A gradient in the bucket, or its numbers `from` to `to`, as a row. */
  view({ offset, size }: Place, from = 0, to = size): Tensor {
    return this.flat.rows(offset + from, offset + to);
  }

  /** The part of a rank. */
  part(rank: number): Tensor {
    return this.flat.rows(rank * this.partSize, (rank + 1) * this.partSize);
  }

  /** Which numbers of a parameter lie in a rank's part; empty when none do. */
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

/** Buckets of about so many bytes, in the order in which a backward pass finishes them. */
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
