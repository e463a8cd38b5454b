/** dev/gpu: what waits for a GPU names only commands, flags, files and tests there are, and fits into its time. */
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { root, runNode, trefoil } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

interface Entry {
  readonly id: string;
  readonly feature: string;
  readonly seconds: number;
  readonly needs?: readonly string[];
  readonly commands: readonly (readonly string[])[];
  readonly expected: string;
  readonly passed: string;
  readonly failed: string;
}
type Check = (out: string) => { ok: boolean; measured: object };

const module = (name: string) => import(pathToFileURL(join(root, 'dev/gpu', name)).href);
const { ENTRIES } = (await module('entries.mjs')) as { ENTRIES: readonly Entry[] };
const { findsNeedles, nothingSlower, recipeSpeed, testsPass, usesItsContext } = (await module('checks.mjs')) as {
  findsNeedles: (trained: number) => Check;
  recipeSpeed: (least: number) => Check;
  usesItsContext: Check;
  nothingSlower: (percent: number) => Check;
  testsPass: (atLeast: number) => Check;
};
const program = join(root, 'dev/gpu/pending.mjs');
const vitest = join(createRequire(import.meta.url).resolve('vitest/package.json'), '..', 'vitest.mjs');
const commands = ENTRIES.flatMap(({ id, commands }) => commands.map((words) => ({ id, words })));
const starting = (...programs: string[]) => commands.filter(({ words }) => programs.includes(words[0]));
const isFlag = (word: string) => /^--[a-z]/.test(word);

let folder: { path: string; remove: () => void };
beforeAll(() => {
  folder = temporaryFolder();
});
afterAll(() => folder.remove());

it('has unique ids, known needs, and says what follows', () => {
  expect(new Set(ENTRIES.map(({ id }) => id)).size).toBe(ENTRIES.length);
  for (const { needs = [], ...entry } of ENTRIES) {
    expect(needs.filter((need) => !['corpus', 'before', 'fla'].includes(need))).toEqual([]);
    for (const text of [entry.feature, entry.expected, entry.passed, entry.failed]) expect(text).toMatch(/\w/);
  }
});

it('lists every entry, and takes at most 1,500 seconds and no entry more than 540', async () => {
  const { code, stdout } = await runNode([program, '--list']);
  expect(code).toBe(0);
  for (const { id, feature } of ENTRIES)
    expect(stdout).toMatch(new RegExp(`^${id} \\(.*: ${feature.slice(0, 20)}`, 'm'));
  expect(Number(/^at most (\d+) s:/m.exec(stdout)![1])).toBeLessThanOrEqual(1500);
  for (const { seconds } of ENTRIES) expect(seconds).toBeLessThanOrEqual(540);
});

it.each([
  [['--run', '--list'], 'expected --list or --run'],
  [['--list', '--only', 'nothing'], 'nothing is not an entry: expected one of fused-op'],
  [['--list', '--before', '/nowhere'], 'no dist/cli/main.js in /nowhere'],
])('refuses %j', async (words, message) => {
  const { code, stderr } = await runNode([program, ...words]);
  expect(stderr).toContain(message);
  expect(code).toBe(2);
});

