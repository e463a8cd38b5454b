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

/** The object in a line or file of a run; undefined if it is not one: after a crash of the machine, garbage is expected. */
export function parseObject(text: string): Record<string, unknown> | undefined {
  try {
    const parsed: unknown = JSON.parse(text);
    return isPlainObject(parsed) ? parsed : undefined;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    return undefined;
  }
}

export function isPlainObject(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}
