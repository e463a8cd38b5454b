import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { parseDocument } from 'yaml';
import { packageRoot } from './shipped.js';
import { yamlRefusal } from './yaml-shape.js';

const SIZE = 2 ** 16;
const strange: Readonly<Record<string, string>> = {
  lists: '['.repeat(SIZE),
  objects: '{a: '.repeat(SIZE / 4),
  'quoted texts in lists': '["a\n b",'.repeat(SIZE / 9),
  'lists on one line': `${'- '.repeat(SIZE / 4)}"a\n b"`,
  keys: '? '.repeat(SIZE / 2),
  'keys of keys': `${'? : '.repeat(200)}a`,
  indentation: `a:\n${' '.repeat(401)}b: 1`,
  'empty items': `[${','.repeat(SIZE)}]`,
  'empty items between texts': `[${'"a",,'.repeat(SIZE / 5)}]`,
};

describe('YAML that the parser would not survive is refused', () => {
  it.each(Object.keys(strange))('%s', (name) => {
    expect(yamlRefusal(strange[name].slice(0, SIZE))).toMatch(/^is nested too deeply$|^has too many empty items$/);
  });
});

it.each(['', 'a: [1, [2, {b: c}]]', 'a: ",,"\nb: - -', '- - - a', `a: |\n${'  x,,\n'.repeat(90)}`])(
  '%j is parsed',
  (text) => {
    expect(yamlRefusal(text)).toBeNull();
  },
);

it('the configs of the package are parsed', () => {
  const folder = join(packageRoot, 'configs');
  const files = readdirSync(folder).filter((name) => name.endsWith('.yaml'));
  expect(files.length).toBeGreaterThan(3);
  for (const name of files) expect(yamlRefusal(readFileSync(join(folder, name), 'utf8')), name).toBeNull();
});

it('what is not refused takes little time, however wrong it is', () => {
  const texts = ['- "'.repeat(SIZE / 3), 'a: '.repeat(SIZE / 3), `${','.repeat(90)}\n${'% '.repeat(SIZE / 2)}`];
  const { user, system } = process.cpuUsage();
  for (const text of texts) {
    expect(yamlRefusal(text)).toBeNull();
    parseDocument(text, { logLevel: 'error', uniqueKeys: false, prettyErrors: false });
  }
  const used = process.cpuUsage();
  expect(used.user - user + used.system - system).toBeLessThan(5e6);
});
