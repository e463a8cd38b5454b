/**
 * Training samples of whole conversations, packed so that little is padding.
 *
 * A sample is a window of S + 1 tokens that holds whole chats, one after the other, and then padding. Chats never continue
 * in another sample, and attention never crosses from one to the next: each is a document of its own, with positions from
 * 0. Only tokens of the assistant are targets.
 */

import { IGNORED_TARGET, type SampleAddress, type Samples } from '../../batch.js';
import { createPermutation } from '../../hash.js';
import type { EncodedChat } from './encode.js';

export interface ChatSampleOptions {
  readonly sequenceLength: number;
  /** Token of the padding. */
  readonly padding: number;
  readonly seed: number;
  /** Visit the samples of an epoch in a random order, another one for each epoch. */
  readonly shuffle: boolean;
}

export class ChatSamples implements Samples {
  readonly perEpoch: number;
  readonly #chats: readonly EncodedChat[];
  readonly #bins: readonly (readonly number[])[];
  readonly #options: ChatSampleOptions;
  #epoch = -1;
  #permute: (index: number) => number = (index) => index;

  /** Chats must not be longer than S + 1 tokens. */
  constructor(chats: readonly EncodedChat[], options: ChatSampleOptions) {
    this.#chats = chats;
    this.#options = options;
    this.#bins = packChats(
      chats.map(({ tokens }) => tokens.length),
      options.sequenceLength + 1,
    );
    this.perEpoch = this.#bins.length;
  }

  locate(index: number): SampleAddress {
    const epoch = Math.floor(index / this.perEpoch);
    if (this.#options.shuffle && epoch !== this.#epoch) {
      this.#permute = createPermutation(this.perEpoch, this.#options.seed, epoch);
      this.#epoch = epoch;
    }
    const position = this.#permute(index - epoch * this.perEpoch);
    return { id: epoch * this.perEpoch + position, epoch, position };
  }

  read(address: SampleAddress, window: Int32Array): void {
    window.fill(this.#options.padding);
    this.#place(address, ({ tokens }, at) => window.set(tokens, at));
  }

  documentStarts(address: SampleAddress): number[] {
    const starts: number[] = [];
    const end = this.#place(address, (_, at) => starts.push(at));
    // The padding is a document too, so that no chat attends to it.
    return end <= this.#options.sequenceLength ? [...starts, end] : starts;
  }

  maskTargets(address: SampleAddress, targets: Int32Array): void {
    const given = targets.slice();
    targets.fill(IGNORED_TARGET);
    this.#place(address, ({ counted }, at) => {
      // A chat's first token would be predicted from another chat.
      for (let i = 1; i < counted.length; i++) if (counted[i] === 1) targets[at + i - 1] = given[at + i - 1];
    });
  }

  /** Calls `visit` for the chats of a sample; returns where the last one ends. */
  #place({ position }: SampleAddress, visit: (chat: EncodedChat, at: number) => void): number {
    let at = 0;
    for (const index of this.#bins[position]) {
      visit(this.#chats[index], at);
      at += this.#chats[index].tokens.length;
    }
    return at;
  }
}

/** Best fit: each chat goes where the least room is left over. Returns the indices of the chats of each sample. */
export function packChats(lengths: readonly number[], capacity: number): number[][] {
  const bins: number[][] = [];
  /** Bins by the room they have left. */
  const byRoom: number[][] = Array.from({ length: capacity + 1 }, () => []);
  lengths.forEach((length, chat) => {
    let room = length;
    while (room <= capacity && byRoom[room].length === 0) room++;
    const bin = room <= capacity ? byRoom[room].pop()! : bins.push([]) - 1;
    bins[bin].push(chat);
    byRoom[Math.min(room, capacity) - length].push(bin);
  });
  return bins;
}
