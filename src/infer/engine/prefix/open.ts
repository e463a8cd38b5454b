/** Opens the cache of prefixes of an engine: in memory, and in files if its options name a folder. */
import type { DecodeCache } from '../../../model/cache.js';
import type { LanguageModel } from '../../../model/language-model.js';
import type { SparseOptions } from '../../../ops/attention/nsa.js';
import type { EngineOptions } from '../interface.js';
import { PrefixCache, prefixBlock } from './cache.js';
import { PrefixFiles } from './files.js';
import { modelFingerprint } from './keys.js';

/** The part of an engine that its prefixes depend on. */
export interface PrefixOwner {
  readonly model: LanguageModel;
  readonly kernels: SparseOptions;
  readonly cache: DecodeCache;
  readonly tile: number;
  /** Whether a prompt is being read, which copies to the host would delay. */
  isReading(): boolean;
}

/** A function such as `openPrefixes`: an engine in a browser has none. */
export type OpenPrefixes = (owner: PrefixOwner, bytes: number, options: EngineOptions) => PrefixCache;

const DEFAULT_FILE_BYTES = 16 * 2 ** 30;

export function openPrefixes(owner: PrefixOwner, bytes: number, options: EngineOptions): PrefixCache {
  const { model, kernels, cache, tile, isReading } = owner;
  const block = prefixBlock(cache, tile);
  const { prefixCacheDir, prefixCacheDirBytes = DEFAULT_FILE_BYTES } = options;
  if (prefixCacheDir === undefined) return new PrefixCache(cache, block, bytes);
  const files = new PrefixFiles(prefixCacheDir, prefixCacheDirBytes);
  const fingerprint = modelFingerprint(model, cache, [block, kernels]);
  return new PrefixCache(cache, block, bytes, { files, fingerprint, isReading });
}
