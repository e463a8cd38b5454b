/** The tokenizers that need no file. */

import type { Tokenizer } from '../tokenizer.js';
import { createByteTokenizer } from './bytes.js';
import { createGpt2Tokenizer } from './gpt2.js';
import { createStoryTokenizer } from './stories.js';

const BUILT_IN = { byte: createByteTokenizer, gpt2: createGpt2Tokenizer, stories: createStoryTokenizer } as const;

/** Their names. */
export const BUILT_IN_TOKENIZERS = Object.keys(BUILT_IN);

/** Whether `spec` names a tokenizer of Trefoil; otherwise it is a path. */
export function isBuiltInTokenizer(spec: string): spec is keyof typeof BUILT_IN {
  return Object.hasOwn(BUILT_IN, spec);
}

export function createBuiltInTokenizer(name: keyof typeof BUILT_IN): Tokenizer {
  return BUILT_IN[name]();
}
