/** The table of health rules that check, health and watch print. */

import { visible, wrapText } from '../../text.js';
import { explainRows } from '../../watch/explain.js';
import { describeRow, type RuleRow } from '../../watch/row.js';
import type { Io } from './io.js';
import { formatTable, wrapped } from './table.js';

const MARKS = { green: 'ok', yellow: 'WARN', red: 'FAIL' } as const;

/** Prints the table, an explanation of every rule that is not green, and a summary that starts with `result`. */
export function printRows(io: Io, rows: readonly RuleRow[], result: string): void {
  io.out(rowTable(rows, io));
  for (const line of explainRows(rows)) io.out(wrapText(line, io.width - 2).join('\n  '));
  io.out(`${result}: ${rowSummary(rows)}`);
}

function rowTable(rows: readonly RuleRow[], { style, width }: Io): string {
  return formatTable(
    ['', 'rule', wrapped('value'), wrapped('limit')],
    rows.map((row) => {
      const { value, limit } = describeRow(row);
      return [style[row.level](MARKS[row.level]), row.rule, visible(value), visible(limit)]; // the run may be someone else's
    }),
    width,
  ).trimEnd();
}

function rowSummary(rows: readonly RuleRow[]): string {
  const count = (level: RuleRow['level']) => rows.filter((row) => row.level === level).length;
  const warnings = count('yellow');
  return `${count('green')} ok, ${warnings} ${warnings === 1 ? 'warning' : 'warnings'}, ${count('red')} failed`;
}
