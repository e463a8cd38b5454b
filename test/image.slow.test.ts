/**
 * deploy/Dockerfile without Docker: the steps of both stages in folders. The first compiles all kernels, the second runs
 * without a compiler, as a user who can write neither the program nor the kernels.
 */
import { type SpawnSyncOptions, spawn, spawnSync } from 'node:child_process';
import { chmodSync, chownSync, cpSync, mkdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { ended, root, trefoilMain } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

const lines = readFileSync(join(root, 'deploy', 'Dockerfile'), 'utf8')
  .split('\n')
  .filter((line) => line !== '' && !line.startsWith('#'));
const of = (instruction: string) =>
  lines.filter((line) => line.startsWith(`${instruction} `)).map((line) => line.slice(instruction.length + 1));

let folder: ReturnType<typeof temporaryFolder>;
beforeAll(() => {
  folder = temporaryFolder();
  chmodSync(folder.path, 0o755); // another user runs the second stage
});
afterAll(() => folder.remove());

const TARGET = process.arch === 'arm64' ? 'armv8.2-a' : 'x86-64-v3';
const OTHER_USER = 65534;

async function run(words: readonly string[], options: SpawnSyncOptions & { env: Record<string, string> }) {
  const child = spawn(process.execPath, [...words], { ...options, stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  for (const stream of [child.stdout, child.stderr])
    stream.setEncoding('utf8').on('data', (text: string) => {
      output += text;
    });
  const { code } = await ended(child);
  return { code, output };
}

it('has the steps that this test runs', () => {
  expect(of('FROM')).toEqual(['node:22-bookworm AS build', 'node:22-bookworm-slim']);
  expect(of('RUN')).toEqual([
    'npm ci',
    'npm run build && npm prune --omit=dev',
    'node dist/cli/main.js doctor --compile',
    'mkdir -p /opt/cache/data /runs && chown node:node /opt/cache /opt/cache/data /runs',
  ]);
  expect(of('COPY').filter((words) => words.startsWith('--from='))).toEqual(
    ['package.json', 'node_modules', 'dist', 'configs']
      .map((name) => `--from=build /opt/trefoil/${name} /opt/trefoil/${name}`)
      .concat('--from=build /opt/cache/kernels /opt/cache/kernels'),
  );
  expect(of('ENTRYPOINT')).toEqual(['["node", "/opt/trefoil/dist/cli/main.js"]']);
});

it('trains in the second stage, without a compiler', async (context) => {
  if (process.arch === 'x64' && !/\bavx2\b/.test(readFileSync('/proc/cpuinfo', 'utf8')))
    return context.skip('this processor has no AVX2');
  trefoilMain(); // builds dist/ if it is missing
  const [program, cache, runs] = ['trefoil', 'cache', 'runs'].map((name) => join(folder.path, name));
  mkdirSync(program);
  for (const name of ['package.json', 'dist', 'configs'])
    cpSync(join(root, name), join(program, name), { recursive: true });
  symlinkSync(join(root, 'node_modules'), join(program, 'node_modules'));
  const main = join(program, 'dist', 'cli', 'main.js');
  const variables = { TREFOIL_CACHE: cache, TREFOIL_MARCH: TARGET, HOME: runs };

  // Without optimisation, which takes most of the time and changes nothing of what is shown here.
  const compiler = join(folder.path, 'compiler');
  writeFileSync(compiler, '#!/bin/sh\nexec g++ "$@" -O0\n', { mode: 0o755 });
  const environment = { ...variables, PATH: process.env['PATH'] ?? '', CXX: compiler };
  const built = await run([main, 'doctor', '--compile'], { env: environment });
  expect(built).toMatchObject({ code: 0, output: expect.stringMatching(/^\d\d kernels are compiled in /m) });

  mkdirSync(join(cache, 'data'));
  mkdirSync(runs);
  const isRoot = process.getuid?.() === 0;
  if (isRoot) for (const path of [cache, join(cache, 'data'), runs]) chownSync(path, OTHER_USER, OTHER_USER);
  const user = isRoot ? { uid: OTHER_USER, gid: OTHER_USER } : {};
  const bin = join(folder.path, 'bin'); // an empty PATH: no compiler
  mkdirSync(bin);
  expect(spawnSync('g++', ['--version'], { env: { PATH: bin } }).error).toMatchObject({ code: 'ENOENT' });
  const readable = spawnSync(process.execPath, ['-e', `require(${JSON.stringify(join(root, 'package.json'))})`], user);
  if (readable.status !== 0) return context.skip(`another user cannot read ${dirname(root)}`);
  const size = ['model.n_layers=1', 'model.dim=32', 'model.n_heads=2', 'model.n_kv_groups=1'].flatMap((pair) => [
    ...['--set', pair],
  ]);
  const words = ['--config', 'quickstart', '--dataset', 'synthetic', '--device', 'cpu', '--steps', '2', ...size];
  const trained = await run([main, 'train', ...words, '--out-dir', join(runs, 'first')], {
    env: { ...variables, PATH: bin, NODE_ENV: 'production' },
    cwd: runs,
    ...user,
  });
  expect(trained.output).not.toMatch(/compil/i);
  expect(trained).toMatchObject({ code: 0, output: expect.stringContaining('done: ') });
  const absent = await run([main, 'train', ...words, '--out-dir', join(runs, 'second')], {
    env: { ...variables, TREFOIL_MARCH: '', TREFOIL_KERNELS: 'native', PATH: bin },
    cwd: runs,
    ...user,
  });
  expect(absent).toMatchObject({ code: 2, output: expect.stringContaining('no C++ compiler found') });
});
