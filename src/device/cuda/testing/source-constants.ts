/** Numbers that CUDA sources define, for tests that compare those of TypeScript with them. */
import { readFileSync } from 'node:fs';

/** The values of `#define NAME 1` and `constexpr int NAME = 1` in a source, by name. Throws if one is not there as a number. */
export function sourceConstants<Name extends string>(
  source: URL,
  names: readonly Name[],
): Readonly<Record<Name, number>> {
  const text = readFileSync(source, 'utf8');
  const values = names.map((name) => {
    const value = new RegExp(`^(?:#define ${name}|constexpr int ${name} =) (\\d+)(?=[;\\s])`, 'm').exec(text)?.[1];
    if (value === undefined) throw new Error(`${source.pathname} does not define ${name} as a number`);
    return [name, Number(value)] as const;
  });
  return Object.fromEntries(values) as Record<Name, number>;
}
