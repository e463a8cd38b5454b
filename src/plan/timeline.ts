/**
 * One backward pass and the exchange of its gradients. The parts of a model finish one after the other, and the bytes of
 * their gradients with them; as soon as a bucket has all of its gradients it is sent, one bucket at a time, while the pass
 * goes on. What is still to send when the pass has ended is exposed: everybody waits for it.
 */

/** A part of the model, in the order of the backward pass. */
export interface Part {
  readonly name: string;
  /** Of its backward pass. */
  readonly seconds: number;
  /** Bytes of each of its gradients on the wire, in the order of the pass; they are ready evenly over its time. */
  readonly gradients: readonly number[];
}

export interface Exchange {
  readonly buckets: number;
  /** All buckets, one after the other. */
  readonly communication: number;
  /** What is left of it after the backward pass. */
  readonly exposed: number;
}

export function exchange(parts: readonly Part[], bucketBytes: number, send: (bytes: number) => number): Exchange {
  let communication = 0;
  let free = 0; // when the wire is
  const buckets = readyTimes(parts, bucketBytes);
  for (const { at, bytes } of buckets) {
    const seconds = send(bytes);
    communication += seconds;
    free = Math.max(free, at) + seconds;
  }
  const backward = parts.reduce((sum, { seconds }) => sum + seconds, 0);
  // The wire and the pass are summed in different orders: less than a picosecond is rounding.
  const exposed = free - backward;
  return { buckets: buckets.length, communication, exposed: exposed > 1e-12 ? exposed : 0 };
}

/** When the last gradient of each bucket is there. As in the trainer (makeBuckets) no gradient is cut: a large one is alone. */
function readyTimes(parts: readonly Part[], bucketBytes: number): { at: number; bytes: number }[] {
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
