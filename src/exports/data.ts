/**
 * Tokenizers and batches.
 *
 * @packageDocumentation
 */

export type { CamelCase, CamelKeys } from '../config/casing.js';
export type { MixedSource, MixedSourceInput } from '../config/mixture.js';
export type { Batch } from '../data/batch.js';
export { applyChatTemplate, type ChatMessage, type ChatTemplateOptions, encodeChat } from '../data/chat.js';
export {
  type BuildProgress,
  createLoader,
  type DataLoader,
  type Loader,
  type LoaderOptions,
  type LoaderTelemetry,
  type OpenOptions,
  type SourceProgress,
  type ValidationSource,
} from '../data/loader.js';
export type { LoaderState } from '../data/pipeline/position.js';
export {
  type ChatTemplates,
  createTokenizer,
  type DecodeOptions,
  type EncodeOptions,
  type StreamDecoder,
  type Tokenizer,
} from '../data/tokenizer.js';
