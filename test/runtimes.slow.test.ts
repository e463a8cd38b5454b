/** Bun and Deno run the same program as Node, with the same bits. Both are npm packages: `npm install --no-save bun deno`. */
import { spawnSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { delimiter, join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { root, trefoilMain } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

const main = trefoilMain();
let folder: ReturnType<typeof temporaryFolder>;
beforeAll(() => {
  folder = temporaryFolder();
});
afterAll(() => folder.remove());

function find(program: string): string | null {
  const folders = [join(root, 'node_modules', '.bin'), ...(process.env['PATH'] ?? '').split(delimiter)];
  return folders.map((path) => join(path, program)).find((path) => existsSync(path)) ?? null;
}

const TINY = [
  'model.n_layers=1',
  'model.dim=32',
  'model.n_heads=2',
  'model.n_kv_groups=1',
  'model.d_k=16',
  'model.d_v=16',
];

function run(command: string, words: readonly string[]): string {
  const env = { ...process.env, NO_COLOR: '1' };
  const { status, stdout, stderr } = spawnSync(command, words, { encoding: 'utf8', env });
  expect(stderr).not.toMatch(/warning|error/i);
  expect({ status, stderr }).toEqual({ status: 0, stderr: expect.any(String) });
  return stdout;
}

/** Step and loss of every row of a short training, and a few tokens of its model. */
function trained(name: string, command: string, before: readonly string[]): { losses: string[]; text: string } {
  const out = join(folder.path, name);
  const size = TINY.flatMap((pair) => ['--set', pair]);
  const config = ['--config', 'quickstart', '--dataset', 'synthetic', '--device', 'cpu', '--steps', '3', ...size];
  run(command, [...before, main, 'train', ...config, '--set', 'train.log_every=1', '--out-dir', out]);
  const rows = readFileSync(join(out, 'training.csv'), 'utf8').trim().split('\n').slice(1);
  const words = [
    'generate',
    '--model',
    out,
    '--device',
    'cpu',
    '--prompt',
    'a',
    '--max-new-tokens',
    '8',
    '--seed',
    '1',
  ];
  const text = run(command, [...before, main, ...words]);
  return { losses: rows.map((row) => row.split(',').slice(0, 3).join(',')), text };
}

describe.each([
  ['bun', []],
  ['deno', ['run', '--allow-all']],
] as const)('%s', (name, before) => {
  const command = find(name);

  it('trains and generates as Node does, bit for bit', (context) => {
    if (!command) return context.skip(`${name} is not installed (npm install --no-save ${name})`);
    const expected = trained(`node-${name}`, process.execPath, []);
    expect(expected.losses).toHaveLength(3);
    expect(trained(name, command, before)).toEqual(expected);
  });

  it('reports a usage error in one line', (context) => {
    if (!command) return context.skip(`${name} is not installed (npm install --no-save ${name})`);
    const { status, stderr } = spawnSync(command, [...before, main, 'train', '--no-such-flag'], { encoding: 'utf8' });
    expect(status).toBe(2);
    expect(stderr).toMatch(/^trefoil: .*--no-such-flag.*\n$/);
  });
});
