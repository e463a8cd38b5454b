/** JSON of telemetry, where a value that is not finite is news and must not become null. */

const NON_FINITE = new Set(['NaN', 'Infinity', '-Infinity']);

/** JSON text; numbers that JSON lacks are written as the strings "NaN", "Infinity" and "-Infinity". */
export function toJson(value: unknown, indent?: number): string {
  const replace = (_key: string, item: unknown): unknown =>
    typeof item === 'number' && !Number.isFinite(item) ? String(item) : item;
  return JSON.stringify(value, replace, indent);
}

/** A number written by toJson, or undefined when it is something else. */
export function asNumber(value: unknown): number | undefined {
  if (typeof value === 'number') return value;
  return typeof value === 'string' && NON_FINITE.has(value) ? Number(value) : undefined;
}
