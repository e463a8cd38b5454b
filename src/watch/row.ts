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
