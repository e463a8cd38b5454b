// Everything `npm test` does: style, types, build, kernels, tests. Words after `npm test --` choose test files, as vitest takes
// them. The last line is always `N passed, N failed`, with the number skipped when there are any.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { delimiter, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

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

const folder = mkdtempSync(join(tmpdir(), 'trefoil-test-'));
const results = join(folder, 'results.json');
const kinds = ['default', 'json', join(root, 'scripts', 'skip-reporter.mjs')];
const reporters = [...kinds.map((kind) => `--reporter=${kind}`), `--outputFile.json=${results}`];
const STEPS = {
  style: [...program('@biomejs/biome', 'bin/biome'), 'check', '.'],
  types: [...program('typescript', 'bin/tsc'), '--noEmit'],
  pages: [...program('typescript', 'bin/tsc'), '--noEmit', '-p', 'src/dashboard/web'],
  build: [process.execPath, 'scripts/build.mjs'],
  kernels: [process.execPath, 'scripts/kernels.mjs'],
  tests: [...program('vitest', 'vitest.mjs'), 'run', ...reporters, ...process.argv.slice(2)],
};

function run([command, ...words]) {
  return spawnSync(command, words, { cwd: root, stdio: 'inherit' }).status === 0;
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

/** Counts from vitest's report. A file that could not even be loaded, and a run that broke off, count as one failure. */
function count(succeeded) {
  if (!existsSync(results)) return { passed: 0, failed: 1, skipped: 0 };
  const files = JSON.parse(readFileSync(results, 'utf8')).testResults;
  const tests = files.flatMap((file) => file.assertionResults);
  const unloaded = files.filter(
    ({ status, assertionResults }) => status === 'failed' && !assertionResults.some(isFailed),
  );
  const failed = tests.filter(isFailed).length + unloaded.length;
  return {
    passed: tests.filter(({ status }) => status === 'passed').length,
    failed: succeeded ? failed : Math.max(1, failed),
    skipped: tests.filter(({ status }) => status !== 'passed' && status !== 'failed').length,
  };
}

function isFailed({ status }) {
  return status === 'failed';
}

TOOLS.forEach(provide);
const broken = Object.entries(STEPS).flatMap(([name, command]) => {
  console.log(`\n== ${name}`);
  return run(command) ? [] : [name];
});
const { passed, failed, skipped } = count(!broken.includes('tests'));
rmSync(folder, { recursive: true, force: true });
for (const step of broken) console.log(`failed: ${step}`);
const failures = failed + broken.filter((step) => step !== 'tests').length;
console.log(`${passed} passed, ${failures} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`);
process.exit(failures > 0 ? 1 : 0);
