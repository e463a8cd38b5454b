import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { LLAMA, writeHfFolder } from '../../exchange/testing/hf-folder.js';
import { runCli } from '../testing/run.js';

it('import hf shows on a terminal how much of the weights is written, and removes the line', async () => {
  const parent = mkdtempSync(join(tmpdir(), 'trefoil-import-progress-'));
  const { folder } = writeHfFolder(join(parent, 'from'), JSON.parse(JSON.stringify(LLAMA)));
  const { code, stderr } = await runCli(['import', 'hf', folder, '--out', join(parent, 'to')], { terminal: true });
  expect(code, stderr).toBe(0);
  const lines = stderr.split('\r\x1b[K');
  expect(lines[1]).toMatch(/^\[#*\.*\] \d+ of \d+ MB, [\d.]+ MB\/s(, \d+ s left)?$/);
  expect(lines.at(-1)).not.toContain('MB/s');
  rmSync(parent, { recursive: true });
});
