/**
 * Tokenizers and batches.
 *
 * @packageDocumentation
 */

export type { Batch } from '../data/batch.js';
export { createLoader, type Loader, type LoaderOptions } from '../data/loader.js';
export { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
