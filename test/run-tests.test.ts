/** The test command: files that fail are run once more alone, and only what fails twice fails. */
import { spawn } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { afterAll, expect, it } from 'vitest';
import { root } from '../src/testing/cli.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-run-tests-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

interface Totals {
  readonly passed: number;
  readonly failed: number;
  readonly skipped: number;
  readonly passedAlone: readonly string[];
}

/** The result of `runTests` in a project that consists of these test files. */
async function result(name: string, files: Readonly<Record<string, string>>): Promise<Totals> {
  const project = join(folder, name);
  for (const [file, body] of Object.entries(files)) {
    const path = join(project, file);
    mkdirSync(dirname(path), { recursive: true });
    writeFileSync(
      path,
      `import { existsSync, writeFileSync } from 'node:fs';\nimport { expect, it } from 'vitest';\n${body}`,
    );
  }
  symlinkSync(join(root, 'node_modules'), join(project, 'node_modules'));
  const script = pathToFileURL(join(root, 'scripts', 'run-tests.mjs')).href;
  const program = `import { writeFileSync } from 'node:fs';
    import { runTests } from ${JSON.stringify(script)};
    writeFileSync('totals.json', JSON.stringify(runTests(process.cwd(), [])));`;
  const env = Object.fromEntries(Object.entries(process.env).filter(([key]) => !key.startsWith('VITEST')));
  const child = spawn(process.execPath, ['--input-type=module', '-e', program], { cwd: project, env, stdio: 'pipe' });
  let output = '';
  for (const stream of [child.stdout, child.stderr])
    stream.setEncoding('utf8').on('data', (text: string) => {
      output += text;
    });
  await new Promise((resolve) => child.once('close', resolve));
  const totals = join(project, 'totals.json');
  if (!existsSync(totals)) throw new Error(output);
  return JSON.parse(readFileSync(totals, 'utf8'));
}

/** Does `what` in the first run of the file only. */
const once = (what: string) => `const isFirst = !existsSync(import.meta.filename + '.seen');
  writeFileSync(import.meta.filename + '.seen', ''); if (isFirst) { ${what} }`;
const THROW = "throw new Error('once');";

it('passes what fails once, by name, and fails what fails twice', async () => {
  const totals = await result('mixed', {
    'good.test.ts': "it('passes', () => {}); it.skip('waits', () => {});",
    'bad.test.ts': "it('fails', () => expect(1).toBe(2)); it('passes', () => {});",
    'once.test.ts': `it('fails once', () => { ${once(THROW)} }); it('passes', () => {});`,
    'load.test.ts': `${once(THROW)}; it('passes', () => {});`,
    'reject.test.ts': `it('passes', async () => {
      ${once('Promise.reject(new Error("once"));')}
      await new Promise((resolve) => setTimeout(resolve, 100));
    });`,
  });
  const { passedAlone, ...counts } = totals;
  expect(counts).toEqual({ passed: 6, failed: 1, skipped: 1 });
  expect([...passedAlone].sort()).toEqual([
    'load.test.ts > the file',
    'once.test.ts > fails once',
    'reject.test.ts > the file',
  ]);
});

it('repeats nothing when many files fail', async () => {
  const bad = Array.from({ length: 9 }, (_, i) => [`${i}.test.ts`, `it('fails once', () => { ${once(THROW)} });`]);
  expect(await result('many', Object.fromEntries(bad))).toMatchObject({ passed: 0, failed: 9, passedAlone: [] });
});

it('fails when vitest itself breaks off', async () => {
  const totals = await result('killed', { 'a.test.ts': "it('dies', () => process.kill(process.pid, 'SIGKILL'));" });
  expect(totals).toMatchObject({ failed: 1, passedAlone: [] });
});
