// A training loop of your own: windows of a text, a tape per step, gradient clipping, AdamW, a warm-up. `createLoader`
// of trefoil/data gives batches of whole corpora instead.
import { openDevice, parseConfig } from 'trefoil';
import { createTokenizer } from 'trefoil/data';
import { AdamW, clipFactor, gradientNorm, LanguageModel, modelShape, Sequences, Tape, Tensor } from 'trefoil/nn';

const device = openDevice('auto');
const config = parseConfig({
  model: { dim: 32, n_layers: 2, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16 },
});
const [length, rows, peak, warmup] = [64, 2, 5e-3, 10];
const tokenizer = createTokenizer('byte');
const text = tokenizer.encode('The quick brown fox jumps over the lazy dog, and the dog sleeps on. '.repeat(40));
using model = new LanguageModel(device, modelShape(config, tokenizer.vocabSize), 1);
const trained = model.parameters.map((parameter) => ({
  parameter,
  weightDecay: parameter.value.shape.length >= 2 ? 0.01 : 0, // matrices decay; norms and biases do not
}));
using optimizer = new AdamW(device, trained);
using sequences = new Sequences(device, new Array(rows).fill(length));

for (let step = 1; step <= 40; step++) {
  const starts = Array.from({ length: rows }, (_, row) => ((step * rows + row) * 37) % (text.length - length - 1));
  const inputs = starts.flatMap((start) => [...text.slice(start, start + length)]);
  const next = starts.flatMap((start) => [...text.slice(start + 1, start + length + 1)]);
  using ids = Tensor.from(device, inputs, [inputs.length], 'i32');
  using targets = Tensor.from(device, next, [next.length], 'i32');
  using tape = new Tape(device);
  const loss = model.loss(tape, ids, targets, { lengths: sequences });
  tape.backward(loss);
  const gradients = model.parameters.flatMap(({ gradient }) => gradient ?? []);
  const { norm } = gradientNorm(device, gradients);
  // The step clears the gradients, so that the next backward pass starts from zero.
  optimizer.step({ learningRate: peak * Math.min(1, step / warmup), gradientScale: clipFactor(norm, 1) });
  if (step === 1 || step % 10 === 0)
    console.log(`step ${step}: loss ${loss.item().toFixed(3)}, gradient norm ${norm.toFixed(2)}`);
}
