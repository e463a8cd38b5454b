/** The result of a health rule, as check, health and watch print it. */

export type Level = 'green' | 'yellow' | 'red';

export interface Row {
  readonly rule: string;
  readonly level: Level;
  readonly value: number | string | null;
  readonly limit: number | string | null;
}

export interface Verdict {
  /** No row is red. */
  readonly ok: boolean;
  readonly rows: readonly Row[];
}

export function verdict(rows: readonly Row[]): Verdict {
  const plain = rows.map(({ rule, level, value, limit }) => ({ rule, level, value, limit }));
  return { ok: plain.every(({ level }) => level !== 'red'), rows: plain };
}

/** What a number of a rule is measured in, and on which side of the limit it must be. */
const MEASURES: Readonly<Record<string, { readonly unit?: string; readonly bound?: string }>> = {
  heartbeat: { unit: 's', bound: 'at most' },
  fetch: { unit: 's', bound: 'at most' },
  fetch_p95: { unit: 'ms', bound: 'below' },
  fetch_stall: { unit: 'times the usual' },
  flatline: { unit: 'tok/s' },
  throughput: { unit: 'tok/s', bound: 'at least' },
  baseline_toks_per_s: { unit: 'tok/s', bound: 'at least' },
  baseline_loss: { bound: 'at most' },
  baseline_memory: { unit: 'MiB', bound: 'at most' },
  memory: { unit: 'MiB' },
  gate_entropy: { unit: 'nats', bound: 'at least' },
  gate_collapse: { unit: 'of the gates', bound: 'at most' },
  gate_max: { bound: 'below' },
  grad_spike: { unit: 'times the median' },
  steps: { bound: 'at least' },
  loss_finite: { unit: 'not finite', bound: 'at most' },
  csv: { unit: 'damaged rows' },
  selection: { unit: 'blocks' },
};

/** Value and limit of a row as people read them: with unit and direction. Rules of a rank end in ` rankN`. */
export function describeRow({ rule, value, limit }: Row): { readonly value: string; readonly limit: string } {
  const { unit, bound } = MEASURES[rule.replace(/ rank\d+$/, '')] ?? {};
  const show = (given: Row['value']): string => {
    if (given === null) return '-';
    if (typeof given === 'string') return given;
    return [Number.isInteger(given) ? given : Number(given.toPrecision(4)), unit]
      .filter((part) => part !== undefined)
      .join(' ');
  };
  const isBounded = typeof limit === 'number' && bound !== undefined;
  return { value: show(value), limit: isBounded ? `${bound} ${show(limit)}` : show(limit) };
}

export function green(rule: string, value: Row['value'], limit: Row['limit']): Row {
  return { rule, level: 'green', value, limit };
}

/** A row of `level` if `isBad`, else green. */
export function judge(
  rule: string,
  isBad: boolean,
  level: 'yellow' | 'red',
  value: Row['value'],
  limit: Row['limit'],
): Row {
  return { rule, level: isBad ? level : 'green', value, limit };
}
