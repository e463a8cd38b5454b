/**
 * Where worker threads leave samples for the trainer: shared memory, one ring of slots per lane.
 *
 * The trainer grants a lane a number of samples, the worker that owns the lane produces up to it, the trainer takes them in
 * order. A slot holds S + 1 tokens and the cursor behind them, so the trainer's position is always that of what it has
 * taken, whatever else lies ready. Both sides wait without polling: the trainer on `signal`, a worker for a message.
 */

import type { Cursor } from '../corpus/documents.js';

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

/** Int32 of the control block: these, then `LANE_FIELDS` per lane, then one flag per worker. */
const SIGNAL = 0;
const WAITING = 1;
const FAILED = 2;
const HEAD = 3;
const LANE_FIELDS = 3;
const GRANTED = 0;
const PRODUCED = 1;
const ENDED = 2;
/** Float64 per slot: the cursor and the epoch. */
const SLOT_NUMBERS = 5;
/** Float64 per worker: documents and bytes. */
const WORKER_NUMBERS = 2;

export function createRing(shape: RingShape): RingMemory {
  const { lanes, slots, sequenceLength, workers } = shape;
  return {
    ...shape,
    control: new SharedArrayBuffer(4 * (HEAD + LANE_FIELDS * lanes + workers)),
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

  /** The trainer's side: sample numbers below `upTo` may be produced. True when the worker sleeps and must be woken. */
  grant(lane: number, upTo: number, worker: number): boolean {
    Atomics.store(this.#control, this.#field(lane, GRANTED), upTo);
    return Atomics.exchange(this.#control, this.#sleepFlag(worker), 0) === 1;
  }

  /** The worker's side: says that it will wait for a message; it must look at the grants once more before it does. */
  announceSleep(worker: number): void {
    Atomics.store(this.#control, this.#sleepFlag(worker), 1);
  }

  window(lane: number, sample: number): Int32Array {
    const length = this.shape.sequenceLength + 1;
    const start = this.#slot(lane, sample) * length;
    return this.#tokens.subarray(start, start + length);
  }

  /** Worker: the sample in `window(lane, sample)` is complete. True when the trainer waits for a message about it. */
  publish(lane: number, sample: number, cursor: Cursor, epoch: number): boolean {
    const at = this.#slot(lane, sample) * SLOT_NUMBERS;
    this.#numbers.set([cursor.turn, cursor.block, cursor.document, cursor.token, epoch], at);
    Atomics.store(this.#control, this.#field(lane, PRODUCED), sample + 1);
    return this.#tellTrainer(lane);
  }

  end(lane: number): boolean {
    Atomics.store(this.#control, this.#field(lane, ENDED), 1);
    return this.#tellTrainer(lane);
  }

  fail(): boolean {
    Atomics.store(this.#control, FAILED, 1);
    this.#wakeTrainer();
    return Atomics.exchange(this.#control, WAITING, 0) !== 0;
  }

  /** The cursor behind a sample, and its epoch. */
  place(lane: number, sample: number): { cursor: Cursor; epoch: number } {
    const at = this.#slot(lane, sample) * SLOT_NUMBERS;
    const [turn, block, document, token, epoch] = this.#numbers.subarray(at, at + SLOT_NUMBERS);
    return { cursor: { turn, block, document, token }, epoch };
  }

  /** For a wait: the number to compare with; any news changes it. */
  get news(): number {
    return Atomics.load(this.#control, SIGNAL);
  }

  /** Blocks this thread until there is news since `seen`, or the time is over. */
  waitForNews(seen: number, ms: number): void {
    Atomics.wait(this.#control, SIGNAL, seen, ms);
  }

  /** Trainer: the next news of this lane must also come as a message. A message costs far more than a sample. */
  announceWait(lane: number): void {
    Atomics.store(this.#control, WAITING, lane + 1);
  }

  count(worker: number, documents: number, bytes: number): void {
    this.#numbers.set([documents, bytes], this.#workerNumbers(worker));
  }

  /** Of all workers. */
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
    return Atomics.compareExchange(this.#control, WAITING, lane + 1, 0) === lane + 1;
  }

  #field(lane: number, field: number): number {
    return HEAD + LANE_FIELDS * lane + field;
  }

  #sleepFlag(worker: number): number {
    return HEAD + LANE_FIELDS * this.shape.lanes + worker;
  }

  #slot(lane: number, sample: number): number {
    return lane * this.shape.slots + (sample % this.shape.slots);
  }

  #workerNumbers(worker: number): number {
    const { lanes, slots } = this.shape;
    return SLOT_NUMBERS * lanes * slots + WORKER_NUMBERS * worker;
  }
}
