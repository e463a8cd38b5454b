// Trains a small byte-level model with Native Sparse Attention on the package's documents, then lets it write.
import { generate, loadModel, openDevice, readConfig, train } from 'trefoil';

const device = openDevice('auto'); // a GPU if there is one
console.log(`device: ${device.kind} (${device.name})`);

const config = readConfig('base', {
  model: { dim: 64, n_layers: 2, n_heads: 4, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 32 },
  data: { source: 'text', path: 'package:docs/**/*.md', tokenizer: 'byte' },
  train: {
    steps: 60,
    seq_len: 128,
    batch_size: 2,
    lr: 3e-3,
    warmup_steps: 5,
    out_dir: `artifacts/first-${Date.now()}`,
  },
});
const result = await train({
  ...{ config, device },
  onStep: ({ step, loss }) => {
    if (step % 20 === 0) console.log(`step ${step}: loss ${loss.toFixed(3)}`);
  },
});
console.log(`${result.status}: loss ${result.firstLoss?.toFixed(3)} -> ${result.lastLoss?.toFixed(3)}`);

const loaded = loadModel(device, result.outDir);
let text = 'The ';
for await (const piece of generate(loaded, text, { maxNewTokens: 60, sampling: { temperature: 0.7, seed: 1 } }))
  text += piece;
console.log(text);
loaded.free();
