/** Tables and wrapped text that fit the width of a terminal. */
import { stripVTControlCharacters } from 'node:util';
import { wrapText } from '../../text.js';

/** Width of output that does not go to a terminal, and of terminals that do not report theirs. */
export const DEFAULT_WIDTH = 80;

export interface Column {
  readonly title: string;
  readonly align?: 'right';
  /** Break cells into several lines when the table is wider than the terminal. Such cells must not contain colour. */
  readonly wrap?: boolean;
}

/** Columns of numbers. */
export function right(...titles: readonly string[]): Column[] {
  return titles.map((title) => ({ title, align: 'right' }));
}

/** A column whose cells may take several lines. */
export function wrapped(title: string): Column {
  return { title, wrap: true };
}

const GAP = 2;
/** A wrapped column does not become narrower than this. */
const NARROWEST = 12;

/** A table whose columns have the width of their longest cell, without spaces at the end of a line. */
export function formatTable(
  titles: readonly (string | Column)[],
  rows: readonly (readonly string[])[],
  width: number = DEFAULT_WIDTH,
): string {
  const columns = titles.map((column) => (typeof column === 'string' ? { title: column } : column) as Column);
  const cells = [columns.map(({ title }) => title), ...rows];
  const widths = fitColumns(
    columns,
    columns.map((_, c) => Math.max(...cells.map((row) => visibleLength(row[c])))),
    width,
  );
  return cells
    .flatMap((row) => {
      const wrapped = row.map((cell, c) => (columns[c].wrap ? wrapText(cell, widths[c]) : [cell]));
      const height = Math.max(...wrapped.map(({ length }) => length));
      return Array.from({ length: height }, (_, line) =>
        wrapped
          .map((lines, c) => pad(lines[line] ?? '', widths[c], columns[c].align))
          .join(' '.repeat(GAP))
          .trimEnd(),
      );
    })
    .map((line) => `${line}\n`)
    .join('');
}

/** Takes what the table is too wide from the widest wrapped columns. */
function fitColumns(columns: readonly Column[], natural: readonly number[], width: number): number[] {
  const widths = [...natural];
  let excess = widths.reduce((sum, size) => sum + size + GAP, -GAP) - width;
  while (excess > 0) {
    const widest = Math.max(...widths.filter((_, c) => columns[c].wrap));
    if (!(widest > NARROWEST)) break;
    widths[widths.findIndex((size, c) => columns[c].wrap && size === widest)] -= 1;
    excess -= 1;
  }
  return widths;
}

function pad(cell: string, width: number, align: Column['align']): string {
  const spaces = ' '.repeat(Math.max(0, width - visibleLength(cell)));
  return align === 'right' ? spaces + cell : cell + spaces;
}

function visibleLength(text: string): number {
  return stripVTControlCharacters(text).length;
}

/** Rows as CSV with a header; null is an empty cell. */
export function formatCsv<Name extends string>(
  columns: readonly Name[],
  rows: readonly Readonly<Record<Name, number | string | null>>[],
): string {
  return [columns.join(','), ...rows.map((row) => columns.map((name) => row[name] ?? '').join(','))].join('\n');
}

/** A line of ` | `-separated fields, without the last fields that do not fit. */
export function fitFields(line: string, width: number): string {
  let fitted = line;
  while (fitted.length > width && fitted.includes(' | ')) fitted = fitted.slice(0, fitted.lastIndexOf(' | '));
  return fitted;
}
