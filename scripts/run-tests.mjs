// Runs the tests, and the files of which some failed once more, alone: a file that then passes was a victim of the load of
// the machine. It is reported by name and does not fail the run; a file that fails twice does.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
const vitest = join(dirname(createRequire(import.meta.url).resolve('vitest/package.json')), 'vitest.mjs');

/** More failed files than this are not a matter of load, and are not repeated. */
const MOST_REPEATED = 8;

/**
 * Runs vitest in `root`; `words` choose the files, as vitest takes them. `passedAlone` names the tests that failed at first
 * and whose file passed when it was repeated.
 */
export function runTests(root, words) {
  const first = vitestRun(root, words);
  const suspects = first.files.filter(({ isPassed }) => !isPassed);
  if (suspects.length === 0 || suspects.length > MOST_REPEATED || !first.isWhole)
    return { ...totals(first), passedAlone: [] };
  const names = suspects.map(({ file }) => relative(root, file));
  console.log(`\n== failed, now run once more, alone: ${names.join(' ')}`);
  const second = vitestRun(root, ['--maxWorkers=1', '--minWorkers=1', ...names]);
  const repeated = (file) => second.files.find((other) => other.file === file);
  const files = first.files.map((result) => (result.isPassed ? result : (repeated(result.file) ?? result)));
  const passedAlone = suspects
    .filter(({ file }) => second.isWhole && repeated(file)?.isPassed)
    .flatMap(({ file, failures }) =>
      (failures.length > 0 ? failures : ['the file']).map((name) => `${relative(root, file)} > ${name}`),
    );
  return { ...totals({ files, isWhole: second.isWhole }), passedAlone };
}

/** One run. `isWhole` is false when it broke off, or when an error cannot be assigned to a file. */
function vitestRun(root, words) {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-test-'));
  const results = join(folder, 'results.json');
  const reporters = ['default', join(here, 'test-reporter.mjs')].map((reporter) => `--reporter=${reporter}`);
  const env = { ...process.env, TEST_RESULTS: results };
  spawnSync(process.execPath, [vitest, 'run', ...reporters, ...words], { cwd: root, env, stdio: 'inherit' });
  const found = existsSync(results) ? JSON.parse(readFileSync(results, 'utf8')) : { files: [], isWhole: false };
  rmSync(folder, { recursive: true, force: true });
  return found;
}

/** A file that failed without a failed test counts as one failure, as does a run that is not whole. */
function totals({ files, isWhole }) {
  const sum = (count) => files.reduce((total, file) => total + count(file), 0);
  return {
    passed: sum(({ passed }) => passed),
    failed: sum(({ isPassed, failures }) => (isPassed ? 0 : Math.max(1, failures.length))) + (isWhole ? 0 : 1),
    skipped: sum(({ skipped }) => skipped),
  };
}
