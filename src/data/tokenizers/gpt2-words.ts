/**
 * Cuts text into the words of GPT-2's pattern, without a regular expression: that makes an object and a string per word.
 *
 *     's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
 *
 * There \s is the Unicode property White_Space. JavaScript's \s also contains U+FEFF and lacks U+0085.
 */

const LETTER = 1;
const NUMBER = 2;
const SPACE = 3;
const OTHER = 4;

const BLANK = 0x20;
const APOSTROPHE = 0x27;
const FIRST_SURROGATE = 0xd800;
const FIRST_ASTRAL = 0x10000;
/** Letters after the apostrophe in words such as "it's", as UTF-16 units. */
const [D, E, L, M, R, S, T, V] = Array.from('delmrstv', (letter) => letter.charCodeAt(0));

/** Kind of each code point; 0: not looked up yet. */
const kinds = new Uint8Array(0x110000);

function lookUp(point: number): number {
  const text = String.fromCodePoint(point);
  if (/\p{L}/u.test(text)) kinds[point] = LETTER;
  else if (/\p{N}/u.test(text)) kinds[point] = NUMBER;
  else kinds[point] = /\p{White_Space}/u.test(text) ? SPACE : OTHER;
  return kinds[point];
}

function kindOf(point: number): number {
  return kinds[point] || lookUp(point);
}

/** The code point at `index`; a lone surrogate is one of its own. */
function pointAt(units: Uint16Array, length: number, index: number): number {
  const unit = units[index];
  if (unit < FIRST_SURROGATE || unit >= 0xdc00 || index + 1 >= length) return unit;
  const low = units[index + 1];
  return low >= 0xdc00 && low < 0xe000 ? FIRST_ASTRAL + ((unit - FIRST_SURROGATE) << 10) + (low - 0xdc00) : unit;
}

/** Where the word ends that begins at `start` in a text of `length` UTF-16 units. */
export function wordEnd(units: Uint16Array, length: number, start: number): number {
  const first = units[start];
  if (first === APOSTROPHE) {
    const end = suffixEnd(units, length, start);
    if (end > 0) return end;
  }
  let kind = kindOf(pointAt(units, length, start));
  let end = start;
  if (first === BLANK && start + 1 < length) {
    const next = kindOf(pointAt(units, length, start + 1));
    if (next !== SPACE) {
      kind = next;
      end = start + 1;
    }
  }
  while (end < length) {
    const unit = units[end];
    const point = unit < FIRST_SURROGATE ? unit : pointAt(units, length, end);
    if (kindOf(point) !== kind) break;
    end += point < FIRST_ASTRAL ? 1 : 2;
  }
  // The last of several spaces belongs to the word after them, or is a word. All white space is one unit long.
  return kind === SPACE && end < length && end - start > 1 ? end - 1 : end;
}

/** Where 's, 't, 're, 've, 'm, 'll or 'd ends that begins at `start`; 0 if none does. */
function suffixEnd(units: Uint16Array, length: number, start: number): number {
  const second = start + 1 < length ? units[start + 1] : 0;
  if (second === S || second === T || second === M || second === D) return start + 2;
  const third = start + 2 < length ? units[start + 2] : 0;
  const isLong = ((second === R || second === V) && third === E) || (second === L && third === L);
  return isLong ? start + 3 : 0;
}
