/**
 * The parts that come from the JavaScript library of Hugging Face: the translation of Oniguruma patterns, and what only
 * rare models need. Its type declarations do not resolve under NodeNext, so the used part of its interface is written here.
 */
import * as library from '@huggingface/tokenizers';

type Description = Readonly<Record<string, unknown>>;

interface LibraryModel {
  (words: readonly string[]): string[];
  readonly tokens_to_ids: ReadonlyMap<string, number>;
  readonly unk_token_id?: number;
}

interface Library {
  readonly SplitPreTokenizer: new (step: Description) => { readonly pattern: RegExp | null };
  readonly BertNormalizer: new (step: Description) => { normalize(text: string): string };
  readonly PrecompiledNormalizer: new (step: Description) => { normalize(text: string): string };
  readonly Unigram: new (model: Description, endToken: string) => LibraryModel;
  readonly WordPiece: new (model: Description) => LibraryModel;
}

export const { SplitPreTokenizer, BertNormalizer, PrecompiledNormalizer, Unigram, WordPiece } =
  library as unknown as Library;
export type { LibraryModel };
