/** The UTF-16 units of texts in an array, which is faster to read than a string. */

/** The copy of a longer text is not kept for the next one. */
const KEPT_UNITS = 1 << 20;

export class UnitBuffer {
  #kept = new Uint16Array(0);

  /** Valid until the next call. The array may be longer than the text. */
  of(text: string): Uint16Array {
    const units = text.length <= this.#kept.length ? this.#kept : new Uint16Array(text.length);
    if (text.length <= KEPT_UNITS) this.#kept = units;
    Buffer.from(units.buffer).write(text, 'utf16le');
    return units;
  }
}
