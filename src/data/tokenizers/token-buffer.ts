/**
 * A growable, reusable buffer of token ids.
 *
 * @opaque
 */
export class TokenBuffer {
  /** Only the first `length` entries are valid. */
  ids: Int32Array;
  length = 0;

  constructor(capacity = 1024) {
    this.ids = new Int32Array(capacity);
  }

  /** Makes room for `count` more ids. Returns the array, which may be a new one. */
  reserve(count: number): Int32Array {
    const needed = this.length + count;
    if (needed > this.ids.length) {
      const larger = new Int32Array(Math.max(needed, 2 * this.ids.length));
      larger.set(this.ids.subarray(0, this.length));
      this.ids = larger;
    }
    return this.ids;
  }

  /** Adds one id at the end. */
  push(id: number): void {
    this.reserve(1)[this.length++] = id;
  }

  /** Adds these ids at the end. */
  append(ids: ArrayLike<number>): void {
    const { length } = this;
    const all = this.reserve(ids.length);
    // A loop, because most lists have one or two ids: TypedArray.set costs more than it saves.
    for (let i = 0; i < ids.length; i++) all[length + i] = ids[i];
    this.length = length + ids.length;
  }
}
