/**
 * Drafts by prompt look-up: the guess for the next tokens is what followed the last tokens of the text where they
 * occurred before. Good for texts that repeat themselves or quote their prompt.
 */

/** Numbers of last tokens that are looked up, the longest match first. */
const SIZES = [8, 3] as const;
/** Tokens after which a request whose guesses were all wrong is guessed again, at most. */
const LONGEST_PAUSE = 16;

export class PromptLookup {
  readonly #context: readonly number[];
  readonly #most: number;
  /** For each of `SIZES`, by hash of that number of tokens: where the token after their last occurrence is. */
  readonly #places = SIZES.map(() => new Map<number, number>());
  /** Places up to this one are entered. */
  #entered = 0;
  #limit: number;
  #pause = 0;
  #resumeAt = 0;

  /** `context`: the text, which grows. `most`: tokens of a guess. */
  constructor(context: readonly number[], most: number) {
    this.#context = context;
    this.#most = most;
    this.#limit = most;
  }

  /** At most `count` tokens that may follow; often none. */
  next(count: number): number[] {
    const { length } = this.#context;
    const wanted = Math.min(count, this.#limit);
    if (wanted < 1 || length < this.#resumeAt) return [];
    this.#enter();
    for (const [i, size] of SIZES.entries()) {
      const place = length < size ? undefined : this.#places[i].get(this.#hash(length, size));
      if (place === undefined || !this.#isSame(place, size)) continue;
      // A text with a short period: its continuation runs into the guess itself.
      const guess: number[] = [];
      for (let at = place; guess.length < wanted; at++)
        guess.push(at < length ? this.#context[at] : guess[at - length]);
      return guess;
    }
    return [];
  }

  /** Result of a guess: longer ones follow a right one, shorter ones a partly right one, a pause a wrong one. */
  checked(guessed: number, accepted: number): void {
    this.#limit = Math.min(this.#most, accepted === guessed ? 2 * this.#limit : Math.max(1, accepted));
    this.#pause = accepted > 0 ? 0 : Math.min(LONGEST_PAUSE, 2 * this.#pause + 1);
    this.#resumeAt = this.#context.length + this.#pause;
  }

  /** Enters the places of all tokens of the text: the tokens before each of them are known, and it follows them. */
  #enter(): void {
    for (; this.#entered < this.#context.length; this.#entered++)
      for (const [i, size] of SIZES.entries())
        if (this.#entered >= size) this.#places[i].set(this.#hash(this.#entered, size), this.#entered);
  }

  /** Hash of the `size` tokens before `end`. */
  #hash(end: number, size: number): number {
    let hash = 0;
    for (let at = end - size; at < end; at++) hash = Math.imul(hash ^ this.#context[at], 0x9e3779b1) ^ (hash >>> 15);
    return hash;
  }

  /** Whether the `size` tokens before `place` are the last ones of the text: hashes may collide. */
  #isSame(place: number, size: number): boolean {
    const { length } = this.#context;
    for (let back = 1; back <= size; back++)
      if (this.#context[place - back] !== this.#context[length - back]) return false;
    return true;
  }
}
