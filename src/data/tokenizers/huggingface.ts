/** Any tokenizer.json of Hugging Face, through their own JavaScript library. */

import { createHash } from 'node:crypto';
import { existsSync, readFileSync } from 'node:fs';
import { basename, dirname, join, resolve } from 'node:path';
import { Tokenizer as Library } from '@huggingface/tokenizers';
import { z } from 'zod';
import { TrefoilError, UsageError } from '../../errors.js';
import type { StreamDecoder, Tokenizer } from '../tokenizer.js';
import { checkedId } from './bytes.js';

const AddedToken = z.looseObject({ id: z.number().int().min(0), content: z.string(), special: z.boolean().optional() });
/** A normalizer or pre-tokenizer; a sequence lists its steps. */
interface Step {
  readonly type: string;
  readonly [key: string]: unknown;
}
const Step: z.ZodType<Step> = z.looseObject({ type: z.string() });
const TokenizerFile = z.looseObject({
  model: z.looseObject({ vocab: z.unknown() }),
  added_tokens: z.array(AddedToken).default([]),
  normalizer: Step.nullish(),
  pre_tokenizer: Step.nullish(),
  decoder: Step.nullish(),
});
type TokenizerFile = z.infer<typeof TokenizerFile>;
// tokenizer_config.json writes a token as a string or as an object with its content.
const TokenizerConfig = z.looseObject({
  eos_token: z.union([z.string(), z.looseObject({ content: z.string() })]).nullish(),
});

/** Tried in this order where tokenizer_config.json names no eos_token. */
const SEPARATORS = ['<|endoftext|>', '</s>', '<|end_of_text|>', '<eos>', '<|eos|>', '[EOS]', '[SEP]'];

export function createHuggingFaceTokenizer(path: string): Tokenizer {
  const content = readText(path);
  const file = parse(path, content, TokenizerFile);
  const configPath = join(dirname(path), 'tokenizer_config.json');
  const config = existsSync(configPath) ? parse(configPath, readText(configPath), TokenizerConfig) : {};
  const eos = typeof config.eos_token === 'string' ? config.eos_token : config.eos_token?.content;

  const encoder = load(path, withUnicodeWhitespace(withoutSpecialTokens(file)), config);
  const ids = encoder.get_vocab(true);
  for (const token of file.added_tokens) ids.set(token.content, token.id);
  let vocabSize = 0;
  for (const id of ids.values()) vocabSize = Math.max(vocabSize, id + 1);
  const candidates = eos === undefined ? SEPARATORS : [eos];
  const separator = candidates.map((token) => ids.get(token)).find((id) => id !== undefined);
  if (separator === undefined) {
    throw new UsageError(
      `${path}: no end-of-text token to put between documents; name one as "eos_token" in ${configPath}`,
    );
  }

  let byteLengths: Int32Array | undefined;
  // A second copy of a large vocabulary is only paid for where text is produced: training never decodes.
  let decoder: Library | undefined;
  const decode = (tokens: ArrayLike<number>): string => {
    if (tokens.length === 0) return '';
    const list = Array.from(tokens, (id) => checkedId(id, vocabSize, path));
    // The clean-up of spaces before punctuation would make decode(encode(x)) differ from x.
    decoder ??= load(path, file, config);
    return decoder.decode(list, { skip_special_tokens: false, clean_up_tokenization_spaces: false });
  };
  return {
    name: basename(dirname(resolve(path))),
    vocabSize,
    separator,
    identity: `tokenizer.json:${createHash('sha256').update(content).digest('hex')}:${separator}`,
    encode: (text) =>
      Int32Array.from(encoder.encode(text, { add_special_tokens: false }).ids, (id: number | undefined) => {
        if (id !== undefined) return id;
        throw new TrefoilError(`${path}: cannot encode some characters and has no unknown token; use a byte-level one`);
      }),
    byteLength: (id) => {
      byteLengths ??= measureTokens(ids, file, separator, vocabSize);
      return byteLengths[checkedId(id, vocabSize, path)];
    },
    decode,
    createStreamDecoder: () => createWindowDecoder(decode),
  };
}

/**
 * The library turns special strings inside a text into special tokens. A web page may hold "</s>" as markup, and must
 * not end a document with it: the encoder is built without them. Unigram vocabularies list them as ordinary pieces of
 * the highest score, so there they are renamed to something no text contains.
 */