it('names files and folders there are', () => {
  const paths = commands.flatMap(({ words }) =>
    words.filter((word) => /^(?:src|dev|bench|examples|test)\//.test(word)),
  );
  expect(paths.length).toBeGreaterThan(5);
  expect(paths.filter((path) => !existsSync(join(root, path)))).toEqual([]);
});

/** Commands of trefoil, also those of a shell's line. */
const ofTrefoil = [
  ...starting('trefoil'),
  ...starting('sh').flatMap(({ id, words: [, , line] }) =>
    [...line.matchAll(/(?:trefoil|main\.js) ((?:train|eval|bench) [^>&;]*)/g)].map(([, rest]) => ({
      id,
      words: ['trefoil', ...rest.trim().split(/\s+/)],
    })),
  ),
];

it('commands of trefoil have flags there are', async () => {
  expect(ofTrefoil.length).toBeGreaterThan(2);
  for (const { id, words } of ofTrefoil) {
    const [, command, second] = words;
    const { stdout } = await trefoil([command, ...(second.startsWith('-') ? [] : [second]), '--help']);
    const known = new Set(stdout.match(/--[a-z][a-z-]*/g));
    expect(
      words.filter((word) => isFlag(word) && !known.has(word)),
      id,
    ).toEqual([]);
  }
});

it.each(ofTrefoil.filter(({ words }) => words.includes('--set')))('config keys of $id exist', async ({ words }) => {
  const settings = words.filter((word, i) => word === '--set' || words[i - 1] === '--set');
  const { code, stderr } = await trefoil(['train', '--config', 'base', ...settings, '--print-config']);
  expect(stderr).toBe('');
  expect(code).toBe(0);
});

it.each(starting('node'))('programs have the flags of $id', ({ words: [, path, ...words] }) => {
  const text = readFileSync(join(root, path), 'utf8');
  const declared = [...text.matchAll(/^ {4}'?([a-z][a-z-]*)'?: \{ type: '/gm)].map(([, name]) => `--${name}`);
  expect(words.filter((word) => isFlag(word) && !declared.includes(word))).toEqual([]);
});

it('parts of a test file are there, and leave no test out', async () => {
  const files = [
    ...new Set(starting('vitest').flatMap(({ words }) => words.filter((word) => word.endsWith('.test.ts')))),
  ];
  const out = join(folder.path, 'tests.json');
  const { code, stderr } = await runNode([vitest, 'list', `--json=${out}`, ...files]);
  expect(code, stderr).toBe(0);
  const tests = (JSON.parse(readFileSync(out, 'utf8')) as { name: string; file: string }[]).map(({ name, file }) => ({
    name: name.replaceAll(' > ', ' '),
    file: file.slice(root.length),
  }));
  const taken = new Set<object>();
  for (const { words } of starting('vitest')) {
    const at = words.indexOf('--testNamePattern');
    const pattern = new RegExp(at < 0 ? '' : words[at + 1]);
    const mine = tests.filter(({ name, file }) => words.includes(file) && pattern.test(name));
    expect(mine, words.join(' ')).not.toEqual([]);
    for (const test of mine) taken.add(test);
  }
  // Tests that run without a GPU are left out on purpose.
  expect(tests.filter((test) => !taken.has(test) && !/emulated/.test(test.name))).toEqual([]);
});

describe('checks', () => {
  const write = (name: string, text: string) => {
    mkdirSync(join(folder.path, name, '..'), { recursive: true });
    writeFileSync(join(folder.path, name), text);
  };

  it('count tests by name, and want a number of them', () => {
    const line = (test: string, state: string) => `${JSON.stringify({ test, state })}\n`;
    write('tests.jsonl', line('a', 'passed') + line('a', 'skipped') + line('b', 'passed'));
    expect(testsPass(2)(folder.path)).toEqual({ ok: true, measured: { passed: 2, failed: [] } });
    expect(() => testsPass(3)(folder.path)).toThrow('2 tests passed and none failed, but at least 3 should run');
    write('tests.jsonl', line('a', 'passed') + line('b', 'passed') + line('c', 'failed'));
    expect(testsPass(2)(folder.path)).toEqual({ ok: false, measured: { passed: 2, failed: ['c'] } });
  });

  it('want a sparse model that has a lower loss, and gains nine tenths from far context', () => {
    const judged = (loss: number, gain: number) => {
      const row = (variant: string, loss: number, gain: number) => ({ variant, validation: { loss, far: { gain } } });
      write(
        'context.json',
        JSON.stringify({ runs: [row('code-scorer-window', loss, gain), row('code-dense', 2.1, 0.4)] }),
      );
      return usesItsContext(folder.path);
    };
    expect(judged(2, 0.37)).toMatchObject({ ok: true, measured: { sparse: { loss: 2, gain: 0.37 } } });
    for (const bad of [judged(2.15, 0.37), judged(2, 0.35)]) expect(bad.ok).toBe(false);
    write('context.json', JSON.stringify({ runs: [{ variant: 'code-dense', error: 'out of memory' }] }));
    expect(() => usesItsContext(folder.path)).toThrow('out of memory');
  });

  it('compare the recipe with training without it', () => {
    const row = (tokens_per_s: number) => JSON.stringify({ rows: [{ tokens_per_s }] });
    write('recipe.json', row(240_000));
    write('plain.json', row(400_000));
    expect(recipeSpeed(0.6)(folder.path)).toEqual({
      ok: true,
      measured: { recipe: 240_000, plain: 400_000, ratio: 0.6 },
    });
    expect(recipeSpeed(0.61)(folder.path)).toMatchObject({ ok: false });
  });

  it('want nearly all needles, also where the model was not trained', () => {
    const judged = (...rows: readonly [length: number, accuracy: number][]) => {
      write('needle.json', JSON.stringify({ rows: rows.map(([length, accuracy]) => ({ length, accuracy })) }));
      return findsNeedles(1024)(folder.path);
    };
    const good = judged([1024, 1], [1024, 0.98], [4096, 0.97]);
    expect(good).toMatchObject({ ok: true, measured: [{ length: 1024, found: 0.99, worst: 0.98 }, { length: 4096 }] });
    expect(judged([1024, 0.98])).toMatchObject({ ok: false });
    expect(judged([4096, 0.96])).toMatchObject({ ok: false });
    expect(judged([4096, 1], [4096, 1], [4096, 1], [4096, 0.89])).toMatchObject({ ok: false });
  });

  it('compare two builds', () => {
    const row = (ratio: number) => ({ name: 'training, tokens/s', ratio });
    write('compare.json', JSON.stringify({ rows: [row(1.2), row(0.985)] }));
    expect(nothingSlower(2)(folder.path)).toMatchObject({ ok: true });
    expect(nothingSlower(1)(folder.path)).toMatchObject({ ok: false });
  });
});
