/** GPT-2's byte-level BPE (r50k_base), with the ranks and the word pattern of gpt-tokenizer and our own merging. */

import ranksById from 'gpt-tokenizer/bpeRanks/r50k_base';
import { R50K_TOKEN_SPLIT_REGEX } from 'gpt-tokenizer/encodingParams/constants';
import type { Tokenizer } from '../tokenizer.js';
import { checkedId, createByteStreamDecoder, decodeUtf8 } from './bytes.js';
import { mergeBytePairs } from './merge.js';
import { TokenBuffer } from './token-buffer.js';

const VOCAB_SIZE = 50257;
const END_OF_TEXT = 50256;

/**
 * In the reference pattern \s is the Unicode property White_Space. JavaScript's \s also contains U+FEFF and lacks U+0085.
 */
const WORD_PATTERN = R50K_TOKEN_SPLIT_REGEX.source
  .replaceAll('\\s', '\\p{White_Space}')
  .replaceAll('\\S', '\\P{White_Space}');

// Nearly all words of natural text hit this cache. It is emptied when full, which costs less than tracking use. Longer
// words rarely repeat.
const CACHED_WORDS = 100_000;
const CACHED_WORD_LENGTH = 40;

export function createGpt2Tokenizer(): Tokenizer {
  const bytesById = ranksById.map((value) => (typeof value === 'string' ? Buffer.from(value) : Buffer.from(value)));
  bytesById[END_OF_TEXT] = Buffer.from('<|endoftext|>');
  const ranks = new Map<string, number>();
  for (let id = 0; id < END_OF_TEXT; id++) ranks.set(bytesById[id].toString('latin1'), id);

  const words = new Map<string, number[]>();
  const encodeWord = (word: string): number[] => {
    const known = words.get(word);
    if (known !== undefined) return known;
    // A lone surrogate becomes U+FFFD here, as in every UTF-8 encoder.
    const binary = Buffer.from(word, 'utf8').toString('latin1');
    const whole = ranks.get(binary);
    const ids = whole === undefined ? mergeBytePairs(binary, ranks) : [whole];
    if (word.length <= CACHED_WORD_LENGTH) {
      if (words.size >= CACHED_WORDS) words.clear();
      words.set(word, ids);
    }
    return ids;
  };

  const encodeInto = (text: string, tokens: TokenBuffer): void => {
    // Most text has one token per four UTF-16 units, so room for that is reserved first, and more when it is used up.
    let ids = tokens.reserve((text.length >> 2) + 16);
    let count = tokens.length;
    const pattern = new RegExp(WORD_PATTERN, 'gu');
    for (let match = pattern.exec(text); match !== null; match = pattern.exec(text)) {
      const word = encodeWord(match[0]);
      if (count + word.length > ids.length) {
        tokens.length = count;
        ids = tokens.reserve(word.length);
      }
      for (let index = 0; index < word.length; index++) ids[count++] = word[index];
    }
    tokens.length = count;
  };

  const encode = (text: string): Int32Array => {
    const tokens = new TokenBuffer((text.length >> 2) + 16);
    encodeInto(text, tokens);
    return tokens.ids.slice(0, tokens.length);
  };

  const bytesOf = (id: number): Uint8Array => bytesById[checkedId(id, VOCAB_SIZE, 'gpt2')];
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
