/** An engine as servers and programs use it: it runs by itself and keeps prefixes. */
import type { TextSource } from '../text-source.js';
import { BatchEngine } from './engine.js';
import type { Engine, EngineOptions } from './interface.js';
import { openPrefixes } from './prefix/open.js';

/** An engine for a model that `loadModel` returned. */
export function createEngine(source: TextSource, options: EngineOptions = {}): Engine {
  return new BatchEngine(source, options, true, openPrefixes);
}
