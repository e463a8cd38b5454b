// Text for measurements: the lines of this repository in random order, with some words changed, so that the number of distinct
// words grows with the text as in a real corpus. The same for everybody, and lines have no white space at their ends.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const CHANGED = 0.03;
const root = fileURLToPath(new URL('..', import.meta.url));

function linesOfTree() {
  const lines = [];
  for (const name of ['docs', 'src', 'test'])
    for (const entry of readdirSync(join(root, name), { recursive: true, withFileTypes: true }))
      if (entry.isFile() && /\.(md|ts|tsx|cpp|cu)$/.test(entry.name))
        for (const line of readFileSync(join(entry.parentPath, entry.name), 'utf8').split('\n'))
          if (line.trim() !== '') lines.push(line.trim());
  return lines;
}

/** Linear congruences: Math.random has no seed. */
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Texts of about `bytes` bytes each, `count` of them. */
export function* texts(bytes, count) {
  const random = randomNumbers(11);
  const lines = linesOfTree();
  const changed = (word) =>
    word +
    Math.floor(random() ** 4 * 1e7)
      .toString(26)
      .replace(/\d/g, (digit) => 'qrstuvwxyz'[Number(digit)]);
  for (let text = 0; text < count; text++) {
    const parts = [];
    for (let size = 0; size < bytes; ) {
      const line = lines[Math.floor(random() * lines.length)];
      const words = line.split(' ').map((word) => (random() > CHANGED ? word : changed(word)));
      parts.push(words.join(' '));
      size += Buffer.byteLength(parts.at(-1)) + 1;
    }
    yield `${parts.join('\n')}\n`;
  }
}
