/** GPT-2's byte-level BPE (r50k_base), with the ranks of gpt-tokenizer and our own cutting into words and merging. */

import { createRequire } from 'node:module';
import type { Tokenizer } from '../tokenizer.js';
import { checkedId, createByteStreamDecoder, decodeUtf8 } from './bytes.js';
import { wordEnd } from './gpt2-words.js';
import { createMerger } from './merge.js';
import { TokenBuffer } from './token-buffer.js';
import { UnitBuffer } from './unit-buffer.js';
import { WordCache } from './word-cache.js';

interface Ranks {
  /** Bytes of every token, as a text where they are one. */
  readonly default: readonly (string | readonly number[])[];
}

const VOCAB_SIZE = 50257;
const END_OF_TEXT = 50256;

const ASCII = /^[\0-\x7f]*$/;
/** Longer words rarely repeat: they are not cached. */
const CACHED_WORD_LENGTH = 40;

/** Its tables are made when they are used: they take 40 ms, and the main thread of `data prepare` needs only the sizes. */
export function createGpt2Tokenizer(): Tokenizer {
  const loadRanks = once(() => {
    const { default: ranksById } = createRequire(import.meta.url)('gpt-tokenizer/bpeRanks/r50k_base') as Ranks;
    return ranksById;
  });
  const encoder = once(() => createEncoder(loadRanks()));
  const encodeInto = (text: string, tokens: TokenBuffer): void => encoder()(text, tokens);

  const encode = (text: string): Int32Array => {
    const tokens = new TokenBuffer((text.length >> 2) + 16);
    encodeInto(text, tokens);
    return tokens.ids.slice(0, tokens.length);
  };

  // Made when they are needed: most threads only encode.
  const bytesById: Uint8Array[] = [];
  const bytesOf = (id: number): Uint8Array => {
    bytesById[id] ??= Buffer.from(
      checkedId(id, VOCAB_SIZE, 'gpt2') === END_OF_TEXT ? '<|endoftext|>' : loadRanks()[id],
    );
    return bytesById[id];
  };
  return {
    name: 'gpt2',
    vocabSize: VOCAB_SIZE,
    separator: END_OF_TEXT,
    identity: 'gpt2',
    encode,
    encodeInto,
    byteLength: (id) => (id === END_OF_TEXT ? 0 : bytesOf(id).length),
    tokenBytes: (id) => (id === END_OF_TEXT ? null : bytesOf(id)),
    decode: (ids) => decodeUtf8(Buffer.concat(Array.from(ids, bytesOf))),
    createStreamDecoder: () => createByteStreamDecoder(bytesOf),
  };
}

function createEncoder(ranksById: Ranks['default']): (text: string, tokens: TokenBuffer) => void {
  const ranks = new Map<string, number>();
  for (let id = 0; id < END_OF_TEXT; id++) {
    const value = ranksById[id];
    // Most tokens are ASCII: their text is the string of their bytes.
    ranks.set(typeof value === 'string' && ASCII.test(value) ? value : Buffer.from(value).toString('latin1'), id);
  }

  const merge = createMerger(ranks);
  const encodeWord = (word: string): readonly number[] => {
    // A lone surrogate becomes U+FFFD here, as in every UTF-8 encoder.
    const binary = Buffer.from(word, 'utf8').toString('latin1');
    const whole = ranks.get(binary);
    return whole === undefined ? merge(binary) : [whole];
  };

  const cache = new WordCache();
  const buffer = new UnitBuffer();

  return (text, tokens) => {
    const { length } = text;
    const units = buffer.of(text);
    // Most text has one token per four UTF-16 units, so room for that is reserved first, and more when it is used up.
    let ids = tokens.reserve((length >> 2) + 16);
    let count = tokens.length;
    for (let start = 0, end = 0; start < length; start = end) {
      end = wordEnd(units, length, start);
      if (end - start > CACHED_WORD_LENGTH) {
        tokens.length = count;
        tokens.append(encodeWord(text.slice(start, end)));
        ({ ids, length: count } = tokens);
        continue;
      }
      let at = cache.find(units, start, end);
      if (at < 0) at = cache.add(units, start, end, encodeWord(text.slice(start, end)));
      if (count + cache.count > ids.length) {
        tokens.length = count;
        ids = tokens.reserve(cache.count);
      }
      for (const last = at + cache.count; at < last; at++) ids[count++] = cache.ids[at];
    }
    tokens.length = count;
  };
}

function once<Value>(make: () => Value): () => Value {
  let value: Value | undefined;
  return () => {
    value ??= make();
    return value;
  };
}
