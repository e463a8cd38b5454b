/** Rows of health rules for a person. */
import type { Row } from '../../watch/row.js';
import { formatTable } from './table.js';

const MARKS = { green: 'ok', yellow: 'WARN', red: 'FAIL' } as const;

export function rowTable(rows: readonly Row[]): string {
  return formatTable(
    [{ title: '' }, { title: 'rule' }, { title: 'value' }, { title: 'limit' }],
    rows.map(({ rule, level, value, limit }) => [MARKS[level], rule, cell(value), cell(limit)]),
  ).trimEnd();
}

/** The last line: how many, and how bad. */
export function rowSummary(rows: readonly Row[]): string {
  const count = (level: Row['level']) => rows.filter((row) => row.level === level).length;
  return `${count('green')} ok, ${count('yellow')} warnings, ${count('red')} failed`;
}

function cell(value: Row['value']): string {
  return value === null ? '-' : String(value);
}
