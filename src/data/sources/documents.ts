/** Iterates over the documents of one lane, from any cursor on. */

import { UsageError } from '../../errors.js';
import { BlobOpener } from './blob.js';
import type { CorpusOrder, Unit } from './order.js';
import { openPart, type PartReader, type RawDocument } from './reader.js';

/** A position in the stream of a lane. All zero is its start. */
export interface Cursor {
  /** Number of parts that the lane has finished. */
  readonly turn: number;
  /** Position of the block in the part. */
  readonly block: number;
  /** Number of the document in the shuffled block. */
  readonly document: number;
  /** Tokens of that document that were used already. */
  readonly token: number;
}

export const START: Cursor = { turn: 0, block: 0, document: 0, token: 0 };

export interface PlacedDocument {
  readonly document: RawDocument;
  readonly turn: number;
  readonly block: number;
  readonly index: number;
  readonly epoch: number;
  readonly origin: string;
  /** Continues the document before it; goes on in the next one: parts of a very long text. */
  readonly continues: boolean;
  readonly isPartial: boolean;
}

/**
 * Which side of the split to read. `train` and `all` repeat epochs in the seeded order; `validation` and `once` (both
 * sides) read every part one time, in the order in which they are written.
 */
export type Side = 'train' | 'validation' | 'all' | 'once';

interface OpenBlock {
  readonly turn: number;
  readonly unit: Unit;
  readonly position: number;
  readonly next: number;
  readonly documents: readonly RawDocument[];
  readonly order: (index: number) => number;
  readonly continues: boolean;
  readonly isPartial: boolean;
}

/** The next block is fetched when this share of the current one is left: early, but two blocks share memory only briefly. */
const FETCH_AHEAD_SHARE = 0.25;

export class LaneDocuments {
  readonly #order: CorpusOrder;
  readonly #lane: number;
  readonly #side: Side;
  readonly #opener: BlobOpener;
  readonly #fetchAhead: boolean;
  #reader: { turn: number; reader: PartReader; unit: Unit } | undefined;
  #block: OpenBlock | undefined;
  #ahead: Promise<OpenBlock | undefined> | undefined;
  #start: Cursor;
  #index: number;
  /** Part of the last document returned. */
  #lastTurn: number;
  #ended = false;

  constructor(
    order: CorpusOrder,
    lane: number,
    options: { side: Side; cursor?: Cursor; fetchAhead?: boolean; opener?: BlobOpener },
  ) {
    this.#order = order;
    this.#lane = lane;
    this.#side = options.side;
    this.#opener = options.opener ?? new BlobOpener(order.spec);
    this.#fetchAhead = options.fetchAhead ?? true;
    this.#start = options.cursor ?? START;
    this.#index = this.#start.document;
    this.#lastTurn = this.#start.turn;
  }

  get #isOnce(): boolean {
    return this.#side === 'validation' || this.#side === 'once';
  }

  get #splits(): boolean {
    return this.#side === 'train' || this.#side === 'validation';
  }

  /** Undefined at the end, which only `validation` and `once` have. */
  async next(): Promise<PlacedDocument | undefined> {
    while (!this.#ended) {
      const block = this.#block ?? (await this.#advance());
      if (block === undefined) break;
      const placed = this.nextAtHand();
      if (placed !== undefined) return placed;
      this.#index = 0;
      this.#start = { turn: block.turn, block: block.next, document: 0, token: 0 };
      this.#block = undefined;
    }
    this.#ended = true;
    return undefined;
  }

  /** The next document of the block in memory; undefined if `next` must read another block. */
  nextAtHand(): PlacedDocument | undefined {
    const block = this.#block;
    if (block === undefined) return undefined;
    const { documents, unit, position, turn } = block;
    while (this.#index < documents.length) {
      const index = this.#index++;
      if (this.#fetchAhead && documents.length - index <= FETCH_AHEAD_SHARE * documents.length) this.#prefetch(block);
      const row = block.order(index);
      // The blocks of one long text are all on the side of the first.
      const place = block.continues || block.isPartial ? 0 : position;
      if (this.#splits && this.#order.isValidation(unit, place, row) !== (this.#side === 'validation')) continue;
      this.#lastTurn = turn;
      return {
        document: documents[row],
        turn,
        block: position,
        index,
        epoch: unit.epoch,
        origin: unit.file.name,
        continues: block.continues,
        isPartial: block.isPartial,
      };
    }
    return undefined;
  }

  async close(): Promise<void> {
    // The block that was being read ahead is discarded, and its error with it.
    await this.#ahead?.catch(() => {});
    await this.#reader?.reader.close();
  }

  async #advance(): Promise<OpenBlock | undefined> {
    this.#block = await (this.#ahead ?? this.#load(this.#start.turn, this.#start.block));
    this.#ahead = undefined;
    return this.#block;
  }

  #prefetch(block: OpenBlock): void {
    if (this.#ahead !== undefined) return;
    this.#ahead = this.#load(block.turn, block.next);
    // `#advance` throws the error; without this handler an unawaited rejection would crash the process.
    this.#ahead.catch(() => {});
  }

  /** The block at a position, or the first non-empty one after it. */
  async #load(turn: number, position: number): Promise<OpenBlock | undefined> {
    const once = this.#isOnce;
    for (let [at, from] = [turn, position]; ; at++, from = 0) {
      if (once && at >= this.#order.unitsPerEpoch) return undefined;
      this.#expectProgress(at);
      const { reader, unit } = await this.#open(at);
      for (let here = from; ; ) {
        const found = await reader.read(here);
        if (found === undefined) break;
        if (found.documents.length > 0) {
          const order = once ? (index: number) => index : this.#order.blockOrder(unit, here, found.documents.length);
          const { next, documents, continues = false, isPartial = false } = found;
          return { turn: at, unit, position: here, next, documents, order, continues, isPartial };
        }
        here = found.next;
      }
    }
  }

  /** Throws after whole epochs without a document: the search would never end. */
  #expectProgress(turn: number): void {
    const { unitsPerEpoch, spec } = this.#order;
    if (turn - this.#lastTurn <= 2 * unitsPerEpoch + 16) return;
    const others = spec.files.length > 1 ? ` and ${spec.files.length - 1} other files` : '';
    throw new UsageError(
      `no documents to train on in ${spec.files[0].name}${others}; name files with text, or lower data.val_fraction`,
    );
  }

  async #open(turn: number): Promise<{ reader: PartReader; unit: Unit }> {
    if (this.#reader?.turn === turn) return this.#reader;
    const unit = this.#isOnce ? this.#order.plainUnit(turn) : this.#order.unit(this.#lane, turn);
    const reader = await openPart({
      file: unit.file,
      part: unit.part,
      textField: this.#order.spec.textField,
      opener: this.#opener,
    });
    await this.#reader?.reader.close();
    this.#reader = { turn, reader, unit };
    return this.#reader;
  }
}

/** The documents of the first epoch: the lanes take turns, as in training, until all are exhausted. */
export async function* firstEpoch(
  lanes: readonly LaneDocuments[],
  firstTurn = 0,
): AsyncGenerator<{ readonly lane: number; readonly placed: PlacedDocument }> {
  const ended = new Set<number>();
  for (let turn = firstTurn; ended.size < lanes.length; turn++) {
    const lane = turn % lanes.length;
    if (ended.has(lane)) continue;
    const placed = await lanes[lane].next();
    if (placed === undefined || placed.epoch > 0) ended.add(lane);
    else yield { lane, placed };
  }
}
