// Shared by the programs that generate pages from files in bench/results: numbers, tables, and writing or checking pages.
import { existsSync, readFileSync, writeFileSync } from 'node:fs';

/** A whole number with thousands separators. */
export function count(value) {
  return Math.round(value).toLocaleString('en-US');
}

export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

export function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return (sorted[(sorted.length - 1) >> 1] + sorted[sorted.length >> 1]) / 2;
}

/** Standard deviation of a sample. */
export function deviation(values) {
  const middle = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (values.length - 1));
}

/** A table in Markdown. */
export function table(titles, rows) {
  const line = (row) => `| ${row.join(' | ')} |`.replace(/\| {2}(?=\|)/g, '| ');
  return [line(titles), `|${'---|'.repeat(titles.length)}`, ...rows.map(line)].join('\n');
}

/** Wraps a paragraph at 100 columns; what is between backticks stays on one line. */
export function wrap(text) {
  const lines = [''];
  for (const word of text.match(/(?:`[^`]*`|\S)+/g)) {
    const line = lines.at(-1);
    if (line === '') lines[lines.length - 1] = word;
    else if (line.length + 1 + word.length <= 100) lines[lines.length - 1] = `${line} ${word}`;
    else lines.push(word);
  }
  return lines.join('\n');
}

/** The page at `path` with new text between `<!-- figures: NAME -->` and `<!-- end -->`; `parts` maps names to texts. */
export function withFigures(path, parts) {
  return readFileSync(path, 'utf8').replace(
    /(<!-- figures: (\w+) -->\n)[\s\S]*?(<!-- end -->)/g,
    (_, start, name, end) => {
      if (parts[name] === undefined) throw new Error(`${path}: there are no figures ${name}`);
      return `${start}\n${parts[name]}\n\n${end}`;
    },
  );
}

/** Writes the files whose text is new; with `isCheck` only names them, and the exit code is 1 if there are any. */
export function writeOrCheck(files, isCheck) {
  const stale = [...files].filter(([path, text]) => !existsSync(path) || readFileSync(path, 'utf8') !== text);
  for (const [path, text] of stale) {
    if (!isCheck) writeFileSync(path, text);
    console.log(`${isCheck ? 'not current' : 'wrote'}: ${path}`);
  }
  if (isCheck && stale.length > 0) process.exitCode = 1;
}
