// `npm test`: style, types, build, kernels, all tests. `npm run test:fast`: style, types, a quick build and the tests whose
// files are not named *.slow.test.ts; it needs Node and a C++ compiler. Words after `npm test --` choose test files, as vitest takes them.
// The last lines are what was skipped and why, and `N passed, N failed`, with the number skipped when there are any.
import { spawn } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { FAST, runTests, SLOW } from './run-tests.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const { resolve } = createRequire(import.meta.url);
const isFast = process.argv[2] === '--fast';
const words = process.argv.slice(isFast ? 3 : 2);

/** The program of an installed package, run by this Node: no shell, no search in PATH. */
const program = (name, file) => [process.execPath, join(dirname(resolve(`${name}/package.json`)), file)];
const style = [...program('@biomejs/biome', 'bin/biome'), 'check', '.'];
const types = [...program('typescript', 'bin/tsc'), '--noEmit'];
const build = [process.execPath, 'scripts/build.mjs'];

/** Two rows of steps, side by side: most of them use one core. */
const STEPS = isFast
  ? [{ style, build: [...build, '--quick'] }, { types }]
  : [
      { style, types, pages: [...types, '-p', 'src/dashboard/web'] },
      { build, kernels: [process.execPath, 'dist/cli/main.js', 'doctor', '--compile'] },
    ];

/** Runs one step and prints what it said when it has ended; returns whether it succeeded. */
async function runStep(name, [command, ...words]) {
  const child = spawn(command, words, { cwd: root, stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  for (const stream of [child.stdout, child.stderr])
    stream.setEncoding('utf8').on('data', (text) => {
      output += text;
    });
  const code = await new Promise((resolve) => child.once('close', resolve));
  console.log(`\n== ${name}\n${output.trimEnd()}`);
  return code === 0;
}

/** Runs the steps of a row in order; returns the names of those that failed. */
async function runRow(row) {
  const broken = [];
  for (const [name, command] of Object.entries(row)) if (!(await runStep(name, command))) broken.push(name);
  return broken;
}

const broken = (await Promise.all(STEPS.map(runRow))).flat();
console.log('\n== tests');
const lanes = isFast ? [[...FAST, ...words]] : words.length > 0 ? [words] : [FAST, SLOW];
const { passed, failed, skipped, skips, passedAlone } = runTests(root, lanes);
const failures = failed + broken.length;
const report = join(root, '.trefoil', 'test-report.json');
mkdirSync(dirname(report), { recursive: true });
writeFileSync(report, `${JSON.stringify({ passed, failed: failures, skipped, passedAlone, broken }, null, 2)}\n`);
for (const step of broken) console.log(`failed: ${step}`);
if (failed > 0) console.log('failed: tests');
for (const name of passedAlone) console.log(`failed under load, passed alone: ${name}`);
for (const line of skips) console.log(`skipped ${line}`);
console.log(`${passed} passed, ${failures} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`);
process.exit(failures > 0 ? 1 : 0);
