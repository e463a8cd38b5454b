/**
 * Many tensors of different sizes for one launch: a record of each in device memory, and the list of their pieces, one
 * for each block of threads. Both are uploaded only when they change, so a training step in steady state uploads
 * nothing.
 */
import { areSameBytes } from '../../bytes.js';
import type { Device } from '../../device/device.js';
import { Tensor } from '../../tensor/tensor.js';

/** Elements of a piece; the kernels use the same constant. */
export const PIECE = 2 ** 14;

/** The entry of one tensor, or of several of one size: 64-bit words, each an address or a float64. */
export interface TableRow {
  readonly size: number;
  readonly words: readonly (bigint | number)[];
}

/** A record begins with the size and the index of the first piece; then come the words. */
const HEADER = 2;

export class TensorTable {
  readonly #device: Device;
  #content: Uint8Array = new Uint8Array();
  #records: Tensor | null = null;
  #pieces: Tensor | null = null;
  #pieceCount = 0;

  constructor(device: Device) {
    this.#device = device;
  }

  /** i64 or f64 [rows][2 + words], as raw bytes. */
  get records(): Tensor {
    return this.#records!;
  }

  /** i32 [pieces][2]: the row, and which piece of its tensor. */
  get pieces(): Tensor {
    return this.#pieces!;
  }

  get pieceCount(): number {
    return this.#pieceCount;
  }

  update(rows: readonly TableRow[]): void {
    const content = encode(rows);
    if (this.#records && areSameBytes(content, this.#content)) return;
    this.free();
    this.#content = content;
    const counts = rows.map(({ size }) => Math.ceil(size / PIECE));
    const pieces = counts.flatMap((count, row) => Array.from({ length: count }, (_, piece) => [row, piece]));
    this.#pieceCount = pieces.length;
    this.#records = Tensor.empty(this.#device, [content.byteLength / 4], 'i32');
    this.#records.writeBytes(content);
    this.#pieces = Tensor.from(this.#device, Int32Array.from(pieces.flat()), [pieces.length, 2], 'i32');
  }

  free(): void {
    this.#records?.free();
    this.#pieces?.free();
    this.#records = this.#pieces = null;
  }
}

function encode(rows: readonly TableRow[]): Uint8Array {
  const words = rows.length === 0 ? 0 : HEADER + rows[0].words.length;
  const view = new DataView(new ArrayBuffer(8 * words * rows.length));
  let firstPiece = 0;
  rows.forEach(({ size, words: own }, row) => {
    [BigInt(size), BigInt(firstPiece), ...own].forEach((word, i) => {
      const at = 8 * (row * words + i);
      if (typeof word === 'bigint') view.setBigUint64(at, word, true);
      else view.setFloat64(at, word, true);
    });
    firstPiece += Math.ceil(size / PIECE);
  });
  return new Uint8Array(view.buffer);
}
