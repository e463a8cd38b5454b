/**
 * Tokenizers and batches.
 *
 * @packageDocumentation
 */

export type { Batch } from '../data/batch.js';
export type { LoaderState, NumberedLoader } from '../data/loader.js';
export { createLoader, type Loader, type LoaderOptions } from '../data/loader.js';
export type { OnProgress, PrepareProgress } from '../data/shards/prepare.js';
export type { NeedleOptions, OpenSourceOptions, SourceOptions } from '../data/source.js';
export { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
