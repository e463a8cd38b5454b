/** A part of one dimension in float64: an array of [outer, size, inner], of which `start` to `end` are taken. */

export interface Part {
  readonly size: number;
  readonly inner: number;
  readonly start: number;
  readonly end: number;
}

export function sliceForward(x: Float64Array, part: Part): Float64Array {
  return x.filter((_, i) => isInside(i, part));
}

export function sliceBackward(count: number, part: Part, dy: Float64Array): Float64Array {
  let at = 0;
  return Float64Array.from({ length: count }, (_, i) => (isInside(i, part) ? dy[at++] : 0));
}

function isInside(i: number, { size, inner, start, end }: Part): boolean {
  const place = Math.floor(i / inner) % size;
  return place >= start && place < end;
}
