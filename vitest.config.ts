import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { defineConfig } from 'vitest/config';

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
    pool: 'forks',
    // One more than the cores of a small machine: many tests wait for time limits and for other processes.
    maxWorkers: 3,
    // The same: when tinypool ends idle workers beside busy ones it can end one twice, which ends the whole run.
    minWorkers: 3,
  },
});
