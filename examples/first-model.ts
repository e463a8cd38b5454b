// Trains a small model with Native Sparse Attention on generated stories, for some seconds, then lets it write one.
import { generate, loadModel, openDevice, readConfig, train } from 'trefoil';

const device = openDevice('auto'); // a GPU if there is one
console.log(`device: ${device.kind} (${device.name})`);

const config = readConfig('base', {
  model: { dim: 64, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 32 },
  data: { source: 'stories', tokenizer: 'stories' }, // for text of yours: source 'text', path, tokenizer 'gpt2'
  train: {
    steps: 150,
    seq_len: 128,
    batch_size: 4,
    lr: 5e-3,
    warmup_steps: 10,
    out_dir: `artifacts/first-${Date.now()}`,
  },
});
const result = await train({
  config,
  device,
  onStep: ({ step, loss }) => {
    if (step % 50 === 0) console.log(`step ${step}: loss ${loss.toFixed(3)}`);
  },
});
console.log(`${result.status}: loss ${result.firstLoss?.toFixed(3)} -> ${result.lastLoss?.toFixed(3)}`);

using loaded = loadModel(device, result.outDir);
let text = 'Once upon a time';
for await (const piece of generate(loaded, text, { maxNewTokens: 60, sampling: { temperature: 0.5, seed: 1 } }))
  text += piece;
console.log(text);
