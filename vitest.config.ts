import { tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { defineConfig } from 'vitest/config';
import { BaseSequencer, type TestSpecification } from 'vitest/node';

/** Files that take longer than 20 s, the longest first. Begun last, one of them would leave the other cores idle. */
const LONGEST = [
  'test/guides.test.ts',
  'test/package.test.ts',
  'test/ranks.test.ts',
  'src/ops/attention/decode/step/step.test.ts',
  'test/chaos.test.ts',
  'test/contract.test.ts',
  'src/dashboard/browser.test.ts',
  'src/infer/engine/engine.test.ts',
  'src/train/ranks-faults.test.ts',
  'src/ops/attention/fused/emulated.test.ts',
  'test/operations.test.ts',
  'test/readme.test.ts',
  'test/cuda-sources.test.ts',
  'src/infer/emulated-step.test.ts',
  'test/ranks-hosts.test.ts',
  'test/crash.test.ts',
  'src/train/train.test.ts',
  'test/code-model.test.ts',
  'src/device/cpu/compile.test.ts',
  'test/image.test.ts',
  'test/train-cli.test.ts',
  'src/data/pipeline/memory.test.ts',
  'test/terminal.test.ts',
  'test/commands.test.ts',
  'src/ops/linear/fp8.test.ts',
  'src/train/streaming.test.ts',
  'src/infer/structured/structured.test.ts',
  'src/model/memory.test.ts',
  'src/train/ranks/pulse.test.ts',
  'src/data/pipeline/stream-loader.test.ts',
  'test/compilers.test.ts',
  'src/ops/muon/op.test.ts',
  'src/exchange/exchange.test.ts',
  'src/train/ranks/store.test.ts',
  'src/cli/serve.test.ts',
];

class LongestFirst extends BaseSequencer {
  override async sort(files: TestSpecification[]): Promise<TestSpecification[]> {
    const place = ({ moduleId }: TestSpecification) => {
      const at = LONGEST.indexOf(relative(this.ctx.config.root, moduleId));
      return at < 0 ? LONGEST.length : at;
    };
    return (await super.sort(files)).sort((a, b) => place(a) - place(b));
  }
}

export default defineConfig({
  test: {
    include: ['src/**/*.test.ts', 'test/**/*.test.ts'],
    // Against a hang only. Kernels are compiled on first use: a cold and busy machine spends minutes inside the first tests.
    testTimeout: 900_000,
    hookTimeout: 900_000,
    expect: { poll: { timeout: 300_000, interval: 20 } },
    globalSetup: ['src/testing/global-setup.ts'],
    setupFiles: ['src/testing/setup.ts'],
    env: { TREFOIL_CACHE: join(tmpdir(), `trefoil-test-cache-${process.pid}`) },
    sequence: { sequencer: LongestFirst },
    pool: 'forks',
    // One more than the cores of a small machine: many tests wait for time limits and for other processes.
    maxWorkers: 3,
    minWorkers: 1,
  },
});
