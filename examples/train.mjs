// @ts-check
// Trains a small byte-level model with Native Sparse Attention, stops it, goes on, and lets it write. Run it with
// `node examples/train.mjs` after `npm run build`, or from any folder in which the package is installed.
import { CpuDevice, findCheckpoint, generate, loadModel, readConfig, train } from 'trefoil';

const device = new CpuDevice();
const outDir = `artifacts/example-${Date.now()}`;
const config = readConfig('quickstart', {
  model: { dim: 96, n_layers: 2, n_heads: 4, n_kv_groups: 2 },
  data: { path: 'package:{README.md,docs/**/*.md}', tokenizer: 'byte' }, // what comes with the package; or a file, folder or pattern
  train: { steps: 60, seq_len: 256, batch_size: 2, warmup_steps: 10, save_every: 20, eval_every: 60, out_dir: outDir },
});

// The first half: stopped from outside, it finishes its step and leaves a checkpoint.
const controller = new AbortController();
const first = await train({
  ...{ config, device, signal: controller.signal },
  onStep: ({ step, loss, tokensPerSecond }) => {
    if (step % 10 === 0) console.log(`step ${step}: loss ${loss.toFixed(3)}, ${tokensPerSecond.toFixed(0)} tok/s`);
    if (step === 30) controller.abort();
  },
});
console.log(`${first.status} at step ${first.step}, checkpoint ${findCheckpoint(outDir, 'auto')?.path}`);

// The second half: the same losses, bit for bit, as if nothing had happened.
const { status, step, firstLoss, lastLoss, valLoss } = await train({ config, device, resume: 'auto' });
console.log(`${status} at step ${step}: loss ${firstLoss} -> ${lastLoss}, validation ${valLoss}`);

const loaded = loadModel(device, outDir);
let text = 'The ';
for await (const piece of generate(loaded, text, { maxNewTokens: 80, sampling: { temperature: 0.7, seed: 1 } }))
  text += piece;
console.log(text);
loaded.model.free();
