// Runs the tests, and the files of which some failed once more, alone: a file that then passes was a victim of the load of
// the machine. It is reported by name; a file that fails twice fails the run.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
const vitest = join(dirname(createRequire(import.meta.url).resolve('vitest/package.json')), 'vitest.mjs');

/** More failed files than this are not a matter of load, and are not repeated. */
const MAX_REPEATED = 8;

/** From this number on, tests that passed only when repeated fail a run on a CI machine. */
const CI_RETRY_LIMIT = 3;

/** Words for vitest: the files of the fast lane share their processes, because a process costs more than most of them. */
export const FAST = ['--no-isolate', '--exclude', '**/*.slow.test.ts'];
export const SLOW = ['.slow.test.'];

/**
 * Runs vitest in `root`, once per lane; the words of a lane choose its files, as vitest takes them. `passedAlone` names the
 * tests that failed at first and whose file passed when it was repeated, `skips` has a line per reason.
 */
export function runTests(root, lanes) {
  const runs = lanes.map((words) => vitestRun(root, words));
  const first = { files: runs.flatMap(({ files }) => files), isWhole: runs.every(({ isWhole }) => isWhole) };
  const suspects = first.files.filter(({ isPassed }) => !isPassed);
  if (suspects.length === 0 || suspects.length > MAX_REPEATED || !first.isWhole)
    return { ...totals(root, first), passedAlone: [] };
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
  const result = totals(root, { files, isWhole: second.isWhole });
  const isUnstable = Boolean(process.env.CI) && passedAlone.length >= CI_RETRY_LIMIT;
  return { ...result, failed: result.failed + (isUnstable ? passedAlone.length : 0), passedAlone };
}

/** One run. `isWhole` is false when it broke off, or when an error cannot be assigned to a file. */
function vitestRun(root, words) {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-test-'));
  const results = join(folder, 'results.json');
  const reporters = ['default', join(here, 'test-reporter.mjs')].map((reporter) => `--reporter=${reporter}`);
  const env = { ...process.env, TEST_RESULTS: results };
  const args = ['run', '--passWithNoTests', ...reporters, ...words];
  spawnSync(process.execPath, [vitest, ...args], { cwd: root, env, stdio: 'inherit' });
  const found = existsSync(results) ? JSON.parse(readFileSync(results, 'utf8')) : { files: [], isWhole: false };
  rmSync(folder, { recursive: true, force: true });
  return found;
}

/** A file that failed without a failed test counts as one failure, as does a run that is not whole. */
function totals(root, { files, isWhole }) {
  const sum = (count) => files.reduce((total, file) => total + count(file), 0);
  return {
    passed: sum(({ passed }) => passed),
    failed: sum(({ isPassed, failures }) => (isPassed ? 0 : Math.max(1, failures.length))) + (isWhole ? 0 : 1),
    skipped: sum(({ skips }) => skips.length),
    skips: skipLines(root, files),
  };
}

/** `N in FILES: REASON`, the reason with the most tests first. */
function skipLines(root, files) {
  const reasons = new Map();
  for (const { file, skips } of files)
    for (const { name, reason } of skips) {
      const tests = reasons.get(reason) ?? [];
      reasons.set(reason, [...tests, { name, file: relative(root, file) }]);
    }
  return [...reasons]
    .sort(([, a], [, b]) => b.length - a.length)
    .map(([reason, tests]) => {
      const where = [...new Set(tests.map(({ file }) => file))];
      const place = where.length > 3 ? `${where.length} files` : where.join(', ');
      return `${tests.length} in ${place}: ${reason}`;
    });
}
