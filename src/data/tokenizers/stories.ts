/**
 * The tokenizer of the story grammar: a token is a word of the grammar with the space before it, or a set phrase such as
 * ` the red kite under the bridge`. All other text is written in bytes, so that every text can be encoded. Ids 0 to 255 are
 * bytes; 0 separates documents, as in the byte tokenizer.
 */
import { joinBytes, utf8 } from '../../bytes.js';
import { sha256 } from '../../sha256.js';
import { everyWord, setPhrases } from '../synthetic/stories/grammar.js';
import type { Tokenizer } from '../tokenizer.js';
import { checkedId, createByteStreamDecoder, decodeUtf8 } from './bytes.js';

const BYTES = 256;
const SEPARATOR = 0;
/** A word or one other character, each with the space before it. */
const WORD = ' ?[A-Za-z]+| ?[^A-Za-z\\s]|\\s';

export function createStoryTokenizer(): Tokenizer {
  const phrases = setPhrases();
  const piece = new RegExp(`(?:${phrases.join('|')})(?![A-Za-z])|${WORD}`, 'gu');
  const piecesOf = (text: string): readonly string[] => text.match(piece) ?? [];
  const words = [...new Set([...phrases, ...everyWord().flatMap(piecesOf)])].filter(({ length }) => length > 1);
  // ASCII characters are among them: most pieces that are no words are one such byte.
  const ids = new Map(Array.from({ length: 128 }, (_, byte) => [String.fromCharCode(byte), byte]));
  for (const [i, word] of words.entries()) ids.set(word, BYTES + i);
  const bytes = [...Array.from({ length: BYTES }, (_, byte) => Uint8Array.of(byte)), ...words.map(utf8)];
  const vocabSize = bytes.length;
  const bytesOf = (id: number): Uint8Array => bytes[checkedId(id, vocabSize, 'stories')];
  let identity: string | undefined;
  return {
    name: 'stories',
    vocabSize,
    separator: SEPARATOR,
    get identity() {
      identity ??= `stories:${sha256(words.join('\n'))}`; // only caches and shards need it
      return identity;
    },
    encode: (text) => {
      const tokens: number[] = [];
      for (const word of piecesOf(text)) {
        const id = ids.get(word);
        if (id === undefined) for (const byte of utf8(word)) tokens.push(byte);
        else tokens.push(id);
      }
      return Int32Array.from(tokens);
    },
    byteLength: (id) => (id === SEPARATOR ? 0 : bytesOf(id).length),
    tokenBytes: (id) => (id === SEPARATOR ? null : bytesOf(id)),
    decode: (tokens) => decodeUtf8(joinBytes(Array.from(tokens, bytesOf))),
    createStreamDecoder: () => createByteStreamDecoder(bytesOf),
  };
}
