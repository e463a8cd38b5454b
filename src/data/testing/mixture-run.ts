/** Run by the test of mixtures as another process: takes batches, and saves its position after every fifth, until it is killed. */

import { appendFileSync, existsSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { parseSavedConfig } from '../../config/parse.js';
import { openLoader } from '../loader.js';

const [configPath, positions, batches, steps] = process.argv.slice(2);
const config = parseSavedConfig(JSON.parse(readFileSync(configPath, 'utf8')));
const { seq_len: length } = config.train;
const loader = await openLoader(config);
let step = 0;
if (existsSync(positions)) {
  const saved = JSON.parse(readFileSync(positions, 'utf8'));
  step = saved.step;
  loader.restore(saved.state);
}
for (; step < Number(steps); step++) {
  const { inputs, targets, sampleIds } = loader.next();
  const rows = sampleIds.map((id, row) => {
    const [from, to] = [row * length, (row + 1) * length];
    return `${id}: ${inputs.slice(from, to)} > ${targets.slice(from, to)}`;
  });
  appendFileSync(batches, `${step} ${rows.join(';')}!\n`);
  if (step % 5 === 4) {
    writeFileSync(`${positions}.new`, JSON.stringify({ step: step + 1, state: loader.state() }));
    renameSync(`${positions}.new`, positions);
  }
  process.stdout.write(`${step}\n`);
  // So that a kill meets the loop, not its end.
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 5);
}
loader.close();
