/**
 * Training samples of the story grammar: each is filled with whole stories, of as many scenes as fit. With `drills` three of four
 * samples are drills instead, which grow over the first `drills` samples; of a drill only the answers count.
 */

import { IGNORED_TARGET, type SampleAddress, type Samples } from '../../batch.js';
import { absorb, type Purpose } from '../../hash.js';
import type { Tokenizer } from '../../tokenizer.js';
import { NumberStream } from '../number-stream.js';
import { type Story, writeDrill, writeStory } from './grammar.js';

/** Scenes of the longest story and of the longest drill. */
const STORY_SCENES = 12;
const DRILL_SCENES = 8;

interface EncodedStory {
  /** With the separator behind it. */
  readonly tokens: Int32Array;
  /** Tokens of all answers. */
  readonly answers: readonly number[];
}

export class StorySamples implements Samples {
  /** There is no end to it: all samples belong to epoch 0. */
  readonly perEpoch = Number.POSITIVE_INFINITY;
  readonly #tokenizer: Tokenizer;
  readonly #length: number;
  readonly #drills: number;
  readonly #seedHash: number;
  /** The sample written last: its tokens, document starts and targets are asked for one after the other. */
  #last: { readonly id: number; readonly stories: readonly EncodedStory[] } = { id: -1, stories: [] };

  constructor(
    tokenizer: Tokenizer,
    { sequenceLength, drills }: { readonly sequenceLength: number; readonly drills: number },
    seed: number,
    purpose: typeof Purpose.storiesTrain | typeof Purpose.storiesValidation,
  ) {
    this.#tokenizer = tokenizer;
    this.#length = sequenceLength + 1;
    this.#drills = drills;
    this.#seedHash = absorb(absorb(0, purpose), seed);
  }

  locate(index: number): SampleAddress {
    return { id: index, epoch: 0, position: index };
  }

  read(address: SampleAddress, window: Int32Array): void {
    for (const [at, { tokens }] of this.#placed(address)) window.set(tokens.subarray(0, window.length - at), at);
  }

  documentStarts(address: SampleAddress): number[] {
    return this.#placed(address).map(([at]) => at);
  }

  maskTargets(address: SampleAddress, targets: Int32Array): void {
    if (!this.#isDrill(address)) return;
    const counted = new Set(
      this.#placed(address).flatMap(([at, { answers }]) => answers.map((token) => at + token - 1)),
    );
    for (let i = 0; i < targets.length; i++) if (!counted.has(i)) targets[i] = IGNORED_TARGET;
  }

  /** Mixed from the start: recall that is learned from drills alone is lost when stories come in later. */
  #isDrill({ id }: SampleAddress): boolean {
    return this.#drills > 0 && id % 4 !== 3;
  }

  /** The stories of a sample and where each begins; the last one may be longer than what is left of the sample. */
  #placed(address: SampleAddress): (readonly [number, EncodedStory])[] {
    if (this.#last.id !== address.id) this.#last = { id: address.id, stories: this.#write(address) };
    let next = 0;
    return this.#last.stories.map((story) => {
      next += story.tokens.length;
      return [next - story.tokens.length, story] as const;
    });
  }

  #write(address: SampleAddress): EncodedStory[] {
    const state = absorb(this.#seedHash, address.id);
    const isDrill = this.#isDrill(address);
    // Drills grow: short ones teach to find a thing at all, longer ones to find it far away.
    const most = isDrill
      ? Math.min(DRILL_SCENES, Math.floor((DRILL_SCENES * address.id) / this.#drills))
      : STORY_SCENES;
    const stories: EncodedStory[] = [];
    for (let room = this.#length; room > 0; room -= stories.at(-1)!.tokens.length) {
      const number = stories.length;
      const scenes = new NumberStream(state, number).below(most + 1);
      stories.push(
        this.#fitting(isDrill ? writeDrill : writeStory, () => new NumberStream(state, number), scenes, room),
      );
    }
    return stories;
  }

  /** A story with fewer scenes until it fits into `room` tokens or has none left. `random` gives the same numbers each time. */
  #fitting(write: typeof writeStory, random: () => NumberStream, scenes: number, room: number): EncodedStory {
    for (let count = scenes; ; count--) {
      const story = encodeStory(this.#tokenizer, write(random(), count));
      if (story.tokens.length <= room || count === 0) return story;
    }
  }
}

/** Encodes a story in one pass. Answers begin with a space, so that no token crosses their borders. */
function encodeStory(tokenizer: Tokenizer, { text, recalls }: Story): EncodedStory {
  const parts: Int32Array[] = [];
  const answers: number[] = [];
  let length = 0;
  const add = (part: Int32Array) => {
    parts.push(part);
    length += part.length;
  };
  let done = 0;
  for (const { at, answer } of recalls) {
    add(tokenizer.encode(text.slice(done, at)));
    const first = length;
    add(tokenizer.encode(answer));
    for (let token = first; token < length; token++) answers.push(token);
    done = at + answer.length;
  }
  add(tokenizer.encode(text.slice(done)));
  add(Int32Array.of(tokenizer.separator));
  const tokens = new Int32Array(length);
  let at = 0;
  for (const part of parts) {
    tokens.set(part, at);
    at += part.length;
  }
  return { tokens, answers };
}
