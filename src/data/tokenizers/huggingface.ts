/**
 * A tokenizer.json of Hugging Face, with the files beside it. The order of work is that of the reference library: added
 * tokens are found, the text between them is normalized, cut into words, and each word is encoded by the model.
 */

import { createHash } from 'node:crypto';
import { basename, dirname, join, resolve } from 'node:path';
import { UsageError } from '../../errors.js';
import { withTimeLimit } from '../../time-limit.js';
import type { StreamDecoder, Tokenizer } from '../tokenizer.js';
import { checkedId, createByteStreamDecoder } from './bytes.js';
import { createAddedTokenSplitter, type TokenOrText } from './huggingface/added-tokens.js';
import {
  byteOfFallbackToken,
  bytesOfToken,
  createDecoder,
  isByteLevelDecoder,
  isConcatenatingDecoder,
} from './huggingface/decoders.js';
import { readTokenizerFiles, type TokenizerFiles } from './huggingface/files.js';
import { createModel } from './huggingface/models.js';
import { createNormalizer } from './huggingface/normalizers.js';
import { createFrame } from './huggingface/post-processor.js';
import { createWordSplitter } from './huggingface/pre-tokenizers.js';
import { doubtfulPattern } from './huggingface/step.js';
import { TokenBuffer } from './token-buffer.js';

