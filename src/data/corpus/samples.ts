/** The samples of one lane: documents tokenised, joined by separators, cut into windows of S + 1 tokens. */

import { setImmediate } from 'node:timers/promises';
import { TrefoilError, UsageError } from '../../errors.js';
import { cutText, PIECE_LENGTH } from '../documents/document.js';
import { TokenBuffer } from '../token-buffer.js';
import type { Tokenizer } from '../tokenizer.js';
import { type Cursor, type LaneDocuments, START } from './documents.js';
import { documentBytes, documentText } from './reader.js';

/** Set in a token that begins a document. Far above any id. */
export const DOCUMENT_START = 1 << 30;
export const TOKEN_MASK = DOCUMENT_START - 1;
/** Fills a window behind the last token of the data. */
export const NO_TOKEN = -1;

/** So many parts with nothing but empty documents in a row are no accident. */
const MOST_EMPTY_TURNS = 1000;

/** Counted while it is read; documents are those that had text. */
export interface LaneCounts {
  documents: number;
  bytes: number;
}

export class LaneSamples {
  readonly #documents: LaneDocuments;
  readonly #tokenizer: Tokenizer;
  readonly #documentBatch: number;
  readonly #counts: LaneCounts;
  /** Tokens of the open document, its separator among them. */
  readonly #tokens = new TokenBuffer();
  #at = 0;
  #turn = 0;
  #block = 0;
  #document = 0;
  /** Tokens to pass over in the first document after a resume. */
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
      // Tokenising is one long computation: in between, what the network brought must get its turn.
      if (++this.#sinceYield >= this.#documentBatch) {
        this.#sinceYield = 0;
        await setImmediate();
      }
      const hasTokens = this.#encode(documentText(placed.document));
      const skipped = this.#resumeAt;
      this.#resumeAt = 0;
      if (!hasTokens && skipped === 0) {
        if (firstTurn < 0) firstTurn = placed.turn;
        if (placed.turn - firstTurn > MOST_EMPTY_TURNS)
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

  /** Puts the tokens of a text with their separator into `#tokens`; false for a text without any. */
  #encode(text: string): boolean {
    const tokens = this.#tokens;
    const tokenizer = this.#tokenizer;
    tokens.length = 0;
    for (const piece of text.length <= PIECE_LENGTH ? [text] : cutText(text)) {
      if (tokenizer.encodeInto) tokenizer.encodeInto(piece, tokens);
      else tokens.append(tokenizer.encode(piece));
    }
    if (tokens.length === 0) return false;
    checkRange(tokens, tokenizer);
    tokens.ids[0] |= DOCUMENT_START;
    tokens.reserve(1)[tokens.length++] = tokenizer.separator;
    return true;
  }
}

/** Kernels take an id as an address: one outside the vocabulary would read foreign memory. */
function checkRange({ ids, length }: TokenBuffer, { vocabSize, name }: Tokenizer): void {
  for (let index = 0; index < length; index++)
    if (ids[index] < 0 || ids[index] >= vocabSize)
      throw new TrefoilError(`tokenizer ${name} gave token ${ids[index]}, outside its vocabulary of ${vocabSize}`);
}
