// The retrieval task of retrieval.mjs: code with assignments in it, and questions for their values further on.
//
//   # set amber river stone: amber river stone482    an assignment of the value 482, between two lines of the code
//   # get amber river stone: amber river stone482    a question: the digits are the answer
//
// A name is three words, no word of which is in another name of the sequence, and a line has it twice: a compressed key is the
// mean of its block, and one word would hardly show in it. The value stands directly behind the name. It is a number of three
// digits that is one token, where the tokenizer has such: a second token would have to be found by the name two tokens back,
// which is a search of its own.
//
// A passkey is the only assignment of a sequence. Training sequences may also repeat pieces of their own code.

/** Number of different words: in long training sequences, and the first of them in short ones and in an evaluation. Words in a name. */
const WORDS = { all: 4096, first: 2048 };
const WORDS_PER_NAME = 3;
const PASSKEY = 'the secret password';
/** Largest share of a training sequence that is assignments and questions: of one up to `short` tokens, and of longer ones. */
const MAX_LINES = { short: 1024, ofShort: 0.8, ofLong: 0.45 };
/** The same of a sequence with repeated code, which needs room. */
const MAX_LINES_BESIDE_REPEATED = 0.55;
/** Share of a training sequence that is repeated code, the lengths of its pieces, and tokens at the start of a piece that do not count. */
const REPEATED = 0.2;
const PIECE = { least: 24, most: 72, uncounted: 4 };
/** Share of the assignments of a long sequence that are asked for twice. The second question can be answered by the first one's line. */
const ASKED_TWICE = 0.25;
/** Share of long training sequences whose questions stand together, and how many do: as at the end of an evaluation. */
const TOGETHER = { share: 0.5, most: 32 };
/** Shortest distance between an assignment and its question, in tokens of the code: as a share of the sequence, and at most. */
const NEAREST = { share: 1 / 16, most: 32 };
/** Share of training sequences with few assignments, and of those that begin with one: the first tokens are unlike all others. */
const SPARSE_SHARE = 0.25;
const FIRST_SHARE = 0.5;

/** A small seeded generator (mulberry32): numbers in [0, 1). */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Writes assignments and questions into code, as tokens of one tokenizer. */
export class RetrievalTask {
  #tokenizer;
  #words;
  /** Tokens of each value. */
  #values;
  /** By token: whether its text ends a line. */
  #endsLine;
  #newline;
  /** Tokens of a line: of an assignment, or a question. */
  #tokensPerLine;

  constructor(tokenizer, words = wordsOf(tokenizer)) {
    this.#tokenizer = tokenizer;
    this.#words = words;
    this.#newline = this.#tokenizer.encode('\n');
    const values = Array.from({ length: 900 }, (_, i) => this.#tokenizer.encode(String(100 + i)));
    const shortest = Math.min(...values.map((value) => value.length));
    this.#values = values.filter((value) => value.length === shortest);
    this.#tokensPerLine = this.#pair(nameOf(words), () => 0.5).assignment.length;
    this.#endsLine = Uint8Array.from({ length: tokenizer.vocabSize }, (_, id) =>
      Number(tokenizer.decode([id]).endsWith('\n')),
    );
  }

