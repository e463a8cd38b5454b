/**
 * Shared memory in which worker threads put samples for the trainer: one ring buffer of slots per lane.
 *
 * The trainer grants a lane a number of samples (back-pressure), the worker that owns the lane produces up to it, and the
 * trainer takes them in order. A slot holds S + 1 tokens and the cursor after them, so the trainer's position depends only
 * on what it has taken. Both sides wait without polling: the trainer on `signal` or for a message, a worker for a message.
 * Lane l belongs to worker l mod W.
 */

import type { Cursor } from '../sources/documents.js';

export interface RingShape {
  readonly lanes: number;
  readonly slots: number;
  readonly sequenceLength: number;
  readonly workers: number;
}

export interface RingMemory extends RingShape {
  readonly control: SharedArrayBuffer;
  readonly numbers: SharedArrayBuffer;
  readonly tokens: SharedArrayBuffer;
}

/** Int32 of the control block: these, then `LANE_FIELDS` per lane, then `WORKER_FIELDS` per worker. */
const SIGNAL = 0;
const FAILED = 1;
const HEAD = 2;
const LANE_FIELDS = 4;
const GRANTED = 0;
const PRODUCED = 1;
const ENDED = 2;
/** Number of samples that the trainer waits for. */
const WANTED = 3;
const WORKER_FIELDS = 2;
/** The worker sleeps; the trainer waits for a message of this worker. */
const ASLEEP = 0;
const AWAITED = 1;
/** Float64 per slot: the cursor and the epoch. */
const SLOT_NUMBERS = 5;
/** Float64 per worker: documents and bytes. */
const WORKER_NUMBERS = 2;

export function createRing(shape: RingShape): RingMemory {
  const { lanes, slots, sequenceLength, workers } = shape;
  return {
    ...shape,
    control: new SharedArrayBuffer(4 * (HEAD + LANE_FIELDS * lanes + WORKER_FIELDS * workers)),
    numbers: new SharedArrayBuffer(8 * (SLOT_NUMBERS * lanes * slots + WORKER_NUMBERS * workers)),
    tokens: new SharedArrayBuffer(4 * lanes * slots * (sequenceLength + 1)),
  };
}

export class Ring {
  readonly shape: RingShape;
  readonly #control: Int32Array;
  readonly #numbers: Float64Array;
  readonly #tokens: Int32Array;

  constructor(memory: RingMemory) {
    this.shape = memory;
    this.#control = new Int32Array(memory.control);
    this.#numbers = new Float64Array(memory.numbers);
    this.#tokens = new Int32Array(memory.tokens);
  }