/** With more added tokens, one may begin at every character. */
const MAX_PLAIN_ADDED = 2000;
/** Tried in this order where no file names an eos_token. */
const SEPARATORS = ['<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '<|eos|>', '[EOS]', '[SEP]'];

export function createHuggingFaceTokenizer(path: string): Tokenizer {
  const files = readTokenizerFiles(path);
  const { encodeInto, decode: decodeTokens, frame, vocabulary } = limited(files, assemble(files));
  const { added_tokens: added, decoder: decoderStep } = files.file;
  const tokens: string[] = [];
  for (const [token, id] of vocabulary) tokens[id] = token;
  for (const { content, id } of added) tokens[id] = content;
  const vocabSize = tokens.length;
  const special = new Set(added.filter((token) => token.special).map(({ id }) => id));
  const separator = findSeparator(files, tokens);
  const checked = (id: number): number => checkedId(id, vocabSize, path);

  const encode: Tokenizer['encode'] = (text, { parseSpecial = false, addSpecial = false } = {}) => {
    const buffer = new TokenBuffer((text.length >> 2) + 16);
    if (addSpecial) buffer.append(frame.before);
    encodeInto(text, buffer, parseSpecial);
    if (addSpecial) buffer.append(frame.after);
    return buffer.ids.slice(0, buffer.length);
  };
  const decode: Tokenizer['decode'] = (ids, { skipSpecial = false } = {}) => {
    const kept: string[] = [];
    for (let i = 0; i < ids.length; i++) {
      const token: string | undefined = tokens[checked(ids[i])];
      if (token !== undefined && !(skipSpecial && special.has(ids[i]))) kept.push(token);
    }
    return kept.length === 0 ? '' : decodeTokens(kept).join('');
  };
  const isByteLevel = isByteLevelDecoder(decoderStep);
  const bytesOf = (id: number): Uint8Array => bytesOfToken(tokens[checked(id)] ?? '');
  /** The text that a token adds after another. */
  const addedText = (token: string): string => decodeTokens(['a', token]).join('').slice(1);
  const tokenBytes = (id: number): Uint8Array | null => {
    const token: string | undefined = tokens[checked(id)];
    if (token === undefined || id === separator || special.has(id)) return null;
    if (isByteLevel) return bytesOf(id);
    const byte = byteOfFallbackToken(token);
    return byte === undefined ? Buffer.from(addedText(token), 'utf8') : Uint8Array.of(byte);
  };
  return {
    name: basename(dirname(resolve(path))),
    vocabSize,
    separator,
    // The empty list is left out: it is what every tokenizer had when this part was added.
    identity: [
      `tokenizer.json:${createHash('sha256').update(files.content).digest('hex')}:${separator}`,
      ...(frame.before.length > 0 ? [frame.before.join(',')] : []),
    ].join(':'),
    documentStart: frame.before,
    endTokens: [...new Set([separator, ...files.endTokens])],
    chat: { templates: files.chatTemplates, variables: files.names },
    encode,
    encodeInto: (text, buffer) => encodeInto(text, buffer, false),
    byteLength: (id) => {
      if (id === separator || special.has(checked(id))) return 0;
      return isByteLevel ? bytesOf(id).length : byteLengthOfPiece(tokens[id] ?? '');
    },
    ...(isConcatenatingDecoder(decoderStep) ? { tokenBytes } : {}),
    decode,
    createStreamDecoder: ({ skipSpecial = false } = {}) => {
      const isSkipped = (id: number) => skipSpecial && special.has(checked(id));
      const decoder = isByteLevel ? createByteStreamDecoder(bytesOf) : createWindowDecoder(decode);
      return { push: (id) => (isSkipped(id) ? '' : decoder.push(id)), end: () => decoder.end() };
    },
  };
}

/** The components of the file, joined into one function each way. */
function assemble({ path, file }: TokenizerFiles) {
  try {
    const normalize = createNormalizer(file.normalizer);
    const { split, isByteLevel } = createWordSplitter(file.pre_tokenizer);
    const special = new Set(file.added_tokens.filter((token) => token.special).map(({ content }) => content));
    const model = createModel(file.model, { isByteLevel, special });
    // A text is cut at all added tokens, or at those that are not special.
    const [all, ordinary] = [file.added_tokens, file.added_tokens.filter((token) => !token.special)].map((tokens) => ({
      raw: createAddedTokenSplitter(tokens.filter(({ normalized }) => !normalized)),
      normalized: createAddedTokenSplitter(
        tokens.flatMap((token) => (token.normalized ? [{ ...token, content: normalize(token.content) }] : [])),
      ),
    }));
    const encodeInto = (text: string, buffer: TokenBuffer, parseSpecial: boolean): void => {
      const cut = parseSpecial ? all : ordinary;
      for (const piece of cut.raw(text)) {
        if ('id' in piece) buffer.push(piece.id);
        else for (const part of cut.normalized(normalize(piece.text))) encodePiece(part, piece.isStart, buffer);
      }
    };
    const encodePiece = (piece: TokenOrText, isStart: boolean, buffer: TokenBuffer): void => {
      if ('id' in piece) buffer.push(piece.id);
      else if (piece.text !== '')
        for (const word of split(piece.text, isStart && piece.isStart)) buffer.append(model.encodeWord(word));
    };
    return {
      encodeInto,
      decode: createDecoder(file.decoder),
      frame: createFrame(file.post_processor),
      vocabulary: model.vocabulary,
    };
  } catch (error) {
    throw new UsageError(`${path}: ${(error as Error).message}; use another tokenizer`, { cause: error });
  }
}

/** The time that a text may take: an honest tokenizer needs a fifth of a microsecond per character, on a busy machine some more. */
const MILLISECONDS = 1000;
const MICROSECONDS_PER_CHARACTER = 5;

type Assembled = ReturnType<typeof assemble>;

/** Ends texts that take too long, where expressions or models of the file may need more than time in proportion to the text. */
function limited({ path, file }: TokenizerFiles, assembled: Assembled): Assembled {
  const { normalizer, pre_tokenizer: preTokenizer, decoder, model, added_tokens: added } = file;
  const pattern = doubtfulPattern(normalizer, preTokenizer);
  const decoderPattern = doubtfulPattern(decoder);
  const isPlainModel = 'merges' in model && added.length <= MAX_PLAIN_ADDED;
  const within = <Result>(length: number, source: string | undefined, work: () => Result): Result => {
    const milliseconds = MILLISECONDS + (MICROSECONDS_PER_CHARACTER * length) / 1000;
    return withTimeLimit(milliseconds, work, () => {
      const what = source === undefined ? 'the tokenizer' : `the expression ${JSON.stringify(source.slice(0, 80))}`;
      const seconds = (milliseconds / 1000).toFixed(1);
      throw new UsageError(
        `${path}: ${what} takes more than ${seconds} s for ${length} characters; use another tokenizer`,
      );
    });
  };
  const { encodeInto, decode } = assembled;
  return {
    ...assembled,
    ...((pattern !== undefined || !isPlainModel) && {
      encodeInto: (text, buffer, ...rest) => {
        const { length } = buffer;
        within(text.length, pattern, () => {
          buffer.length = length; // an attempt that was interrupted has added some
          encodeInto(text, buffer, ...rest);
        });
      },
    }),
    ...(decoderPattern !== undefined && {
      decode: (tokens) => within(tokens.length, decoderPattern, () => decode(tokens)),
    }),
  };
}

function findSeparator({ path, names }: TokenizerFiles, tokens: readonly (string | undefined)[]): number {
  const { eos_token: eos } = names;
  const candidates = typeof eos === 'string' ? [eos] : SEPARATORS;
  const separator = candidates.map((token) => tokens.indexOf(token)).find((id) => id >= 0);
  if (separator !== undefined) return separator;
  const configPath = join(dirname(path), 'tokenizer_config.json');
  throw new UsageError(
    `${path}: no end-of-text token to put between documents; name one as "eos_token" in ${configPath}`,
  );
}

/** UTF-8 bytes of a token of a vocabulary that is not byte-level. */
function byteLengthOfPiece(token: string): number {
  if (byteOfFallbackToken(token) !== undefined) return 1;
  return Buffer.byteLength(token.replaceAll('▁', ' ').replace(/^##/, ''));
}

/**
 * Token by token for decoders that are not byte-wise: text so far = decode(window) minus what the older part of the
 * window gave. The older part is kept because decoders treat the first token of a text differently (leading space).
 */
function createWindowDecoder(decode: (ids: ArrayLike<number>) => string): StreamDecoder {
  let ids: number[] = [];
  let settled = 0;
  const emit = (): string => {
    const text = decode(ids).slice(decode(ids.slice(0, settled)).length);
    ids = ids.slice(settled);
    settled = ids.length;
    return text;
  };
  return {
    push(id) {
      ids.push(id);
      // U+FFFD at the end: perhaps half a character. No character has more than 4 bytes, so waiting longer is useless.
      const waiting = ids.length - settled < 8 && decode(ids).endsWith('\uFFFD');
      return waiting ? '' : emit();
    },
    end: () => (ids.length > settled ? emit() : ''),
  };
}
