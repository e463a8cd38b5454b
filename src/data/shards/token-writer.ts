/**
 * The common part of the writers of shards and of parts: from the tokens of documents to one stream with separators.
 */

import { TrefoilError } from '../../errors.js';
import type { Tokenizer } from '../tokenizer.js';
import { type TokenType, tokenTypeFor } from './token-type.js';

export abstract class TokenWriter {
  tokens = 0;
  documents = 0;
  /** How the tokens are stored. */
  readonly type: TokenType;
  protected readonly tokenizer: Tokenizer;
  protected insideDocument = false;

  constructor(tokenizer: Tokenizer) {
    this.tokenizer = tokenizer;
    this.type = tokenTypeFor(tokenizer.vocabSize);
  }

  /** Adds tokens to the open document, or to a new one. */
  append(ids: ArrayLike<number>): void {
    const { length } = ids;
    if (length === 0) return;
    const { vocabSize, name, documentStart } = this.tokenizer;
    for (let index = 0; index < length; index++) {
      const id = ids[index];
      if (!(id >= 0 && id < vocabSize))
        throw new TrefoilError(`tokenizer ${name} gave token ${id}, outside its vocabulary of ${vocabSize}`);
    }
    if (!this.insideDocument) {
      this.beginDocument();
      if (documentStart !== undefined) this.put(Int32Array.from(documentStart));
    }
    this.put(ids instanceof Int32Array ? ids : Int32Array.from(ids));
  }

  /** Ends the open document with the separator. A document without tokens is ignored. */
  endDocument(): void {
    if (!this.insideDocument) return;
    this.put(Int32Array.of(this.tokenizer.separator));
    this.insideDocument = false;
  }

  /** Counts a document that begins with the next token. */
  protected beginDocument(): void {
    this.documents++;
    this.insideDocument = true;
  }

  /** Adds tokens to the stream. */
  protected abstract put(ids: Int32Array): void;
}
