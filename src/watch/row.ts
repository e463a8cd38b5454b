/** The result of a health rule, as check, health and watch print it. */
import { METRIC_ENTRIES } from '../run/metrics.js';

export type Level = 'green' | 'yellow' | 'red';

export interface RuleRow {
  readonly rule: string;
  readonly level: Level;
  readonly value: number | string | null;
  readonly limit: number | string | null;
}

export interface Verdict {
  /** No row is red. */
  readonly ok: boolean;
  readonly rows: readonly RuleRow[];
}

export function verdict(rows: readonly RuleRow[]): Verdict {
  const plain = rows.map(({ rule, level, value, limit }) => ({ rule, level, value, limit }));
  return { ok: plain.every(({ level }) => level !== 'red'), rows: plain };
}

/** Unit of a rule's number, and on which side of the limit it must be. */
const MEASURES: Readonly<Record<string, { readonly unit?: string; readonly bound?: string }>> = {
  heartbeat: { unit: 's', bound: 'at most' },
  fetch: { unit: 's', bound: 'at most' },
  fetch_stall: { unit: 'times the usual' },
  flatline: { unit: 'tok/s' },
  throughput: { unit: 'tok/s', bound: 'at least' },
  baseline_toks_per_s: { unit: 'tok/s', bound: 'at least' },
  baseline_loss: { bound: 'at most' },
  baseline_memory: { unit: 'MiB', bound: 'at most' },
  memory: { unit: 'MiB' },
  gate_entropy: { unit: 'nats', bound: 'at least' },
  gate_collapse: { unit: 'of the gates', bound: 'at most' },
  grad_spike: { unit: 'times the median' },
  steps: { bound: 'at least' },
  loss_finite: { unit: 'not finite', bound: 'at most' },
  csv: { unit: 'damaged rows' },
  selection: { unit: 'blocks' },
  ...Object.fromEntries(
    METRIC_ENTRIES.flatMap(([, { limit, unit }]) => (limit ? [[limit.rule, { unit, bound: 'below' }]] : [])),
  ),
};

/** Value and limit of a row as people read them: with unit and direction. Rules of a rank end in ` rankN`. */
export function describeRow({ rule, value, limit }: RuleRow): { readonly value: string; readonly limit: string } {
  const { unit, bound } = MEASURES[rule.replace(/ rank\d+$/, '')] ?? {};
  const show = (given: RuleRow['value']): string => {
    if (given === null) return '-';
    if (typeof given === 'string') return given;
    return [Number.isInteger(given) ? given : Number(given.toPrecision(4)), unit]
      .filter((part) => part !== undefined)
      .join(' ');
  };
  const isBounded = typeof limit === 'number' && bound !== undefined;
  return { value: show(value), limit: isBounded ? `${bound} ${show(limit)}` : show(limit) };
}

/** How rules whose value is a number are said; others have their words as the value. */
const SENTENCES: Readonly<Record<string, string>> = {
  heartbeat: 'no step has ended for VALUE; LIMIT is allowed',
  loss: 'VALUE',
  halt: 'a file .HALT asks the run to stop: VALUE',
  anomaly: 'a file .anomaly_type says VALUE',
  files: 'VALUE',
  process: 'the run VALUE',
  data: 'the run trains on VALUE',
  out_of_memory: 'VALUE',
  section: 'VALUE; LIMIT is allowed',
  ranks: 'the ranks are apart: VALUE',
  gate_entropy: 'the gates have an entropy of VALUE; LIMIT',
  gate_collapse: 'VALUE have collapsed onto one branch; LIMIT is allowed',
  gate_max: 'the largest gate is VALUE on average; LIMIT is allowed',
  grad_zero: 'the gradient norm is VALUE',
  grad_spike: 'the gradient norm reached VALUE; LIMIT is allowed',
  fetch: 'a step waits VALUE for its data; LIMIT is allowed',
  fetch_stall: 'a step waits VALUE for its data; LIMIT is allowed',
  fetch_p95: 'one fetch in twenty takes VALUE or more; LIMIT is allowed',
  flatline: 'steps process VALUE',
  loss_flatline: 'the loss stays at VALUE; LIMIT',
  loss_trend: 'the loss VALUE',
  throughput: 'the throughput is VALUE; LIMIT is expected',
  spikes: 'steps with an unusual loss or gradient: VALUE; LIMIT is allowed',
  fallbacks: 'counters of fallbacks and failures grew: VALUE',
  memory: 'the reserved memory has grown to VALUE; LIMIT is expected',
};

/** A row that is not green, as a sentence without its full stop. */
export function rowInWords(row: RuleRow): string {
  const [rule, rank] = row.rule.split(/ (?=rank\d+$)/);
  const { value, limit } = describeRow(row);
  const words = (SENTENCES[rule] ?? `${rule} is VALUE; LIMIT is allowed`)
    .replace('VALUE', () => value)
    .replace('LIMIT', () => limit);
  return rank === undefined ? `${rule}: ${words}` : `${rule}: ${words} (${rank})`;
}

export function green(rule: string, value: RuleRow['value'], limit: RuleRow['limit']): RuleRow {
  return { rule, level: 'green', value, limit };
}

const MAX_VALUE = 1000;

/** A row of `level` if `isBad`, else green. */
export function judge(
  rule: string,
  isBad: boolean,
  level: 'yellow' | 'red',
  value: RuleRow['value'],
  limit: RuleRow['limit'],
): RuleRow {
  // Values may be texts from files of the run.
  const shown = typeof value === 'string' && value.length > MAX_VALUE ? `${value.slice(0, MAX_VALUE)}…` : value;
  return { rule, level: isBad ? level : 'green', value: shown, limit };
}
