/** Options of programs are camelCase, config files snake_case. This is the one place that maps between them. */
import { UsageError } from '../errors.js';

/** `val_fraction` → `valFraction` */
export type CamelCase<Name> = Name extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelCase<Tail>>}`
  : Name;

/** The keys of a section of a config, as options of a program. */
export type CamelKeys<Section> = { [Name in keyof Section as CamelCase<Name>]: Section[Name] };

/** Options as keys of a config. Refuses config keys, which would otherwise count as unknown or, worse, be accepted. */
export function snakeKeys(options: Readonly<Record<string, unknown>>): Record<string, unknown> {
  return Object.fromEntries(
    Object.entries(options).map(([name, value]) => {
      if (name.includes('_')) throw new UsageError(`${name}: unknown option; in a program it is ${camelCase(name)}`);
      return [name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`), value];
    }),
  );
}

const camelCase = (name: string) => name.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