  /** Largest number of assignments in a training sequence. */
  mostPairs(length, isRepeated = false) {
    const ofAll = length <= MAX_LINES.short ? MAX_LINES.ofShort : MAX_LINES.ofLong;
    const share = isRepeated ? Math.min(ofAll, MAX_LINES_BESIDE_REPEATED) : ofAll;
    const lines = 1 + (length <= MAX_LINES.short ? 2 : 1 + ASKED_TWICE);
    const fitting = Math.max(1, Math.floor((share * length) / (lines * this.#tokensPerLine)));
    return Math.min(Math.floor(this.#words.length / WORDS_PER_NAME), fitting);
  }

  /**
   * A training sequence of `length` tokens and one more: assignments anywhere, each asked for once or twice, at distances
   * from a few lines to the whole sequence. Targets are the answers, and `textShare` of the other tokens. If `isRepeated`,
   * pieces of the code come a second time, and count as answers.
   */
  trainingSequence(code, length, { textShare, isRepeated }, draw) {
    const most = this.mostPairs(length, isRepeated);
    const isSparse = draw() < SPARSE_SHARE;
    const count = isSparse ? Math.max(1, Math.round(most ** draw())) : most;
    const isLong = length > MAX_LINES.short;
    const words = isLong ? this.#words : this.#words.slice(0, WORDS.first);
    const pairs = [...this.#pairs(count - 1, words, draw), this.#pair(PASSKEY, draw)].map((pair) => ({
      ...pair,
      questions: isLong && draw() >= ASKED_TWICE ? 1 : 2,
    }));
    const lines = [];
    const nearest = Math.min(NEAREST.most, NEAREST.share * length);
    const asked = pairs.reduce(
      (sum, { assignment, question, questions }) => sum + assignment.length + questions * question.length,
      0,
    );
    const pieces = [];
    let room = length + 1 - asked;
    const mostPieces = isRepeated ? Math.round((2 * REPEATED * length) / (PIECE.least + PIECE.most)) : 0;
    for (let i = 0; i < mostPieces; i++) {
      const size = Math.round(PIECE.least + draw() * (PIECE.most - PIECE.least));
      // The remaining room must hold the longest piece and the distance to its repetition.
      if (room - size < PIECE.most + nearest) break;
      pieces.push(size);
      room -= size;
    }
    const first = draw() < FIRST_SHARE ? pairs[Math.floor(draw() * pairs.length)] : undefined;
    // Tokens of code between places where questions stand together.
    const between = isLong && draw() < TOGETHER.share ? Math.min(1, TOGETHER.most / pairs.length) * room : 0;
    for (const pair of pairs) {
      const at = pair === first ? 0 : draw() * (room - 2 * nearest);
      lines.push({ at, tokens: pair.assignment, pair });
      for (const distance of sample(distances(nearest, room - at, draw), pair.questions, draw)) {
        const asked = at + distance;
        const place = between === 0 ? asked : Math.min(room, Math.ceil(asked / between) * between);
        lines.push({ at: place, tokens: pair.question, pair, answer: pair.answerLength });
      }
    }
    for (const size of pieces) {
      const from = Math.floor(draw() * (room - size - nearest));
      const [, distance] = distances(nearest, room - from - size, draw);
      const tokens = [...code.subarray(from, from + size - 1), ...this.#newline];
      lines.push({ at: from + size + distance, tokens, answer: size - 1 - PIECE.uncounted });
    }
    const { tokens, answers } = this.#write(code, room, lines);
    const targets = Int32Array.from(tokens.subarray(1), (token) => (draw() < textShare ? token : -100));
    for (const { at, length: size } of answers) for (let i = at; i < at + size; i++) targets[i - 1] = tokens[i];
    return { inputs: tokens.subarray(0, length), targets };
  }

  /** `length` tokens of code with one assignment at `depth` (0 to 1), which the last line asks for. */
  passkey(code, length, depth, draw) {
    const pair = this.#pair(PASSKEY, draw);
    return this.#asked(code, length, [{ pair, depth, isAsked: true }], draw);
  }

  /** `length` tokens of code with `count` assignments, evenly spread; `asked` of them, evenly spread too, are asked for at its end. */
  keyValue(code, length, count, asked, draw) {
    const every = count / asked;
    const words = this.#words.slice(0, WORDS.first);
    const places = this.#pairs(count, words, draw).map((pair, i) => ({
      pair,
      depth: (i + draw()) / count,
      isAsked: Math.floor(i / every) !== Math.floor((i - 1) / every),
    }));
    return this.#asked(code, length, places, draw);
  }

  #asked(code, length, places, draw) {
    const asked = places.filter(({ isAsked }) => isAsked);
    const questions = sample(asked, asked.length, draw);
    const size =
      places.reduce((sum, { pair }) => sum + pair.assignment.length, 0) +
      questions.reduce((sum, { pair }) => sum + pair.question.length, 0);
    const room = length - size;
    const lines = places.map(({ pair, depth }) => ({ at: depth * room, tokens: pair.assignment, pair }));
    questions.forEach(({ pair }) => {
      lines.push({ at: Number.POSITIVE_INFINITY, tokens: pair.question, pair, answer: pair.answerLength });
    });
    const { tokens, answers, starts } = this.#write(code, room, lines);
    const cases = answers.map(({ at, length: count, pair }) => {
      const place = places.find((one) => one.pair === pair);
      // The last tokens of an assignment but for the line's end are its value.
      const factAt = starts.get(pair) + pair.assignment.length - 1 - pair.answerLength;
      return { at, length: count, depth: place.depth, factAt };
    });
    return { tokens, cases };
  }

