import { defineConfig } from 'vitest/config';

export default defineConfig({
  test: {
    include: ['src/**/*.test.ts', 'test/**/*.test.ts'],
    // Kernels are compiled on first use: a cold machine spends seconds of compiler time inside the first tests.
    testTimeout: 120_000,
    hookTimeout: 120_000,
    setupFiles: ['src/testing/setup.ts'],
    pool: 'forks',
    maxWorkers: 2,
    minWorkers: 1,
  },
});
