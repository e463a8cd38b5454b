/**
 * Seconds from the command `trefoil train` to the line of its first step, with an empty kernel cache and with a filled one.
 *
 *   node bench/start-up.mjs [--device cuda|cpu] [--config NAME] [--repeats N] [--out FILE.json]
 *
 * Needs `npm run build`. The text is that of docs/. Prints when each line of the run appeared.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const { values } = parseArgs({
  options: {
    device: { type: 'string', default: 'cuda' },
    config: { type: 'string', default: '125m_80g' },
    repeats: { type: 'string', default: '2' },
    out: { type: 'string' },
  },
});
const root = fileURLToPath(new URL('..', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'trefoil-start-up-'));

/** Runs one step and resolves with the seconds at which each line appeared. */
function timeRun(name) {
  const began = performance.now();
  const flags = [
    '--config',
    values.config,
    '--device',
    values.device,
    '--local-path',
    join(root, 'docs'),
    '--steps',
    '1',
  ];
  const sets = ['--set', 'train.eval_every=0', '--set', 'train.save_every=0', '--out-dir', join(folder, name)];
  const child = spawn(process.execPath, [join(root, 'dist/cli/main.js'), 'train', ...flags, ...sets], {
    cwd: root,
    env: { ...process.env, TREFOIL_CACHE: join(folder, 'cache') },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  const lines = [];
  for (const stream of [child.stdout, child.stderr])
    createInterface({ input: stream }).on('line', (text) => {
      lines.push({ seconds: (performance.now() - began) / 1000, text });
    });
  return new Promise((resolve, reject) => {
    child.once('close', (status) => {
      const first = lines.find(({ text }) => /^step 0*1 /.test(text));
      for (const { seconds, text } of lines) console.log(`${seconds.toFixed(2).padStart(7)} s  ${text.slice(0, 110)}`);
      if (status === 0 && first) resolve({ run: name, first_step_s: Number(first.seconds.toFixed(2)) });
      else reject(new Error(`trefoil train ended with ${status} and ${first ? 'a' : 'no'} first step`));
    });
  });
}

try {
  const runs = [];
  for (const name of [
    'empty cache',
    ...Array.from({ length: Number(values.repeats) }, (_, i) => `filled cache ${i + 1}`),
  ]) {
    console.log(`${name}:`);
    runs.push(await timeRun(name));
  }
  for (const { run, first_step_s } of runs) console.log(`${run}: first step after ${first_step_s} s`);
  if (values.out)
    writeFileSync(values.out, `${JSON.stringify({ config: values.config, device: values.device, runs }, null, 1)}\n`);
} finally {
  rmSync(folder, { recursive: true, force: true });
}
