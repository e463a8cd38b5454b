/** The build of `npm start`: JavaScript without type declarations, and the same modules as a complete build. */
import { cpSync, existsSync, mkdtempSync, readdirSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { root, runNode, trefoilMain } from '../src/testing/cli.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-quick-build-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const scripts = (dist: string) =>
  readdirSync(dist, { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith('.js'))
    .sort();

it('writes every module of the complete build, and the program runs', async () => {
  for (const name of ['src', 'scripts', 'configs', 'examples', 'package.json', 'tsconfig.json', 'tsconfig.build.json'])
    cpSync(join(root, name), join(folder, name), { recursive: true });
  symlinkSync(join(root, 'node_modules'), join(folder, 'node_modules'));
  const built = await runNode([join(folder, 'scripts', 'build.mjs'), '--quiet', '--quick'], { cwd: folder });
  expect(built).toEqual({ code: 0, stdout: '', stderr: '' });
  const dist = join(folder, 'dist');
  expect(scripts(dist)).toEqual(scripts(dirname(dirname(trefoilMain()))));
  expect(existsSync(join(dist, 'index.d.ts'))).toBe(false);
  const { code, stdout } = await runNode([join(dist, 'cli', 'main.js'), 'configs']);
  expect([code, stdout]).toEqual([0, expect.stringContaining('quickstart')]);
});
