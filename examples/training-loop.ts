// A training loop of your own: windows of a text, a tape per step, gradient clipping, AdamW, a warm-up. `createLoader`
// of trefoil/data gives batches of whole corpora instead.
import {
  AdamW,
  LanguageModel,
  modelShape,
  openDevice,
  parseConfig,
  Sequences,
  sparseLayout,
  Tensor,
  withTape,
} from 'trefoil';
import { createTokenizer } from 'trefoil/data';
import { clipFactor, gradientNorm } from 'trefoil/ops';

const device = openDevice('auto');
const config = parseConfig({
  model: { dim: 32, n_layers: 2, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16 },
});
const [length, rows, peak, warmup] = [64, 2, 5e-3, 10];
const tokenizer = createTokenizer('byte');
const text = tokenizer.encode('The quick brown fox jumps over the lazy dog, and the dog sleeps on. '.repeat(40));
const model = new LanguageModel(device, modelShape(config, tokenizer.vocabSize), 1);
const trained = model.parameters.map((parameter) => ({
  parameter,
  weightDecay: parameter.value.shape.length >= 2 ? 0.01 : 0, // matrices decay; norms and biases do not
}));
const optimizer = new AdamW(device, trained);
const sequences = new Sequences(device, new Array(rows).fill(length));
const layout = sparseLayout(sequences, config.nsa);

for (let step = 1; step <= 40; step++) {
  const starts = Array.from({ length: rows }, (_, row) => ((step * rows + row) * 37) % (text.length - length - 1));
  const inputs = starts.flatMap((start) => [...text.slice(start, start + length)]);
  const next = starts.flatMap((start) => [...text.slice(start + 1, start + length + 1)]);
  const ids = Tensor.from(device, inputs, [inputs.length], 'i32');
  const targets = Tensor.from(device, next, [next.length], 'i32');
  const loss = withTape(device, (tape) => {
    const output = model.loss(tape, ids, targets, { layout });
    tape.backward(output);
    return output.item();
  });
  const gradients = model.parameters.flatMap(({ gradient }) => gradient ?? []);
  const { norm } = gradientNorm(device, gradients);
  // The step clears the gradients, so that the next backward pass starts from zero.
  optimizer.step({ learningRate: peak * Math.min(1, step / warmup), gradientScale: clipFactor(norm, 1) });
  if (step === 1 || step % 10 === 0)
    console.log(`step ${step}: loss ${loss.toFixed(3)}, gradient norm ${norm.toFixed(2)}`);
  ids.free();
  targets.free();
}
for (const held of [layout, sequences, optimizer, model]) held.free();
