/**
 * Little stories with something to remember. Three friends hide things ("Pip hid the red kite under the bridge."), other things
 * happen, and later a sentence needs what was said then ("The red kite was under the bridge."). Only the sentence of the fact
 * determines the answer: each thing and each place occurs in one fact of a story, and each fact is recalled once.
 *
 * A drill is the same without the story: facts, some scenes, and every fact recalled several times. What follows a thing can be
 * learned from drills in a fraction of the time, because far more of their tokens are answers.
 *
 * A story depends on its number stream and on the number of scenes alone.
 */
import type { NumberStream } from '../number-stream.js';
import {
  CHARACTERS,
  type Character,
  CLOSINGS,
  FACTS,
  HIDINGS,
  HIDINGS_AGAIN,
  OPENINGS,
  PLACES,
  REMINDERS,
  SCENES,
  THINGS,
} from './words.js';

/** A sentence that repeats a fact. */
export interface Recall {
  readonly thing: string;
  readonly place: string;
  /** The text that has to be remembered, with the space before it: ` was under the bridge`. */
  readonly answer: string;
  /** Offset of the answer in the text of the story. */
  readonly at: number;
  /** Offset of the fact, ` the red kite under the bridge`. */
  readonly factAt: number;
}

export interface Story {
  readonly text: string;
  /** In the order of the text. */
  readonly recalls: readonly Recall[];
}

/** Facts of the first and of the second group, at least and at most. */
const FIRST_FACTS = [3, 4] as const;
const SECOND_FACTS = [2, 2] as const;
/** A story of at least this many scenes has a second group of facts, one time in two. */
const SCENES_FOR_SECOND_GROUP = 3;
/** Facts of a drill, and how often each is recalled. */
const DRILL_FACTS = [2, 4] as const;
const DRILL_ROUNDS = 3;

interface Fact {
  readonly thing: string;
  readonly place: string;
  /** Offset of the fact in the text. */
  readonly at: number;
}

export function writeStory(random: NumberStream, scenes: number): Story {
  return new StoryWriter(random).story(scenes);
}

export function writeDrill(random: NumberStream, scenes: number): Story {
  return new StoryWriter(random).drill(scenes);
}

class StoryWriter {
  readonly #random: NumberStream;
  readonly #friends: readonly Character[];
  readonly #things: string[];
  readonly #places: string[];
  readonly #recalls: Recall[] = [];
  #text = '';

  constructor(random: NumberStream) {
    this.#random = random;
    this.#friends = this.#shuffled(CHARACTERS).slice(0, 3);
    this.#things = this.#shuffled(THINGS);
    this.#places = this.#shuffled(PLACES);
  }

