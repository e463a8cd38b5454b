/**
 * Gives the tests a cache of their own, which is removed at the end: thousands of tokenised test documents in the user's
 * cache would slow down every later build of shards. Compiled kernels are those of the user's cache.
 */
import { mkdirSync, rmSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import type { TestProject } from 'vitest/node';
import { kernelCacheFolder } from '../device/kernel-cache.js';

export default function setup({ config }: TestProject): () => void {
  const cache = config.env['TREFOIL_CACHE']!; // set in vitest.config.ts
  const kernels = kernelCacheFolder(process.env);
  for (const folder of [kernels, cache]) mkdirSync(folder, { recursive: true, mode: 0o755 });
  symlinkSync(kernels, join(cache, 'kernels'));
  return () => rmSync(cache, { recursive: true, force: true });
}
