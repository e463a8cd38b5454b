/** A temporary folder of files for one test file. */

import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterAll } from 'vitest';

export interface TestFolder {
  readonly root: string;
  path(...parts: string[]): string;
  write(name: string, content: string | Uint8Array): string;
  /** A new empty folder inside. */
  fresh(): string;
}

export function testFolder(): TestFolder {
  const root = mkdtempSync(join(tmpdir(), 'trefoil-data-'));
  afterAll(() => rmSync(root, { recursive: true, force: true }));
  return {
    root,
    path: (...parts) => join(root, ...parts),
    write(name, content) {
      const path = join(root, name);
      mkdirSync(dirname(path), { recursive: true });
      writeFileSync(path, content);
      return path;
    },
    fresh: () => mkdtempSync(join(root, 'fresh-')),
  };
}

export async function collect<Value>(values: AsyncIterable<Value>): Promise<Value[]> {
  const list: Value[] = [];
  for await (const value of values) list.push(value);
  return list;
}
