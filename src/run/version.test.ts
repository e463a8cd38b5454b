import { readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { trefoilVersion } from './version.js';

test('the version is that of package.json', () => {
  const { version } = JSON.parse(readFileSync(new URL('../../package.json', import.meta.url), 'utf8')) as {
    version: string;
  };
  expect(trefoilVersion()).toBe(version);
});