function withoutSpecialTokens(file: TokenizerFile): TokenizerFile {
  const special = new Set(file.added_tokens.filter((token) => token.special).map((token) => token.content));
  const { vocab } = file.model;
  const hidden = Array.isArray(vocab)
    ? vocab.map((entry: unknown) =>
        Array.isArray(entry) && special.has(entry[0]) ? [`\0special${entry[0]}`, ...entry.slice(1)] : entry,
      )
    : vocab;
  return {
    ...file,
    model: { ...file.model, vocab: hidden },
    added_tokens: file.added_tokens.filter((token) => !token.special),
  };
}

/** The word pattern of the ByteLevel pre-tokenizer. */
const BYTE_LEVEL_WORDS = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/**
 * The library translates \s in the patterns of a file to the Unicode property, as the reference has it, but its built-in
 * steps use JavaScript's \s, \w and trim(), which differ at U+FEFF and U+0085. They are replaced by patterns.
 */
function withUnicodeWhitespace(file: TokenizerFile): TokenizerFile {
  return {
    ...file,
    ...(file.normalizer && { normalizer: translateStep(file.normalizer) }),
    ...(file.pre_tokenizer && { pre_tokenizer: translateStep(file.pre_tokenizer) }),
  };
}

function translateStep(step: Step): Step {
  const split = (Regex: string, options: object) => ({ type: 'Split', pattern: { Regex }, ...options });
  const replace = (Regex: string, content: string) => ({ type: 'Replace', pattern: { Regex }, content });
  switch (step.type) {
    case 'Sequence': {
      const key = 'normalizers' in step ? 'normalizers' : 'pretokenizers';
      return {
        ...step,
        [key]: z
          .array(Step)
          .parse(step[key] ?? [])
          .map(translateStep),
      };
    }
    case 'ByteLevel': {
      if (step['use_regex'] === false) return step;
      const steps = [
        ...(step['add_prefix_space'] === true ? [replace('\\A(?! )', ' ')] : []),
        split(BYTE_LEVEL_WORDS, { behavior: 'Isolated', invert: false }),
        { ...step, add_prefix_space: false, use_regex: false },
      ];
      return { type: 'Sequence', pretokenizers: steps };
    }
    case 'Whitespace':
      return split('\\w+|[^\\w\\s]+', { behavior: 'Removed', invert: true });
    case 'WhitespaceSplit':
      return split('\\s+', { behavior: 'Removed', invert: false });
    case 'Strip': {
      const steps = [
        ...(step['strip_left'] === true ? [replace('\\A\\s+', '')] : []),
        ...(step['strip_right'] === true ? [replace('\\s+\\z', '')] : []),
      ];
      return { type: 'Sequence', normalizers: steps };
    }
    default:
      return step;
  }
}

/** UTF-8 bytes of every token. In a byte-level vocabulary a character of a token stands for one byte. */
function measureTokens(
  ids: ReadonlyMap<string, number>,
  file: TokenizerFile,
  separator: number,
  vocabSize: number,
): Int32Array {
  const isByteLevel = JSON.stringify([file.decoder, file.pre_tokenizer]).includes('"ByteLevel"');
  const special = new Set(file.added_tokens.filter((token) => token.special).map((token) => token.id));
  const lengths = new Int32Array(vocabSize);
  for (const [token, id] of ids) {
    if (special.has(id) || id === separator) continue;
    const isByte = /^<0x[0-9A-F]{2}>$/.test(token);
    if (isByteLevel) lengths[id] = [...token].length;
    else lengths[id] = isByte ? 1 : Buffer.byteLength(token.replaceAll('▁', ' ').replace(/^##/, ''));
  }
  return lengths;
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

function load(path: string, file: TokenizerFile, config: object): Library {
  try {
    return new Library(file, config);
  } catch (error) {
    throw new UsageError(`${path}: not a tokenizer this library can read: ${(error as Error).message}`, {
      cause: error,
    });
  }
}

function readText(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw new UsageError(`data.tokenizer: cannot read ${path}: ${(error as Error).message}`, { cause: error });
  }
}

function parse<Value>(path: string, content: string, schema: z.ZodType<Value>): Value {
  let value: unknown;
  try {
    value = JSON.parse(content);
  } catch (error) {
    throw new UsageError(`${path}: not valid JSON: ${(error as Error).message}`, { cause: error });
  }
  const result = schema.safeParse(value);
  if (result.success) return result.data;
  const issue = result.error.issues[0];
  throw new UsageError(`${path}: not a tokenizer file: ${issue.path.join('.') || 'top level'}: ${issue.message}`);
}
