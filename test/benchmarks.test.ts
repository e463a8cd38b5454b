/** docs/benchmarks.md and the README's figures against bench/results; the map of bench/ against the folder. */
import { cpSync, existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { runNode } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

const root = join(import.meta.dirname, '..');
const text = (name: string) => readFileSync(join(root, name), 'utf8');

describe('docs/benchmarks.md', () => {
  it('is current, and so is the table of the README', async () => {
    const { code, stdout, stderr } = await runNode([join(root, 'bench', 'page.mjs'), '--check']);
    expect(code, stdout + stderr).toBe(0);
  });

  it('is not current when a result is another', async () => {
    const folder = temporaryFolder();
    try {
      const inside = (name: string) => join(folder.path, name);
      for (const name of ['bench/results', 'bench/page.mjs', 'bench/markdown.mjs', 'docs/benchmarks.md', 'README.md']) {
        mkdirSync(dirname(inside(name)), { recursive: true });
        cpSync(join(root, name), inside(name), { recursive: true });
      }
      const check = () => runNode([inside('bench/page.mjs'), '--check']);
      expect((await check()).code).toBe(0);
      const results = inside('bench/results/training-h200.json');
      const tokens = /"tokens_per_s": (\d+)/;
      writeFileSync(results, readFileSync(results, 'utf8').replace(tokens, '"tokens_per_s": 1$1'));
      const { code, stdout } = await check();
      expect(code).toBe(1);
      expect(stdout).toContain(inside('docs/benchmarks.md'));
      expect(stdout).toContain(inside('README.md'));
    } finally {
      folder.remove();
    }
  });

  it('has at most 1,400 words', () => {
    expect(text('docs/benchmarks.md').trim().split(/\s+/).length).toBeLessThanOrEqual(1400);
  });
});

it('programs of bench/ and dev/ load only modules there are', () => {
  const programs = ['bench', 'dev'].flatMap((folder) =>
    readdirSync(join(root, folder), { recursive: true, encoding: 'utf8' })
      .filter((name) => name.endsWith('.mjs'))
      .map((name) => join(folder, name)),
  );
  const loads = /(?:dist\/|load\('|join\(dist, ')([\w/-]+)\.js'/g; // compiled: dist/x.js is src/x.ts
  const modules = programs.flatMap((name) => [...text(name).matchAll(loads)].map(([, module]) => `${name}: ${module}`));
  expect(modules.length).toBeGreaterThan(20);
  expect(modules.filter((line) => !existsSync(join(root, 'src', `${line.split(': ')[1]}.ts`)))).toEqual([]);
});

describe('bench/README.md', () => {
  const page = text('bench/README.md');

  it('lists every program', () => {
    const programs = readdirSync(join(root, 'bench'), { recursive: true, encoding: 'utf8' }).filter(
      (name) => name.endsWith('.mjs') && !name.endsWith('jax_gpt.mjs'), // which compare.mjs starts
    );
    expect(programs.filter((name) => !page.includes(`\`${name}\``))).toEqual([]);
  });

  it('names the reader of every results file', () => {
    const patterns = [...page.matchAll(/`([\w-]+\*?)`/g)].map(([, name]) => name);
    const isNamed = (file: string) =>
      patterns.some((name) => (name.endsWith('*') ? file.startsWith(name.slice(0, -1)) : file.startsWith(`${name}.`)));
    expect(readdirSync(join(root, 'bench', 'results')).filter((file) => !isNamed(file))).toEqual([]);
  });
});
