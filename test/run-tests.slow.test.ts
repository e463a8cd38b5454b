/** The test command: files that fail are run once more alone, what fails twice fails, and skips are reported by reason. */
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
  readonly skips: readonly string[];
  readonly passedAlone: readonly string[];
}

/** The result of `runTests` in a project that consists of these test files. */
async function result(name: string, files: Readonly<Record<string, string>>, ci = ''): Promise<Totals> {
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
    import { FAST, runTests, SLOW } from ${JSON.stringify(script)};
    writeFileSync('totals.json', JSON.stringify(runTests(process.cwd(), [FAST, SLOW])));`;
  const inherited = Object.entries(process.env).filter(([key]) => !key.startsWith('VITEST'));
  const env = { ...Object.fromEntries(inherited), CI: ci };
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
    'good.slow.test.ts': `it('passes', () => {});
      it('waits', ({ skip }) => skip('no moon')); it('too', ({ skip }) => skip('no moon')); it.skip('three', () => {});`,
    'bad.test.ts': "it('fails', () => expect(1).toBe(2)); it('passes', () => {});",
    'once.test.ts': `it('fails once', () => { ${once(THROW)} }); it('passes', () => {});`,
    'load.test.ts': `${once(THROW)}; it('passes', () => {});`,
    'reject.test.ts': `it('passes', async () => {
      ${once('Promise.reject(new Error("once"));')}
      await new Promise((resolve) => setTimeout(resolve, 100));
    });`,
  });
  const { passedAlone, ...counts } = totals;
  const skips = ['2 in good.slow.test.ts: no moon', '1 in good.slow.test.ts: no reason given'];
  expect(counts).toEqual({ passed: 6, failed: 1, skipped: 3, skips });
  expect([...passedAlone].sort()).toEqual([
    'load.test.ts > the file',
    'once.test.ts > fails once',
    'reject.test.ts > the file',
  ]);
});

it.each([
  [2, 0],
  [3, 3],
])('%i tests that pass only when repeated are %i failures on a CI machine', async (count, failed) => {
  const files = Array.from({ length: count }, (_, i) => [
    `${i}.test.ts`,
    `it('fails once', () => { ${once(THROW)} });`,
  ]);
  const totals = await result(`ci-${count}`, Object.fromEntries(files), 'true');
  expect(totals).toMatchObject({ passed: count, failed });
  expect(totals.passedAlone).toHaveLength(count);
});

it('repeats nothing when many files fail', async () => {
  const bad = Array.from({ length: 9 }, (_, i) => [`${i}.test.ts`, `it('fails once', () => { ${once(THROW)} });`]);
  expect(await result('many', Object.fromEntries(bad))).toMatchObject({ passed: 0, failed: 9, passedAlone: [] });
});

it('fails when vitest itself breaks off', async () => {
  const totals = await result('killed', { 'a.test.ts': "it('dies', () => process.kill(process.pid, 'SIGKILL'));" });
  expect(totals).toMatchObject({ failed: 1, passedAlone: [] });
});
