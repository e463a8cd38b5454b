// A reporter for vitest: names every test that was skipped, and why. A silent skip looks like a pass.
export default class SkipReporter {
  onTestRunEnd(modules) {
    for (const module of modules)
      for (const test of module.children.allTests('skipped'))
        console.log(`skipped: ${test.fullName}: ${test.result().note ?? 'no reason given'}`);
  }
}
