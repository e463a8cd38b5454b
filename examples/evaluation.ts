// Loss, perplexity and bits per byte of a model on the held-out samples of a loader: random bytes here; for text of yours
// give `createLoader` the source 'text' and a path.
import { openDevice, parseConfig } from 'trefoil';
import { createLoader, createTokenizer } from 'trefoil/data';
import { LanguageModel, modelShape, Tensor } from 'trefoil/nn';

const device = openDevice('auto');
const config = parseConfig({
  model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16 },
});
const tokenizer = createTokenizer('byte');
// A fresh model; with one of yours: const { model } = loadModel(device, 'artifacts/mine');
using model = new LanguageModel(device, modelShape(config, tokenizer.vocabSize), 1);

const [length, rows] = [64, 2];
const loader = await createLoader({
  source: 'synthetic',
  tokenizer: 'byte',
  vocabSize: tokenizer.vocabSize,
  valFraction: 0.5,
  seed: 3,
  seqLen: length,
  batchSize: rows,
});
const lengths = new Array<number>(rows).fill(length);
let [total, count] = [0, 0];
for (const batch of loader.evalBatches(4)) {
  using ids = Tensor.from(device, batch.inputs, [batch.inputs.length], 'i32');
  using targets = Tensor.from(device, batch.targets, [batch.targets.length], 'i32');
  using losses = model.losses(ids, targets, { lengths }); // one per token; ignored targets have 0
  for (const loss of losses.read()) total += loss;
  count += batch.targetCount;
}
const loss = total / count;
console.log(`${count} targets: loss ${loss.toFixed(4)}, perplexity ${Math.exp(loss).toFixed(1)}`);
console.log(`bits per byte: ${(loss / Math.log(2)).toFixed(3)}`); // a byte-level model has one byte per token
loader.close();
