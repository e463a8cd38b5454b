/**
 * SHA-256 in a thread of its own, so that a large file is hashed while its next piece is read and written. The caller
 * stays synchronous: pieces are copied to a ring in shared memory, and `update` waits only if the ring is full.
 */
import { Worker } from 'node:worker_threads';

const SLOTS = 4;
const SLOT_BYTES = 4 << 20;
/** Control words: slots filled, slots hashed, then the length of each slot; a length of -1 asks for the digest. */
const FILLED = 0;
const HASHED = 1;
const LENGTHS = 2;
const DIGEST_BYTES = 32;
/** A thread that has not moved for so long has died: it hashes a slot in milliseconds. */
const PATIENCE_MS = 120_000;

/** The digest is written to the first slot. */
const THREAD = `
const { workerData: { control, memory, slots, slotBytes } } = require('node:worker_threads');
const hash = require('node:crypto').createHash('sha256');
const bytes = new Uint8Array(memory);
for (let done = 0, isOpen = true; isOpen; ) {
  Atomics.wait(control, ${FILLED}, done);
  const slot = done % slots;
  const length = Atomics.load(control, ${LENGTHS} + slot);
  isOpen = length >= 0;
  if (isOpen) hash.update(bytes.subarray(slot * slotBytes, slot * slotBytes + length));
  else bytes.set(hash.digest());
  done += 1;
  Atomics.store(control, ${HASHED}, done);
  Atomics.notify(control, ${HASHED});
}`;

export class HashThread {
  readonly #memory = new Uint8Array(new SharedArrayBuffer(SLOTS * SLOT_BYTES));
  readonly #control = new Int32Array(new SharedArrayBuffer((LENGTHS + SLOTS) * 4));
  readonly #worker: Worker;
  #filled = 0;

  constructor() {
    const workerData = { control: this.#control, memory: this.#memory.buffer, slots: SLOTS, slotBytes: SLOT_BYTES };
    this.#worker = new Worker(THREAD, { eval: true, execArgv: [], env: {}, workerData, name: 'trefoil-hash' });
    this.#worker.unref();
  }

  /** Copies the piece; it may change afterwards. */
  update(piece: Uint8Array): void {
    for (let at = 0; at < piece.length; at += SLOT_BYTES) {
      const part = piece.subarray(at, at + SLOT_BYTES);
      this.#waitFor(this.#filled - SLOTS + 1);
      this.#memory.set(part, (this.#filled % SLOTS) * SLOT_BYTES);
      this.#hand(part.length);
    }
  }

  /** The hash of all pieces, hexadecimal. The thread ends. */
  digest(): string {
    this.#waitFor(this.#filled);
    this.#hand(-1);
    this.#waitFor(this.#filled);
    return Buffer.from(this.#memory.slice(0, DIGEST_BYTES)).toString('hex');
  }

  /** Ends the thread without a digest. */
  free(): void {
    void this.#worker.terminate();
  }

  #hand(length: number): void {
    Atomics.store(this.#control, LENGTHS + (this.#filled % SLOTS), length);
    this.#filled += 1;
    Atomics.store(this.#control, FILLED, this.#filled);
    Atomics.notify(this.#control, FILLED);
  }

  /** Until `count` slots are hashed. */
  #waitFor(count: number): void {
    for (let hashed = Atomics.load(this.#control, HASHED); hashed < count; ) {
      if (Atomics.wait(this.#control, HASHED, hashed, PATIENCE_MS) === 'timed-out')
        throw new Error(`the thread that hashes a file does not answer (${hashed} of ${this.#filled} pieces)`);
      hashed = Atomics.load(this.#control, HASHED);
    }
  }
}
