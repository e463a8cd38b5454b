/**
 * The timeline of a backward pass and its gradient exchange. A bucket is sent as soon as all its gradients are ready, one
 * bucket at a time, during the pass. Communication after the end of the pass is exposed: all ranks wait for it.
 */

/** A part of the model, in backward order. */
export interface ModelPart {
  readonly name: string;
  /** Seconds of its backward pass. */
  readonly seconds: number;
  /** Bytes of each gradient on the wire, in backward order; they become ready evenly over its time. */
  readonly gradients: readonly number[];
}

export interface Exchange {
  readonly buckets: number;
  /** Seconds of all buckets in sequence. */
  readonly communication: number;
  /** Part of it after the end of the backward pass. */
  readonly exposed: number;
}

export function exchange(parts: readonly ModelPart[], bucketBytes: number, send: (bytes: number) => number): Exchange {
  let communication = 0;
  let free = 0; // when the wire is
  const buckets = readyTimes(parts, bucketBytes);
  for (const { at, bytes } of buckets) {
    const seconds = send(bytes);
    communication += seconds;
    free = Math.max(free, at) + seconds;
  }
  const backward = parts.reduce((sum, { seconds }) => sum + seconds, 0);
  // Differences below a picosecond are rounding: the sums have different orders.
  const exposed = free - backward;
  return { buckets: buckets.length, communication, exposed: exposed > 1e-12 ? exposed : 0 };
}

/** The time at which each bucket is complete. Gradients are not split: a large one is a bucket of its own (makeBuckets). */
function readyTimes(parts: readonly ModelPart[], bucketBytes: number): { at: number; bytes: number }[] {
  const buckets: { at: number; bytes: number }[] = [];
  let began = 0;
  for (const { seconds, gradients } of parts) {
    const all = gradients.reduce((sum, bytes) => sum + bytes, 0);
    let finished = 0;
    for (const bytes of gradients) {
      finished += bytes;
      const at = began + (all === 0 ? 1 : finished / all) * seconds;
      const open = buckets.at(-1);
      if (open && open.bytes + bytes <= bucketBytes) Object.assign(open, { at, bytes: open.bytes + bytes });
      else buckets.push({ at, bytes });
    }
    began += seconds;
  }
  return buckets;
}
