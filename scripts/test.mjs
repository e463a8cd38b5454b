// Everything `npm test` does: style, types, build, kernels, tests. Words after `npm test --` choose test files, as vitest takes
// them. The last line is always `N passed, N failed`, with the number skipped when there are any.
import { spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { delimiter, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { runTests } from './run-tests.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const { resolve } = createRequire(import.meta.url);

/** What the tests need beyond npm: the names any of which will do, and the Debian package that has one. */
const TOOLS = [
  { names: process.env.CXX ? [process.env.CXX] : ['g++', 'clang++', 'c++'], debian: ['g++'] },
  { names: ['mpirun'], debian: ['openmpi-bin', 'libopenmpi3'] },
  { names: ['chromium', 'chromium-browser', 'google-chrome'], debian: ['chromium'] },
];

/** The program of an installed package, run by this Node: no shell, no search in PATH. */
const program = (name, file) => [process.execPath, join(dirname(resolve(`${name}/package.json`)), file)];

/** Two rows of steps, side by side: most of them use one core. */
const STEPS = [
  {
    style: [...program('@biomejs/biome', 'bin/biome'), 'check', '.'],
    types: [...program('typescript', 'bin/tsc'), '--noEmit'],
    pages: [...program('typescript', 'bin/tsc'), '--noEmit', '-p', 'src/dashboard/web'],
  },
  { build: [process.execPath, 'scripts/build.mjs'], kernels: [process.execPath, 'scripts/kernels.mjs'] },
];

function run([command, ...words]) {
  return spawnSync(command, words, { cwd: root, stdio: 'inherit' }).status === 0;
}

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

function isThere(name) {
  const folders = name.includes('/') ? [''] : (process.env.PATH ?? '').split(delimiter);
  return folders.some((path) => existsSync(join(path, name)));
}

/** Installs a missing tool where that is allowed (root on Debian), else says what is missing; the tests then tell more. */
function provide({ names, debian }) {
  if (names.some(isThere)) return;
  const canInstall = process.getuid?.() === 0 && existsSync('/etc/debian_version');
  if (canInstall) console.log(`installing ${debian.join(' ')}, which the tests need`);
  const installed =
    canInstall && run(['apt-get', 'update', '-qq']) && run(['apt-get', 'install', '-y', '-qq', ...debian]);
  if (!installed) console.error(`missing: ${names.join(' or ')} (Debian: apt-get install ${debian.join(' ')})`);
}

TOOLS.forEach(provide);
const broken = (await Promise.all(STEPS.map(runRow))).flat();
console.log('\n== tests');
const { passed, failed, skipped, passedAlone } = runTests(root, process.argv.slice(2));
const failures = failed + broken.length;
const report = join(root, '.trefoil', 'test-report.json');
mkdirSync(dirname(report), { recursive: true });
writeFileSync(report, `${JSON.stringify({ passed, failed: failures, skipped, passedAlone, broken }, null, 2)}\n`);
for (const step of broken) console.log(`failed: ${step}`);
if (failed > 0) console.log('failed: tests');
for (const name of passedAlone) console.log(`failed under load, passed alone: ${name}`);
console.log(`${passed} passed, ${failures} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`);
process.exit(failures > 0 ? 1 : 0);
