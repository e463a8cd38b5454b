/**
 * One backward pass and the exchange of its gradients. The parts of a model finish one after the other, and the bytes of
 * their gradients with them; as soon as a bucket is full it is sent, one bucket at a time, while the pass goes on. What is
 * still to send when the pass has ended is exposed: everybody waits for it.
 */

/** A part of the model, in the order of the backward pass. */
export interface Part {
  readonly name: string;
  /** Of its backward pass. */
  readonly seconds: number;
  /** Of its gradients on the wire; they are ready evenly over its time. */
  readonly bytes: number;
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

/** When each bucket is full; the last one takes what is left. */
function readyTimes(parts: readonly Part[], bucketBytes: number): { at: number; bytes: number }[] {
  const buckets: { at: number; bytes: number }[] = [];
  let began = 0;
  let filled = 0; // bytes in the open bucket
  for (const { seconds, bytes } of parts) {
    let used = 0;
    while (bytes - used >= bucketBytes - filled) {
      used += bucketBytes - filled;
      buckets.push({ at: began + (used / bytes) * seconds, bytes: bucketBytes });
      filled = 0;
    }
    filled += bytes - used;
    began += seconds;
  }
  if (filled > 0) buckets.push({ at: began, bytes: filled });
  return buckets;
}
