/** Batches of a program, from any iterable, as a loader for `Trainer`. */

import { type Batch, IGNORED_TARGET } from '../data/batch.js';
import type { Loader } from '../data/loader.js';
import { TrefoilError, UsageError } from '../errors.js';
import * as z from '../zod.js';

/** Token windows and their targets; what is optional is derived. */
export type TokenBatch = Pick<Batch, 'inputs' | 'targets' | 'cuSeqlens'> & Partial<Batch>;

/** An iterable of batches has no more of them. */
export class DataEnded extends TrefoilError {}

/** Fills in the fields that a batch may leave out. */
export function completeBatch(batch: TokenBatch): Batch {
  const targetCount =
    batch.targetCount ?? batch.targets.reduce((count, id) => count + Number(id !== IGNORED_TARGET), 0);
  return { epoch: 0, sampleIds: [], ...batch, targetCount };
}

const iterableState = z.strictObject({ kind: z.literal('iterable'), batches: z.int().min(0) });

/** A loader over an iterable. Its position is a count: a resumed run skips as many batches of an equal iterable. */
export class IterableLoader implements Loader {
  readonly vocabSize = 0;
  readonly source = 'iterable';
  readonly tokensPerEpoch = Number.POSITIVE_INFINITY;
  readonly samplesPerEpoch = Number.POSITIVE_INFINITY;
  readonly validationSamples = 0;
  readonly #iterator: AsyncIterator<TokenBatch> | Iterator<TokenBatch>;
  #ready: Batch[] = [];
  /** Handed out since the last call of `state`, for `restore`. */
  #recent: Batch[] = [];
  #taken = 0;
  #skip = 0;

  constructor(source: AsyncIterable<TokenBatch> | Iterable<TokenBatch>) {
    this.#iterator = Symbol.asyncIterator in source ? source[Symbol.asyncIterator]() : source[Symbol.iterator]();
  }

  async ready(batches: number): Promise<void> {
    while (this.#skip > 0 || this.#ready.length < batches) {
      const { done, value } = await this.#iterator.next();
      if (done) throw new DataEnded('the iterable of batches has ended');
      if (this.#skip > 0) this.#skip -= 1;
      else this.#ready.push(completeBatch(value));
    }
  }

  next(): Batch {
    const batch = this.#ready.shift();
    if (!batch) throw new DataEnded('no batch is ready');
    this.#taken += 1;
    this.#recent.push(batch);
    return batch;
  }

  state(): z.infer<typeof iterableState> {
    this.#recent = [];
    return { kind: 'iterable', batches: this.#taken };
  }

  restore(state: unknown): void {
    const parsed = iterableState.safeParse(state);
    if (!parsed.success) throw new UsageError('checkpoint: the data position is not that of an iterable of batches');
    const back = this.#taken - parsed.data.batches;
    if (back > this.#recent.length) throw new UsageError('an iterable of batches cannot go back; pass a new one');
    if (back > 0) this.#ready.unshift(...this.#recent.slice(-back));
    else this.#skip = -back;
    this.#taken = parsed.data.batches;
    this.#recent = [];
  }

  evalBatches(): Iterable<Batch> {
    return [];
  }

  close(): void {}
}
