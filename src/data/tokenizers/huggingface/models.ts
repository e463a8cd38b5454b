/** Models: the token ids of one word. BPE is our own; Unigram and WordPiece are the library's. */
import * as z from '../../../zod.js';
import { mergePairs, type PairMerges } from '../merge.js';
import { issueText } from './files.js';
import { type LibraryModel, Unigram, WordPiece } from './library.js';
import { byteCharacters } from './pre-tokenizers.js';

export interface Model {
  /** Tokens of the model, without added tokens. */
  readonly vocabulary: ReadonlyMap<string, number>;
  encodeWord(word: string): readonly number[];
}

const Merge = z.union([z.string(), z.tuple([z.string(), z.string()])]);
const BpeModel = z.looseObject({
  vocab: z.record(
    z.string(),
    z
      .number()
      .int()
      .min(0)
      .max(2 ** 24),
  ),
  merges: z.array(Merge),
  dropout: z.number().nullish(),
  unk_token: z.string().nullish(),
  continuing_subword_prefix: z.string().nullish(),
  end_of_word_suffix: z.string().nullish(),
  fuse_unk: z.boolean().nullish(),
  byte_fallback: z.boolean().nullish(),
  ignore_merges: z.boolean().nullish(),
});
type BpeModel = z.infer<typeof BpeModel>;
const UnigramModel = z.looseObject({ vocab: z.array(z.tuple([z.string(), z.number()])) });

export interface ModelOptions {
  /** Words are written as byte characters (see `byteCharacters`) before they are encoded. */
  readonly isByteLevel: boolean;
  /** Tokens that no text may become. */
  readonly special: ReadonlySet<string>;
}

export function createModel(description: Readonly<Record<string, unknown>>, options: ModelOptions): Model {
  // Old files do not name the type of the model; one with merges is a BPE.
  const type = description['type'] ?? ('merges' in description ? 'BPE' : undefined);
  switch (type) {
    case 'BPE':
      return createBpe(description, options);
    case 'Unigram':
      return createUnigram(description, options);
    case 'WordPiece':
      return fromLibrary(new WordPiece(description), options);
    default:
      throw new Error(`the model "${String(type)}" is not supported (BPE, Unigram and WordPiece are)`);
  }
}

// Nearly all words of natural text hit this cache. It is emptied when full, which costs less than tracking use. Longer
// words rarely repeat.
const CACHED_WORDS = 100_000;
const CACHED_WORD_LENGTH = 40;

function parseModel<Value>(schema: z.ZodType<Value>, description: unknown): Value {
  const { success, data, error } = schema.safeParse(description);
  if (!success) throw new Error(issueText(error, ['model']));
  return data;
}

function createBpe(description: unknown, { isByteLevel }: ModelOptions): Model {
  const model = parseModel(BpeModel, description);
  if (model.dropout) throw new Error(`dropout ${model.dropout} in a BPE model is not supported`);
  const vocabulary = new Map(Object.entries(model.vocab));
  const merges = readMerges(model, vocabulary);
  const symbolsOf = createSymbols(model, vocabulary);
  const encode = (word: string): readonly number[] => {
    const known = model.ignore_merges ? vocabulary.get(word) : undefined;
    return known === undefined ? mergePairs(symbolsOf(word), merges) : [known];
  };
  const words = new Map<string, readonly number[]>();
  return {
    vocabulary,
    encodeWord(word) {
      const cached = words.get(word);
      if (cached !== undefined) return cached;
      const ids = encode(isByteLevel ? byteCharacters(word) : word);
      if (word.length <= CACHED_WORD_LENGTH) {
        if (words.size >= CACHED_WORDS) words.clear();
        words.set(word, ids);
      }
      return ids;
    },
  };
}

function readMerges(model: BpeModel, vocabulary: ReadonlyMap<string, number>): PairMerges {
  const prefixLength = model.continuing_subword_prefix?.length ?? 0;
  let base = 1;
  for (const id of vocabulary.values()) base = Math.max(base, id + 1);
  const pairs = new Map<number, { readonly rank: number; readonly id: number }>();
  model.merges.forEach((merge, rank) => {
    const [left, right] = typeof merge === 'string' ? splitOnce(merge) : merge;
    const [a, b] = [vocabulary.get(left), vocabulary.get(right)];
    const id = vocabulary.get(left + right.slice(prefixLength));
    if (a === undefined || b === undefined || id === undefined)
      throw new Error(
        `model.merges: merge ${rank} (${JSON.stringify([left, right])}) has a token outside the vocabulary`,
      );
    pairs.set(a * base + b, { rank, id });
  });
  return { base, pairs };
}

function splitOnce(merge: string): readonly [string, string] {
  const space = merge.indexOf(' ');
  return [merge.slice(0, space), merge.slice(space + 1)];
}

/** The ids that merging starts with: of characters, else of the bytes `<0x00>` … , else of the unknown token. */
function createSymbols(model: BpeModel, vocabulary: ReadonlyMap<string, number>): (word: string) => number[] {
  const prefix = model.continuing_subword_prefix ?? '';
  const suffix = model.end_of_word_suffix ?? '';
  const unknown = model.unk_token ? vocabulary.get(model.unk_token) : undefined;
  const bytes = Array.from({ length: 256 }, (_, byte) =>
    vocabulary.get(`<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`),
  );
  const bytesOf = (symbol: string): number[] | null => {
    const ids = Array.from(Buffer.from(symbol, 'utf8'), (byte) => bytes[byte]);
    return ids.every((id) => id !== undefined) ? ids : null;
  };
  return (word) => {
    const ids: number[] = [];
    let isUnknown = false;
    let end = 0;
    for (const char of word) {
      let symbol = end === 0 ? char : prefix + char;
      end += char.length;
      if (end === word.length) symbol += suffix;
      const id = vocabulary.get(symbol);
      const fallback = id === undefined && model.byte_fallback ? bytesOf(symbol) : null;
      const wasUnknown = isUnknown;
      isUnknown = false;
      if (id !== undefined) ids.push(id);
      else if (fallback) ids.push(...fallback);
      else if (unknown !== undefined) {
        if (!(wasUnknown && model.fuse_unk)) ids.push(unknown);
        isUnknown = true;
      }
      // Without an unknown token the reference drops the character.
    }
    return ids;
  };
}

function createUnigram(description: Readonly<Record<string, unknown>>, options: ModelOptions): Model {
  const { vocab } = parseModel(UnigramModel, description);
  // Special tokens are ordinary pieces of the highest score here: renamed to something no text contains.
  const hidden = vocab.map(([token, score]) => [options.special.has(token) ? `\0special${token}` : token, score]);
  const { encodeWord } = fromLibrary(new Unigram({ ...description, vocab: hidden }, ''), options);
  return { vocabulary: new Map(vocab.map(([token], id) => [token, id])), encodeWord };
}

function fromLibrary(model: LibraryModel, { isByteLevel }: ModelOptions): Model {
  const idOf = (token: string) => model.tokens_to_ids.get(token) ?? model.unk_token_id;
  return {
    vocabulary: model.tokens_to_ids,
    encodeWord(word) {
      const ids = model([isByteLevel ? byteCharacters(word) : word]).map(idOf);
      return ids.filter((id) => id !== undefined);
    },
  };
}
