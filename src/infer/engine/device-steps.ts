/** What the decode steps of a GPU need besides tokens: settings of the draws, and a first launch. */
import type { CachedSequence } from '../../model/cache.js';
import { SETTINGS } from '../../ops/sample/op.js';
import type { DeviceDecoder } from '../device-decoder.js';
import type { Share } from './slot.js';

/** Launches a step of every kind of batch, which compiles and loads its kernels. */
export function warmUpSteps(decoder: DeviceDecoder, sequence: CachedSequence, maxBatch: number): void {
  for (const size of batchSizes(maxBatch)) warmUpStep(decoder, sequence, size);
}

/** Batch sizes that between them use all kernels of the decode step: 1, 2, 3, 4, 6, 8, 12, … and the largest first. */
function batchSizes(most: number): number[] {
  const sizes = [most];
  for (let size = 1; size < most; size *= 2) sizes.push(size, ...(size > 1 && 1.5 * size < most ? [1.5 * size] : []));
  return sizes;
}

/** Launches a step, twice for a single sequence so that it is also recorded, and reads what a step gives back. */
function warmUpStep(decoder: DeviceDecoder, sequence: CachedSequence, size: number): void {
  const forks = Array.from({ length: size }, () => sequence.fork());
  const settings = new Float64Array(SETTINGS * size).map((_, i) => [1, 0, 0.9, 0, 0.5][i % SETTINGS]);
  for (let i = 0; i < (size === 1 ? 2 : 1) && decoder.hasRoom(forks); i++) {
    decoder.launch(
      forks,
      forks.map(() => 0),
      settings,
    );
    decoder.nextLater()();
    decoder.logitsOf(0);
  }
  for (const fork of forks) fork.free();
}

/** Settings of the draws that follow the last tokens of the shares and `ahead` more; null if all are the argmax. */
export function drawSettings(shares: readonly Share[], ahead: number): Float64Array | null {
  if (shares.every(({ slot }) => slot.request.draws?.isArgmax ?? true)) return null;
  const settings = new Float64Array(SETTINGS * shares.length); // temperature 0: the argmax
  shares.forEach(({ slot: { request, sequence } }, i) => {
    if (request.draws) settings.set(request.draws.settings(sequence.drawn + ahead), SETTINGS * i);
  });
  return settings;
}