  /** Joins the first `room` tokens of `code` with the lines, each moved to the next end of a line. */
  #write(code, room, lines) {
    const size = room + lines.reduce((sum, { tokens }) => sum + tokens.length, 0);
    const tokens = new Int32Array(size);
    const order = lines.sort((a, b) => a.at - b.at);
    const answers = [];
    const starts = new Map();
    let [end, next] = [0, 0];
    const insert = ({ tokens: line, pair, answer }) => {
      tokens.set(line, end);
      end += line.length;
      if (answer === undefined) starts.set(pair, end - line.length);
      else answers.push({ at: end - 1 - answer, length: answer, pair });
    };
    for (let i = 0; i < room; i++) {
      const isLineStart = i === 0 || this.#endsLine[code[i - 1]] === 1;
      if (isLineStart) while (next < order.length && order[next].at <= i) insert(order[next++]);
      tokens[end++] = code[i];
    }
    // The text after the code begins on a line of its own.
    if (next < order.length && this.#endsLine[code[room - 1]] === 0) tokens[end - 1] = this.#newline[0];
    while (next < order.length) insert(order[next++]);
    return { tokens, answers, starts };
  }

  /** Assignments and questions with names of different words. */
  #pairs(count, words, draw) {
    const drawn = sample(words, WORDS_PER_NAME * count, draw);
    return Array.from({ length: count }, (_, i) => this.#pair(nameOf(drawn.slice(WORDS_PER_NAME * i)), draw));
  }

  #pair(name, draw) {
    const value = this.#values[Math.floor(draw() * this.#values.length)];
    const line = (start) => [...this.#tokenizer.encode(`# ${start} ${name}: ${name}`), ...value, ...this.#newline];
    return { assignment: line('set'), question: line('get'), answerLength: value.length };
  }
}

/** The first words of a list as a name. */
function nameOf(words) {
  return words.slice(0, WORDS_PER_NAME).join(' ');
}

/** Lower-case words that are one token with the space before them; syllables where there are no such words. */
function wordsOf(tokenizer) {
  const words = new Set();
  for (let id = 0; id < tokenizer.vocabSize && words.size < WORDS.all; id++) {
    const [, word] = /^ ([a-z]{4,8})$/.exec(tokenizer.decode([id])) ?? [];
    if (word !== undefined && !PASSKEY.includes(word)) words.add(word);
  }
  const syllables = [...'bdfgklmnprstvz'].flatMap((consonant) => [...'aeiou'].map((vowel) => consonant + vowel));
  for (const first of syllables) for (const second of syllables) if (words.size < WORDS.all) words.add(first + second);
  return [...words];
}

/** Two distances from `nearest` to `farthest` tokens: one anywhere, one of any order of magnitude. */
function distances(nearest, farthest, draw) {
  return [nearest + draw() * (farthest - nearest), nearest * (farthest / nearest) ** draw()];
}

/** `count` different elements of a list, in random order. */
function sample(list, count, draw) {
  const copy = [...list];
  for (let i = 0; i < count; i++) {
    const other = i + Math.floor(draw() * (copy.length - i));
    [copy[i], copy[other]] = [copy[other], copy[i]];
  }
  return copy.slice(0, count);
}
