/**
 * Training samples of the needle task (needle.ts). A sample has train.seq_len tokens: one sequence, or while the curriculum
 * asks for shorter ones, as many of those as fit, each on its own. So every batch has the same number of tokens, and which
 * sequences a sample holds depends on its number alone.
 */
import { UsageError } from '../errors.js';
import { IGNORED_TARGET } from './batch.js';
import { absorb, type Purpose } from './hash.js';
import { answerPositions, fitTask, type NeedleTask, NeedleWriter, NumberStream } from './needle.js';
import type { SampleAddress, Samples } from './stream.js';

/** Samples before number `until` hold sequences of `length` tokens. */
export interface NeedleStage {
  readonly length: number;
  readonly until: number;
}

/** `512:300, 2048:900`: sequences of 512 tokens in the first 300 samples, then of 2048 up to sample 900, then whole samples. */
export function parseCurriculum(text: string | null, sampleLength: number): NeedleStage[] {
  const stages = (text ?? '')
    .split(',')
    .filter((stage) => stage.trim() !== '')
    .map((stage) => {
      const [, length, until] = /^\s*(\d+)\s*:\s*(\d+)\s*$/.exec(stage) ?? [];
      if (length === undefined)
        throw new UsageError(`data.needle_curriculum: ${stage.trim()} is not LENGTH:SAMPLES such as 512:300`);
      return { length: Number(length), until: Number(until) };
    });
  for (const [i, { length, until }] of stages.entries()) {
    if (length < 1 || sampleLength % length !== 0)
      throw new UsageError(`data.needle_curriculum: ${length} does not divide train.seq_len ${sampleLength}`);
    if (i > 0 && until <= stages[i - 1].until)
      throw new UsageError(`data.needle_curriculum: the stage until ${until} ends before it begins`);
  }
  return [...stages, { length: sampleLength, until: Number.POSITIVE_INFINITY }];
}

/** What is made in one stage. */
interface Stage {
  readonly length: number;
  readonly until: number;
  readonly writer: NeedleWriter;
  /** Of the tokens of a sample that are asked for the next one. */
  readonly counted: Int32Array;
}

export class NeedleSamples implements Samples {
  /** There is no end to it: all samples belong to epoch 0. */
  readonly perEpoch = Number.POSITIVE_INFINITY;
  readonly #stages: readonly Stage[];
  readonly #sampleLength: number;
  readonly #seedHash: number;

  constructor(
    task: NeedleTask,
    stages: readonly NeedleStage[],
    seed: number,
    purpose: typeof Purpose.needleTrain | typeof Purpose.needleValidation,
  ) {
    const sampleLength = stages[stages.length - 1].length;
    this.#sampleLength = sampleLength;
    this.#stages = stages.map(({ length, until }) => {
      const fitted = fitTask(task, length);
      const answers = answerPositions(fitted, length);
      const counted = startsOf(sampleLength, length).flatMap((start) => answers.map((answer) => start + answer - 1));
      return { length, until, writer: new NeedleWriter(fitted), counted: Int32Array.from(counted) };
    });
    this.#seedHash = absorb(absorb(0, purpose), seed);
  }

  locate(index: number): SampleAddress {
    return { id: index, epoch: 0, position: index };
  }

  read(address: SampleAddress, window: Int32Array): void {
    const { length, writer } = this.#at(address);
    const state = absorb(this.#seedHash, address.id);
    for (const [sequence, start] of this.documentStarts(address).entries())
      writer.write(new NumberStream(state, sequence), window.subarray(start, start + length));
    window[this.#sampleLength] = 0; // only ever a target, and an ignored one
  }

  documentStarts(address: SampleAddress): number[] {
    return startsOf(this.#sampleLength, this.#at(address).length);
  }

  /** Only answers count: nothing else in a sequence can be known. */
  maskTargets(address: SampleAddress, targets: Int32Array): void {
    const { counted } = this.#at(address);
    const kept = counted.map((position) => targets[position]);
    targets.fill(IGNORED_TARGET);
    for (let i = 0; i < counted.length; i++) targets[counted[i]] = kept[i];
  }

  #at({ id }: SampleAddress): Stage {
    return this.#stages.find(({ until }) => id < until)!;
  }
}

function startsOf(sampleLength: number, length: number): number[] {
  return Array.from({ length: sampleLength / length }, (_, sequence) => sequence * length);
}
