/** The dashboard beside a training, in the built program. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { pathToFileURL } from 'node:url';
import { afterAll, expect, it } from 'vitest';
import { ended, startProgram, trefoil, trefoilMain } from '../../testing/cli.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-beside-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

it('ends when the training is killed', { timeout: 300_000 }, async () => {
  const program = join(folder, 'training.mjs');
  const module = pathToFileURL(join(trefoilMain(), '..', 'shared', 'dashboard-process.js')).href;
  writeFileSync(
    program,
    `import { withDashboard } from ${JSON.stringify(module)};
await withDashboard(true, ${JSON.stringify(join(folder, 'run'))}, console.log, { warn: console.error }, async () => {
  await new Promise((resolve) => setTimeout(resolve, 400_000));
});`,
  );
  const training = startProgram(process.execPath, [program]);
  let said = '';
  training.stdout!.on('data', (text) => {
    said += text;
  });
  const address = () => /^dashboard: (http.*)$/m.exec(said)?.[1];
  await expect.poll(address).toBeDefined();
  expect((await fetch(address()!)).status).toBe(200);
  training.kill('SIGKILL');
  await ended(training);
  const isThere = () =>
    fetch(address()!).then(
      () => true,
      () => false,
    );
  while (await isThere()) await setTimeout(100); // the test's time limit ends it
});

it.each(['train', 'start'])(
  '%s ends with its dashboard and says how to see the run again',
  { timeout: 300_000 },
  async (command) => {
    const outDir = join(folder, command, 'run');
    const words = [command, '--config', 'quickstart', '--steps', '2', '--out-dir', outDir, '--dashboard'];
    const { code, stdout } = await trefoil(words);
    expect(code).toBe(0);
    expect(stdout).toContain(`see the run again with: npx trefoil dashboard --dir ${join(folder, command)}`);
  },
);
