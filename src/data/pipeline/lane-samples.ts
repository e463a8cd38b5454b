/** The samples of one lane: documents tokenised, joined by separators, cut into windows of S + 1 tokens. */

import { setImmediate } from 'node:timers/promises';
import { TrefoilError, UsageError } from '../../errors.js';
import { type Cursor, type LaneDocuments, type PlacedDocument, START } from '../sources/documents.js';
import { documentBytes, documentText } from '../sources/reader.js';
import { cutText, PIECE_LENGTH } from '../sources/text.js';
import type { Tokenizer } from '../tokenizer.js';
import { TokenBuffer } from '../tokenizers/token-buffer.js';

/** Flag bit of a token that begins a document. Above any id. */
export const DOCUMENT_START = 1 << 30;
export const TOKEN_MASK = DOCUMENT_START - 1;
/** Padding of a window after the last token of the data. */
export const NO_TOKEN = -1;

/** Consecutive parts without text after which the source is refused. */
const MAX_EMPTY_TURNS = 1000;

/** Counters of what was read. Empty documents do not count. */
export interface LaneCounts {
  documents: number;
  bytes: number;
}

export class LaneSamples {
  readonly #documents: LaneDocuments;
  readonly #tokenizer: Tokenizer;
  readonly #documentBatch: number;
  readonly #counts: LaneCounts;
  /** Tokens of the open document, with its separator. */
  readonly #tokens = new TokenBuffer();
  #at = 0;
  #turn = 0;
  #block = 0;
  #document = 0;
  /** Tokens to skip in the first document after a resume. */
  #resumeAt: number;
  #sinceYield = 0;
  readonly #keepTail: boolean;
  #ended = false;
  epoch = 0;

  constructor(
    documents: LaneDocuments,
    tokenizer: Tokenizer,
    options: { cursor?: Cursor; documentBatch: number; counts: LaneCounts; keepTail?: boolean },
  ) {
    this.#documents = documents;
    this.#tokenizer = tokenizer;
    this.#documentBatch = options.documentBatch;
    this.#counts = options.counts;
    this.#keepTail = options.keepTail ?? false;
    this.#resumeAt = (options.cursor ?? START).token;
  }

  /**
   * Fills a window; returns where the next one begins, or undefined when the documents have ended. A window that the
   * documents do not fill is dropped, or with `keepTail` completed with NO_TOKEN.
   * Windows share a token: the last target of one is the first input of the next, so no token is a target twice.
   */
  async fill(window: Int32Array): Promise<Cursor | undefined> {
    for (let filled = 0; filled < window.length; ) {
      if (this.#at === this.#tokens.length && !(await this.#nextDocument())) {
        // The first token was the last target of the window before: it alone is no sample.
        if (!this.#keepTail || this.#ended || filled < 2) return undefined;
        this.#ended = true;
        window.fill(NO_TOKEN, filled);
        break;
      }
      const taken = Math.min(window.length - filled, this.#tokens.length - this.#at);
      window.set(this.#tokens.ids.subarray(this.#at, this.#at + taken), filled);
      filled += taken;
      this.#at += taken;
    }
    if (!this.#ended) this.#at -= 1;
    return { turn: this.#turn, block: this.#block, document: this.#document, token: this.#at };
  }

  /** Opens the next document that has tokens; false at the end. */
  async #nextDocument(): Promise<boolean> {
    for (let firstTurn = -1; ; ) {
      const placed = this.#documents.nextAtHand() ?? (await this.#documents.next());
      if (placed === undefined) return false;
      // Tokenising blocks the event loop: network events need a turn in between.
      if (++this.#sinceYield >= this.#documentBatch) {
        this.#sinceYield = 0;
        await setImmediate();
      }
      const hasTokens = this.#encode(placed);
      const skipped = this.#resumeAt;
      this.#resumeAt = 0;
      if (!hasTokens && skipped === 0) {
        if (firstTurn < 0) firstTurn = placed.turn;
        if (placed.turn - firstTurn > MAX_EMPTY_TURNS)
          throw new UsageError(`${placed.origin} and what follows it hold only empty documents; check data.text_field`);
        continue;
      }
      if (!hasTokens || skipped >= this.#tokens.length)
        throw new UsageError(`${placed.origin}: holds other text than when this run was saved; use the same data`);
      this.#counts.documents++;
      this.#counts.bytes += documentBytes(placed.document);
      this.#at = skipped;
      this.#turn = placed.turn;
      this.#block = placed.block;
      this.#document = placed.index;
      this.epoch = placed.epoch;
      return true;
    }
  }

  /** Puts the tokens of a document, with what begins and separates documents, into `#tokens`; false if it is empty. */
  #encode({ document, continues, isPartial }: PlacedDocument): boolean {
    const text = documentText(document);
    const tokens = this.#tokens;
    const tokenizer = this.#tokenizer;
    tokens.length = 0;
    if (!continues && tokenizer.documentStart) tokens.append(tokenizer.documentStart);
    const start = tokens.length;
    for (const piece of text.length <= PIECE_LENGTH ? [text] : cutText(text)) {
      if (tokenizer.encodeInto) tokenizer.encodeInto(piece, tokens);
      else tokens.append(tokenizer.encode(piece));
    }
    if (tokens.length === start) return false;
    checkRange(tokens, tokenizer);
    if (!continues) tokens.ids[0] |= DOCUMENT_START;
    if (!isPartial) tokens.reserve(1)[tokens.length++] = tokenizer.separator;
    return true;
  }
}

/** Kernels use an id as an index: one outside the vocabulary would read out of bounds. */
function checkRange({ ids, length }: TokenBuffer, { vocabSize, name }: Tokenizer): void {
  for (let index = 0; index < length; index++)
    if (ids[index] < 0 || ids[index] >= vocabSize)
      throw new TrefoilError(`tokenizer ${name} gave token ${ids[index]}, outside its vocabulary of ${vocabSize}`);
}
