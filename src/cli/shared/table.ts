/** Tables for people. */

export interface Column {
  readonly title: string;
  readonly align?: 'left' | 'right';
}

/** Columns padded to their widest cell; no spaces at the end of a line. */
export function formatTable(columns: readonly Column[], rows: readonly (readonly string[])[]): string {
  const lines = [columns.map(({ title }) => title), ...rows];
  const widths = columns.map((_, c) => Math.max(...lines.map((line) => line[c].length)));
  return lines
    .map((line) =>
      line
        .map((cell, c) => (columns[c].align === 'right' ? cell.padStart(widths[c]) : cell.padEnd(widths[c])))
        .join('  ')
        .trimEnd(),
    )
    .map((line) => `${line}\n`)
    .join('');
}
