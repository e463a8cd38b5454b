/** The part of a loaded model that text generation uses. */
import type { Config } from '../config/schema.js';
import type { Tokenizer } from '../data/tokenizer.js';
import type { LanguageModel } from '../model/language-model.js';

/** The part that text generation uses of a model from `loadModel`. */
export interface TextSource {
  readonly model: LanguageModel;
  readonly tokenizer: Tokenizer;
  readonly config: Config;
  /** Tokens that end a text, besides the tokenizer's separator. */
  readonly endTokens?: readonly number[];
}

/** Number of tokens that may be drawn: rows that pad the embedding are not tokens. */
export function usedVocabulary({ model, tokenizer }: Pick<TextSource, 'model' | 'tokenizer'>): number {
  return Math.min(model.shape.vocabSize, tokenizer.vocabSize);
}

/** All tokens that end a text: the tokenizer's and the model's. */
export function endTokensOf({ tokenizer, endTokens = [] }: TextSource): readonly number[] {
  return [...new Set([...(tokenizer.endTokens ?? [tokenizer.separator]), ...endTokens])];
}
