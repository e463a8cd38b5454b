/**
 * A mixture of sources (data.sources) as one source of samples known by number. Every sample comes from one source; sample
 * number k takes the next one of its source. So rank counts, restarts and reading ahead have no part in the order.
 */
import type { MixedSource } from '../../config/mixture.js';
import type { Config } from '../../config/schema.js';
import { ExitCode, TrefoilError, UsageError } from '../../errors.js';
import { plural } from '../../text.js';
import type { SampleAddress, Samples } from '../batch.js';
import type { SourceProgress } from '../loader.js';
import type { NumberedSource } from './generated-source.js';
import { MixtureOrder } from './mixture-order.js';
import type { SourcePosition } from './position.js';

/** One source of a mixture. */
export interface Part {
  readonly spec: MixedSource;
  readonly source: NumberedSource;
}

export class Mixture implements Samples {
  /** Sources end, the mixture does not: `expect` says when. */
  readonly perEpoch = Number.POSITIVE_INFINITY;
  /** By name, so that the order does not depend on that of the config. */
  readonly parts: readonly Part[];
  readonly #order: MixtureOrder;
  readonly #sequenceLength: number;
  readonly #masks: boolean;
  /** Samples that each source had given before sample `#from`: not 0 after a resume. */
  #from = 0;
  #taken: readonly number[];
  readonly #counts: number[];

  constructor(parts: readonly Part[], { data, train }: Config) {
    this.parts = [...parts].sort((a, b) => (a.spec.name < b.spec.name ? -1 : 1));
    this.#sequenceLength = train.seq_len;
    this.#masks = data.document_mask;
    this.#order = new MixtureOrder(
      this.parts.map((part) => part.spec.weight / this.#tokensPerSample(part)),
      data.seed ?? train.seed,
    );
    this.#taken = this.parts.map(() => 0);
    this.#counts = this.parts.map(() => 0);
  }

  /** Whether the documents of some source are masked from each other. */
  get documentMask(): boolean {
    return this.#masks || this.parts.some(({ source }) => source.documentMask);
  }

  /** Samples that a source gives before sample number `sample` of the run. */
  taken(part: number, sample: number): number {
    return this.#taken[part] + this.#order.count(part, sample) - this.#counts[part];
  }

  /** Throws, with the name of the source, if one ends before sample number `end` of the run. */
  expect(end: number): void {
    for (const [part, { spec, source }] of this.parts.entries()) {
      const limit = spec.epochs * source.train.perEpoch;
      if (this.taken(part, end) <= limit) continue;
      throw new TrefoilError(
        `data.sources: ${spec.name} has ended after ${plural(spec.epochs, 'epoch')}; add data to it, raise its epochs, ` +
          'or train fewer steps',
        ExitCode.dataSource,
      );
    }
  }

  /** The source that ends first before sample number `sample`, and the first sample that it lacks. */
  firstEnd(sample: number): { name: string; sample: number } | null {
    const ends = (part: number, at: number) =>
      this.taken(part, at) > this.parts[part].spec.epochs * this.parts[part].source.train.perEpoch;
    let first: { name: string; sample: number } | null = null;
    for (const part of this.parts.keys()) {
      let low = this.#from;
      let high: number = first?.sample ?? sample;
      if (!ends(part, high)) continue;
      while (high - low > 1) {
        const middle = Math.floor((low + high) / 2);
        if (ends(part, middle)) high = middle;
        else low = middle;
      }
      first = { name: this.parts[part].spec.name, sample: high - 1 };
    }
    return first;
  }

  progress(sample: number): SourceProgress[] {
    return this.parts.map((part, index) => {
      const samples = this.taken(index, sample);
      return {
        name: part.spec.name,
        tokens: Math.round(samples * this.#tokensPerSample(part)),
        epoch: samples / part.source.train.perEpoch,
        tokensPerEpoch: part.source.tokensPerEpoch,
      };
    });
  }

  /** The position of every source, for a checkpoint. */
  state(sample: number): SourcePosition[] {
    return this.parts.map(({ spec, source }, part) => ({
      name: spec.name,
      dataset: source.identity,
      taken: this.taken(part, sample),
    }));
  }

  /**
   * Continues at sample number `sample`. The present weights hold from here on: with other weights than before, a source
   * goes on where it was, at its new share.
   */
  restore(saved: readonly SourcePosition[], sample: number): void {
    for (const { name, taken } of saved)
      if (!this.parts.some(({ spec }) => spec.name === name))
        throw new UsageError(
          `data.sources: ${name} is missing, from which this run has taken ${plural(taken, 'sample')}; put it back, ` +
            'or start a new run in another folder',
        );
    this.#taken = this.parts.map(({ spec, source }) => {
      const before = saved.find(({ name }) => name === spec.name);
      if (before === undefined) return 0;
      if (before.dataset === source.identity) return before.taken;
      throw new UsageError(
        `data.sources: ${spec.name} (${spec.path ?? spec.source}) holds other data than this run was trained on; use the ` +
          'same data and tokenizer, or start a new run in another folder',
      );
    });
    this.#from = sample;
    for (const part of this.parts.keys()) this.#counts[part] = this.#order.count(part, sample);
  }

  locate(index: number): SampleAddress {
    const part = this.#order.sourceAt(index);
    const address = this.parts[part].source.train.locate(this.taken(part, index));
    return { ...address, id: address.id * this.parts.length + part };
  }

  read(address: SampleAddress, window: Int32Array): void {
    const { samples, inner } = this.#inside(address);
    samples.read(inner, window);
  }

  documentStarts(address: SampleAddress): number[] {
    const { samples, inner, isMasked } = this.#inside(address);
    return isMasked ? samples.documentStarts(inner) : [];
  }

  maskTargets(address: SampleAddress, targets: Int32Array): void {
    const { samples, inner } = this.#inside(address);
    samples.maskTargets?.(inner, targets);
  }

  close(): void {
    for (const { source } of this.parts) source.close();
  }

  #inside(address: SampleAddress): { samples: Samples; inner: SampleAddress; isMasked: boolean } {
    const { source } = this.parts[address.id % this.parts.length];
    const inner = { ...address, id: Math.floor(address.id / this.parts.length) };
    return { samples: source.train, inner, isMasked: this.#masks || source.documentMask === true };
  }

  /** Samples of chats end in padding, which is no token of their source. */
  #tokensPerSample({ source: { tokensPerEpoch, train } }: Part): number {
    return Number.isFinite(tokensPerEpoch) && Number.isFinite(train.perEpoch)
      ? Math.min(this.#sequenceLength, tokensPerEpoch / train.perEpoch)
      : this.#sequenceLength;
  }
}
