// A rank of test/ranks.slow.test.ts: trains several configs one after the other in one world, and prints what came of each.
// Runs the built program (dist/), as a user's ranks do.
import { createHash } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { parseConfig } from '../../dist/config/parse.js';
import { CpuDevice } from '../../dist/device/cpu/cpu.js';
import { openSafetensors } from '../../dist/run/safetensors.js';
import { resolveRank } from '../../dist/train/ranks/identity.js';
import { openWorld } from '../../dist/train/ranks/world.js';
import { train } from '../../dist/train/train.js';

const jobs = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const device = new CpuDevice({ threads: 1 });
const identity = resolveRank(process.env);
const world = identity.world === 1 ? null : await openWorld(identity, device, { timeoutSeconds: 60 });
const results = {};
for (const [name, { config, resume = null, until = null, seeds = null }] of Object.entries(jobs)) {
  const losses = [];
  const said = [];
  const stop = { aborted: false };
  const result = await train({
    // Another seed on one rank stands for weights that went astray.
    config: parseConfig(seeds ? { ...config, train: { ...config.train, seed: seeds[world.rank] } } : config),
    ...{ device, world, resume },
    say: (line) => said.push(line),
    warn: (line) => said.push(line),
    onStep: ({ step, loss }) => {
      losses.push(loss);
      stop.aborted ||= step === until;
    },
    signal: stop,
  });
  results[name] = { status: result.status, step: result.step, valLoss: result.valLoss, losses, said };
  if (result.status !== 'done') continue;
  const file = openSafetensors(`${result.outDir}/model.safetensors`);
  const hash = createHash('sha256');
  for (const tensor of file.entries.keys()) hash.update(file.read(tensor).data);
  file.close();
  results[name].weights = hash.digest('hex');
}
if (!world || world.isFirst) process.stdout.write(`${JSON.stringify(results)}\n`);
world?.close();
