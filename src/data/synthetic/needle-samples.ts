/**
 * Training samples of the needle task (needle.ts). A sample has train.seq_len tokens: one sequence, or several shorter,
 * independent ones while the curriculum asks for them. So every batch has the same number of tokens, and the content of a
 * sample depends on its number alone.
 */
import { UsageError } from '../../errors.js';
import { IGNORED_TARGET, type SampleAddress, type Samples } from '../batch.js';
import { absorb, type Purpose } from '../hash.js';
import { answerPositions, fitTask, type NeedleTask, NeedleWriter } from './needle.js';
import { NumberStream } from './number-stream.js';

/** Samples before number `until` hold sequences of these lengths, each length in an equal part of the sample. */
export interface NeedleStage {
  readonly lengths: readonly number[];
  readonly until: number;
}

/**
 * `512:300, 512+2048:900`: sequences of 512 tokens in the first 300 samples, then half of each sample in sequences of 512 and
 * half in sequences of 2048, up to sample 900; then whole samples.
 */
export function parseCurriculum(text: string | null, sampleLength: number): NeedleStage[] {
  const stages = (text ?? '')
    .split(',')
    .filter((stage) => stage.trim() !== '')
    .map((stage) => {
      const [, lengths, until] = /^([\d\s+]+):\s*(\d+)\s*$/.exec(stage) ?? [];
      if (lengths === undefined)
        throw new UsageError(`data.needle_curriculum: ${stage.trim()} is not LENGTH:SAMPLES such as 512:300`);
      return { lengths: lengths.split('+').map(Number), until: Number(until) };
    });
  for (const [i, { lengths, until }] of stages.entries()) {
    const part = sampleLength / lengths.length;
    const odd = lengths.find((length) => !(length > 0 && part % length === 0));
    const whole = lengths.length === 1 ? 'train.seq_len' : `its share of train.seq_len,`;
    if (odd !== undefined) throw new UsageError(`data.needle_curriculum: ${odd} does not divide ${whole} ${part}`);
    if (i > 0 && until <= stages[i - 1].until)
      throw new UsageError(`data.needle_curriculum: the stage until ${until} ends before it begins`);
  }
  return [...stages, { lengths: [sampleLength], until: Number.POSITIVE_INFINITY }];
}

/** One sequence of a sample. */
interface Place {
  readonly start: number;
  readonly length: number;
  readonly writer: NeedleWriter;
}

/** The sequences of a sample in one stage of the curriculum. */
interface Stage {
  readonly until: number;
  readonly places: readonly Place[];
  /** Positions of tokens whose target is an answer. */
  readonly counted: Int32Array;
}

export class NeedleSamples implements Samples {
  /** Endless: all samples belong to epoch 0. */
  readonly perEpoch = Number.POSITIVE_INFINITY;
  readonly #stages: readonly Stage[];
  readonly #seedHash: number;

  constructor(
    task: NeedleTask,
    stages: readonly NeedleStage[],
    sampleLength: number,
    seed: number,
    purpose: typeof Purpose.needleTrain | typeof Purpose.needleValidation,
  ) {
    this.#stages = stages.map((stage) => layOut(task, stage, sampleLength));
    this.#seedHash = absorb(absorb(0, purpose), seed);
  }

  locate(index: number): SampleAddress {
    return { id: index, epoch: 0, position: index };
  }

  read(address: SampleAddress, window: Int32Array): void {
    const state = absorb(this.#seedHash, address.id);
    window[window.length - 1] = 0; // only a target, and an ignored one
    for (const [sequence, { start, length, writer }] of this.#at(address).places.entries())
      writer.write(new NumberStream(state, sequence), window.subarray(start, start + length));
  }

  documentStarts(address: SampleAddress): number[] {
    return this.#at(address).places.map(({ start }) => start);
  }

  /** Only answers count: nothing else in a sequence is predictable. */
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

function layOut(task: NeedleTask, { lengths, until }: NeedleStage, sampleLength: number): Stage {
  const part = sampleLength / lengths.length;
  const counted: number[] = [];
  const places = lengths.flatMap((length, i) => {
    const fitted = fitTask(task, length);
    const [writer, answers] = [new NeedleWriter(fitted), answerPositions(fitted, length)];
    return Array.from({ length: part / length }, (_, k): Place => {
      const start = i * part + k * length;
      counted.push(...answers.map((answer) => start + answer - 1));
      return { start, length, writer };
    });
  });
  return { until, places, counted: Int32Array.from(counted) };
}