  granted(lane: number): number {
    return Atomics.load(this.#control, this.#field(lane, GRANTED));
  }

  produced(lane: number): number {
    return Atomics.load(this.#control, this.#field(lane, PRODUCED));
  }

  hasEnded(lane: number): boolean {
    return Atomics.load(this.#control, this.#field(lane, ENDED)) === 1;
  }

  get failed(): boolean {
    return Atomics.load(this.#control, FAILED) === 1;
  }

  /** Trainer: allows samples below number `upTo`. Returns true if the worker sleeps and must be woken. */
  grant(lane: number, upTo: number): boolean {
    Atomics.store(this.#control, this.#field(lane, GRANTED), upTo);
    return Atomics.exchange(this.#control, this.#flag(this.workerOf(lane), ASLEEP), 0) === 1;
  }

  workerOf(lane: number): number {
    return lane % this.shape.workers;
  }

  /** Worker: announces that it will wait for a message. It must check the grants once more before it waits. */
  announceSleep(worker: number): void {
    Atomics.store(this.#control, this.#flag(worker, ASLEEP), 1);
  }

  window(lane: number, sample: number): Int32Array {
    const length = this.shape.sequenceLength + 1;
    const start = this.#slot(lane, sample) * length;
    return this.#tokens.subarray(start, start + length);
  }

  /** Worker: the sample in `window(lane, sample)` is complete. Returns true if the trainer waits for a message. */
  publish(lane: number, sample: number, cursor: Cursor, epoch: number): boolean {
    const at = this.#slot(lane, sample) * SLOT_NUMBERS;
    this.#numbers[at] = cursor.turn;
    this.#numbers[at + 1] = cursor.block;
    this.#numbers[at + 2] = cursor.document;
    this.#numbers[at + 3] = cursor.token;
    this.#numbers[at + 4] = epoch;
    Atomics.store(this.#control, this.#field(lane, PRODUCED), sample + 1);
    return this.#tellTrainer(lane);
  }

  end(lane: number): boolean {
    Atomics.store(this.#control, this.#field(lane, ENDED), 1);
    return this.#tellTrainer(lane);
  }

  fail(): void {
    Atomics.store(this.#control, FAILED, 1);
    this.#wakeTrainer();
  }

  /** The cursor after a sample, and its epoch. */
  place(lane: number, sample: number): { cursor: Cursor; epoch: number } {
    const at = this.#slot(lane, sample) * SLOT_NUMBERS;
    const [turn, block, document, token, epoch] = this.#numbers.subarray(at, at + SLOT_NUMBERS);
    return { cursor: { turn, block, document, token }, epoch };
  }

  /** Counter that every event increments, for `waitForNews`. */
  get news(): number {
    return Atomics.load(this.#control, SIGNAL);
  }

  /** Blocks this thread until an event after `seen`, or until the timeout. */
  waitForNews(seen: number, ms: number): void {
    Atomics.wait(this.#control, SIGNAL, seen, ms);
  }

  /**
   * Trainer: asks every worker to send a message when it has produced `wanted` samples of each of its lanes (0: none). A
   * message costs far more than a sample, so there is one for all lanes of a worker.
   */
  announceWait(wanted: readonly number[]): void {
    for (const [lane, count] of wanted.entries()) Atomics.store(this.#control, this.#field(lane, WANTED), count);
    for (let worker = 0; worker < this.shape.workers; worker++)
      if (!this.#hasWanted(worker)) Atomics.store(this.#control, this.#flag(worker, AWAITED), 1);
  }

  count(worker: number, documents: number, bytes: number): void {
    const at = this.#workerNumbers(worker);
    this.#numbers[at] = documents;
    this.#numbers[at + 1] = bytes;
  }

  /** Totals over all workers. */
  get counts(): { documents: number; bytes: number } {
    const total = { documents: 0, bytes: 0 };
    for (let worker = 0; worker < this.shape.workers; worker++) {
      const at = this.#workerNumbers(worker);
      total.documents += this.#numbers[at];
      total.bytes += this.#numbers[at + 1];
    }
    return total;
  }

  #wakeTrainer(): void {
    Atomics.add(this.#control, SIGNAL, 1);
    Atomics.notify(this.#control, SIGNAL);
  }

  #tellTrainer(lane: number): boolean {
    this.#wakeTrainer();
    const worker = this.workerOf(lane);
    const flag = this.#flag(worker, AWAITED);
    if (Atomics.load(this.#control, flag) === 0 || !this.#hasWanted(worker)) return false;
    return Atomics.exchange(this.#control, flag, 0) === 1;
  }

  #hasWanted(worker: number): boolean {
    for (let lane = worker; lane < this.shape.lanes; lane += this.shape.workers) {
      const wanted = Atomics.load(this.#control, this.#field(lane, WANTED));
      if (this.produced(lane) < wanted && !this.hasEnded(lane)) return false;
    }
    return true;
  }

  #field(lane: number, field: number): number {
    return HEAD + LANE_FIELDS * lane + field;
  }

  #flag(worker: number, flag: number): number {
    return HEAD + LANE_FIELDS * this.shape.lanes + WORKER_FIELDS * worker + flag;
  }

  #slot(lane: number, sample: number): number {
    return lane * this.shape.slots + (sample % this.shape.slots);
  }

  #workerNumbers(worker: number): number {
    const { lanes, slots } = this.shape;
    return SLOT_NUMBERS * lanes * slots + WORKER_NUMBERS * worker;
  }
}
