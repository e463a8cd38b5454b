/** A hash of everything that cached keys and values depend on besides the tokens. */
import { createHash } from 'node:crypto';
import { setImmediate } from 'node:timers/promises';
import type { DecodeCache } from '../../model/cache.js';
import type { LanguageModel } from '../../model/language-model.js';
import { trefoilVersion } from '../../run/version.js';

/**
 * Weights, shape, page layout, device and version of a model, as a hex digest. `settings`: anything else that the pages
 * depend on. Takes a second or so per GB of weights; the event loop runs between tensors.
 */
export async function modelFingerprint(model: LanguageModel, cache: DecodeCache, settings: unknown): Promise<string> {
  const { device, shape, parameters } = model;
  // On the CPU results are the same on every processor with the same vector width, which the layout shows.
  const place = device.kind === 'cpu' ? 'cpu' : `${device.kind} ${device.name}`;
  const hash = createHash('sha256');
  hash.update(JSON.stringify([trefoilVersion(), place, shape, cache.layout, settings]));
  for (const { name, value } of parameters) {
    hash.update(JSON.stringify([name, value.dtype, value.shape])).update(value.readBytes());
    await setImmediate();
  }
  return hash.digest('hex');
}
