/** The configs and profiles in the installed package. */
import { readdirSync } from 'node:fs';
import { basename, join } from 'node:path';
import { fileURLToPath } from 'node:url';

/** Root of the package: two folders above src/config and dist/config. */
export const packageRoot: string = fileURLToPath(new URL('../../', import.meta.url));

/** `configs` for whole configs, `configs/profiles` for profiles. */
export type Shelf = 'configs' | 'configs/profiles';

/** Names of the shipped configs or profiles, sorted. */
export function shippedConfigs(shelf: Shelf = 'configs', root: string = packageRoot): string[] {
  const files = readdirSync(join(root, shelf)).filter((file) => file.endsWith('.yaml'));
  return files.map((file) => basename(file, '.yaml')).sort();
}
