/** A growable, reusable buffer of token ids. */
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

  /** Adds these ids at the end. */
  append(ids: Int32Array): void {
    this.reserve(ids.length).set(ids, this.length);
    this.length += ids.length;
  }
}