  story(scenes: number): Story {
    const random = this.#random;
    this.#say(this.#pick(OPENINGS));
    this.#paragraph(this.#pick(HIDINGS));
    const pending = this.#hide(FIRST_FACTS);
    const hidesAgain = scenes >= SCENES_FOR_SECOND_GROUP && random.below(2) === 0;
    const again = hidesAgain ? 1 + random.below(scenes - 2) : -1;
    for (const [i, scene] of this.#shuffled(SCENES).slice(0, scenes).entries()) {
      this.#paragraph(scene);
      if (i === again) {
        this.#paragraph(this.#pick(HIDINGS_AGAIN));
        pending.push(...this.#hide(SECOND_FACTS));
      } else if (random.below(2) === 0 && pending.length > 1) this.#remind(pending);
    }
    this.#text += '\n';
    while (pending.length > 0) this.#remind(pending);
    this.#paragraph(this.#pick(CLOSINGS));
    return { text: this.#text, recalls: this.#recalls };
  }

  drill(scenes: number): Story {
    const facts = this.#hide(DRILL_FACTS);
    for (const scene of this.#shuffled(SCENES).slice(0, scenes)) this.#paragraph(scene);
    for (let round = 0; round < DRILL_ROUNDS; round++) for (const fact of this.#shuffled(facts)) this.#recall(fact);
    return { text: this.#text, recalls: this.#recalls };
  }

  #hide(range: readonly [number, number]): Fact[] {
    return Array.from({ length: this.#between(range) }, () => {
      const [thing, place, who] = [this.#things.pop()!, this.#places.pop()!, this.#pick(this.#friends).name];
      const fact = ` the ${thing} ${place}`;
      this.#say(this.#pick(FACTS), { who, fact });
      return { thing, place, at: this.#text.lastIndexOf(fact) };
    });
  }

  /** Recalls one of the pending facts, after a sentence that leads to it. */
  #remind(pending: Fact[]): void {
    const [fact] = pending.splice(this.#random.below(pending.length), 1);
    this.#say(this.#pick(REMINDERS));
    this.#recall(fact);
  }

  #recall({ thing, place, at: factAt }: Fact): void {
    this.#text += ` The ${thing}`;
    const answer = ` was ${place}`;
    this.#recalls.push({ thing, place, answer, at: this.#text.length, factAt });
    this.#text += `${answer}.`;
  }

  #between([least, most]: readonly [number, number]): number {
    return least + this.#random.below(most - least + 1);
  }

  #paragraph(template: string): void {
    this.#text += '\n';
    this.#say(template);
  }

  /** Adds the sentences of a template, after a space unless they begin a paragraph. */
  #say(template: string, words: Readonly<Record<string, string>> = {}): void {
    if (this.#text !== '' && !this.#text.endsWith('\n')) this.#text += ' ';
    this.#text += fillTemplate(template, (slot) => words[slot] ?? this.#wordOf(slot));
  }

  #wordOf(slot: string): string {
    const choices = slot.split('|');
    if (choices.length > 1) return this.#pick(choices);
    const [role, form] = slot.split(' ');
    return characterWord(this.#friends['abc'.indexOf(role)], form);
  }

  #pick<T>(from: readonly T[]): T {
    return from[this.#random.below(from.length)];
  }

  #shuffled<T>(from: readonly T[]): T[] {
    const order = [...from];
    for (let last = order.length - 1; last > 0; last--) {
      const other = this.#random.below(last + 1);
      [order[last], order[other]] = [order[other], order[last]];
    }
    return order;
  }
}

/** Replaces every `{slot}` of a template. */
function fillTemplate(template: string, wordOf: (slot: string) => string): string {
  return template.replace(/\{([^}]+)\}/g, (_, slot: string) => wordOf(slot));
}

function characterWord({ name, animal, pronoun }: Character, form: string | undefined): string {
  const possessive = pronoun === 'he' ? 'his' : 'her';
  const capital = (word: string) => word[0].toUpperCase() + word.slice(1);
  const words: Record<string, string> = {
    animal,
    he: pronoun,
    He: capital(pronoun),
    his: possessive,
    His: capital(possessive),
  };
  return form === undefined ? name : words[form];
}

/**
 * The phrases of facts and recalls. Each is one token (tokenizers/stories.ts): a fact binds a thing to a place, and a recall names
 * the thing and then the place.
 */
export function setPhrases(): string[] {
  return [
    ...THINGS.flatMap((thing) => PLACES.map((place) => ` the ${thing} ${place}`)),
    ...THINGS.map((thing) => ` The ${thing}`),
    ...PLACES.map((place) => ` was ${place}`),
  ];
}

/** Texts that together hold every other word of the grammar, with everything that can stand before it. */
export function everyWord(): string[] {
  const templates = [OPENINGS, HIDINGS, HIDINGS_AGAIN, FACTS, REMINDERS, SCENES, CLOSINGS].flat();
  return templates.flatMap((template) => {
    const slots = [...template.matchAll(/\{([^}]+)\}/g)].map(([, slot]) => wordsOf(slot));
    const longest = Math.max(1, ...slots.map((words) => words.length));
    return Array.from({ length: longest }, (_, i) => {
      let slot = 0;
      const text = fillTemplate(template, () => slots[slot][i % slots[slot++].length]);
      return [`\n${text}`, ` ${text}`];
    }).flat();
  });
}

function wordsOf(slot: string): readonly string[] {
  if (slot === 'fact') return [''];
  if (slot === 'who') return CHARACTERS.map(({ name }) => name);
  const choices = slot.split('|');
  if (choices.length > 1) return choices;
  return CHARACTERS.map((character) => characterWord(character, slot.split(' ')[1]));
}
