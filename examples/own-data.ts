// Trains on your own text files: a file, a folder or a glob. One file is one document. This program writes two files
// of its own; replace `path` by yours. `source: 'jsonl'` reads JSON Lines with a field "text" instead.
import { mkdirSync, mkdtempSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { openDevice, readConfig, train } from 'trefoil';
import { createTokenizer } from 'trefoil/data';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-own-data-'));
mkdirSync(join(folder, 'texts'));
for (const [name, animal] of [
  ['cats', 'cat'],
  ['dogs', 'dog'],
])
  writeFileSync(join(folder, 'texts', `${name}.txt`), `The ${animal} sat on the mat. `.repeat(400));

const tokenizer = createTokenizer('byte'); // or 'gpt2', or the path of a tokenizer.json
console.log(`"The cat" is ${tokenizer.encode('The cat').length} tokens of ${tokenizer.vocabSize}`);

const config = readConfig('base', {
  model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16 },
  data: { source: 'text', path: join(folder, 'texts'), tokenizer: 'byte', val_fraction: 0.1 },
  train: {
    steps: 40,
    seq_len: 64,
    batch_size: 2,
    lr: 5e-3,
    warmup_steps: 5,
    eval_every: 20,
    out_dir: join(folder, 'run'),
  },
});
const { status, firstLoss, lastLoss, valLoss } = await train({ config, device: openDevice('auto') });
console.log(`${status}: loss ${firstLoss?.toFixed(3)} -> ${lastLoss?.toFixed(3)}, validation ${valLoss?.toFixed(3)}`);
