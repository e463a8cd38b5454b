// A reporter for vitest. Writes the result of every test file to the file that the variable TEST_RESULTS names, for
// run-tests.mjs: also which tests were skipped, and why, because a silent skip looks like a pass.
import { writeFileSync } from 'node:fs';

export default class TestReporter {
  onTestRunEnd(modules, errors) {
    // An error outside of every test, such as an unhandled rejection, fails the file that was running, if vitest knows it.
    const broken = new Set(errors.map((error) => error.VITEST_TEST_PATH));
    const files = modules.map((module) => ({
      file: module.moduleId,
      passed: [...module.children.allTests('passed')].length,
      skips: [...module.children.allTests('skipped')].map((test) => ({
        name: test.fullName,
        reason: test.result().note ?? 'no reason given',
      })),
      failures: [...module.children.allTests('failed')].map((test) => test.fullName),
      // A file that could not be loaded, or whose worker died, has no failed test.
      isPassed: ['passed', 'skipped'].includes(module.state()) && !broken.has(module.moduleId),
    }));
    const isWhole = [...broken].every((path) => files.some(({ file }) => file === path));
    writeFileSync(process.env.TEST_RESULTS, JSON.stringify({ files, isWhole }));
  }
}
