import { join } from 'node:path';
import { expect, it } from 'vitest';
import { runNode, trefoilMain } from '../src/testing/cli.js';

/** Files that a reader opens to follow it, besides those of operations, tensors and devices. Only ever lowered. */
const MOST_FILES = { 'one training step': 12, 'one generated token': 8, 'one resume': 10 };

it('one step, one token and one resume stay short to follow', async () => {
  trefoilMain(); // builds if that was not done
  const script = join(import.meta.dirname, '..', 'scripts', 'files-crossed.mjs');
  const { code, stdout, stderr } = await runNode([script]);
  expect(code, stderr).toBe(0);
  for (const [what, most] of Object.entries(MOST_FILES)) {
    const count = Number(new RegExp(`^${what}: (\\d+) files`, 'm').exec(stdout)?.[1]);
    expect(count, stdout).toBeGreaterThan(0);
    expect(count, stdout).toBeLessThanOrEqual(most);
  }
}, 300_000);
