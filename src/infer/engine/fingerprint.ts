/** A hash of everything that cached keys and values depend on besides the tokens. */
import { createHash } from 'node:crypto';
import type { DecodeCache } from '../../model/cache.js';
import type { LanguageModel } from '../../model/language-model.js';
import { checksums } from '../../ops/checksum/op.js';
import { trefoilVersion } from '../../run/version.js';

/**
 * Weights, shape, page layout, device and version of a model, as a hex digest. `settings`: anything else that the pages
 * depend on. The device reads all weights once.
 */
export function modelFingerprint(model: LanguageModel, cache: DecodeCache, settings: unknown): string {
  const { device, shape, parameters } = model;
  // On the CPU results are the same on every processor with the same vector width, which the layout shows.
  const place = device.kind === 'cpu' ? 'cpu' : `${device.kind} ${device.name}`;
  const hash = createHash('sha256');
  hash.update(JSON.stringify([trefoilVersion(), place, shape, cache.layout, settings]));
  const sums = checksums(
    device,
    parameters.map(({ value }) => value),
  );
  parameters.forEach(({ name, value }, i) => {
    hash.update(JSON.stringify([name, value.dtype, value.shape, String(sums[i])]));
  });
  return hash.digest('hex');
}
