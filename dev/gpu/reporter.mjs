// A reporter for vitest: appends every finished test to the file that TEST_RESULTS names, so that a run that is cut off
// keeps what it has.
import { appendFileSync } from 'node:fs';

export default class Reporter {
  onTestCaseResult(test) {
    const { state } = test.result();
    appendFileSync(process.env.TEST_RESULTS, `${JSON.stringify({ test: test.fullName, state })}\n`);
  }
}
