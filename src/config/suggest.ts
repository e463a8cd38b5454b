/** Suggestions for misspelled names. */

/** Damerau-Levenshtein distance: insertions, deletions, replacements and swaps of neighbours. */
function editDistance(a: string, b: string): number {
  let beforeLast: number[] = [];
  let last = Array.from({ length: b.length + 1 }, (_, column) => column);
  for (let row = 1; row <= a.length; row++) {
    const current = [row];
    for (let column = 1; column <= b.length; column++) {
      const replace = last[column - 1] + (a[row - 1] === b[column - 1] ? 0 : 1);
      let cost = Math.min(replace, last[column] + 1, current[column - 1] + 1);
      if (row > 1 && column > 1 && a[row - 1] === b[column - 2] && a[row - 2] === b[column - 1]) {
        cost = Math.min(cost, beforeLast[column - 2] + 1);
      }
      current.push(cost);
    }
    beforeLast = last;
    last = current;
  }
  return last[b.length];
}

/** Words that people use for a name that is spelled quite differently. */
const SYNONYMS: Readonly<Record<string, string>> = { gpu: 'cuda' };

export function nearest(typed: string, names: Iterable<string>): string | undefined {
  const wanted = typed.toLowerCase();
  const known = [...names];
  const synonym = SYNONYMS[wanted];
  if (synonym !== undefined && known.includes(synonym)) return synonym;
  // At most a third of the letters may differ.
  let best = Math.max(1, Math.floor(wanted.length / 3)) + 1;
  let found: string | undefined;
  for (const name of known) {
    const distance = editDistance(wanted, name.toLowerCase());
    if (distance < best) {
      best = distance;
      found = name;
    }
  }
  return found;
}

/** ` (did you mean x?)`, or an empty string if no name is near. */
export function hint(typed: string, known: Iterable<string>): string {
  const found = nearest(typed, known);
  return found === undefined ? '' : ` (did you mean ${found}?)`;
}
