/**
 * Uniform random tokens, for smoke tests and benchmarks. A token is a hash of (seed, sample, position), so any sample can
 * be generated on any rank, in any order. The hash is two rounds of murmur3's finaliser with a 64-bit key per sample, which
 * keeps samples distinct; it is not cryptographic.
 */

import type { SampleAddress, Samples } from '../batch.js';
import { absorb, mix32, Purpose } from '../hash.js';

export class UniformSamples implements Samples {
  /** Endless: all samples belong to epoch 0. */
  readonly perEpoch = Number.POSITIVE_INFINITY;
  readonly #vocabSize: number;
  readonly #seedHash: number;

  constructor(vocabSize: number, seed: number, part: 'train' | 'validation') {
    this.#vocabSize = vocabSize;
    const purpose = part === 'train' ? Purpose.syntheticTrain : Purpose.syntheticValidation;
    this.#seedHash = absorb(absorb(0, purpose), seed);
  }

  locate(index: number): SampleAddress {
    return { id: index, epoch: 0, position: index };
  }

  read(address: SampleAddress, window: Int32Array): void {
    const firstKey = absorb(this.#seedHash, address.id);
    const secondKey = absorb(firstKey, address.id);
    const scale = this.#vocabSize / 2 ** 32;
    for (let position = 0; position < window.length; position++) {
      window[position] = Math.floor(mix32(mix32(position ^ firstKey) ^ secondKey) * scale);
    }
  }

  documentStarts(): number[] {
    return [];
  }
}
