// Another model from the same layers: one block applied twice with shared weights (a looped transformer), which labels
// every token with 1 if token 0 occurred earlier in the sequence and else with 0.
import * as trefoil from 'trefoil';
import { crossEntropy, embedding, linear, rmsnorm } from 'trefoil/ops';

const [tokens, kinds] = [64, 32];
const device = trefoil.openDevice('cpu');
const config = trefoil.parseConfig({
  model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16, mlp: 'swiglu', mlp_ratio: 2 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 32 },
});
const shape = trefoil.modelShape(config, kinds);

class FlagDetector {
  readonly store = new trefoil.ParameterStore(device, 1, 2);
  readonly table = this.store.matrix('table', [kinds, shape.dim]);
  readonly block = new trefoil.Block(this.store, 'block', shape);
  readonly norm = this.store.constant('norm', [shape.dim], 1);
  readonly head = this.store.matrix('head', [2, shape.dim]);

  loss(tape: trefoil.Tape, words: number[], labels: number[], layout: trefoil.SparseLayout): trefoil.Tensor {
    let x: trefoil.Tensor = embedding(tape, this.table.value, tape.from(words, [tokens], 'i32'));
    for (let i = 0; i < 2; i++) x = this.block.forward(tape, x, { layout });
    const logits = linear(tape, rmsnorm(tape, x, this.norm.value), this.head.value);
    return crossEntropy(tape, logits, tape.from(labels, [tokens], 'i32'));
  }
}

const model = new FlagDetector();
const parameters = model.store.parameters.map((parameter) => ({ parameter, weightDecay: 0 }));
const optimizer = new trefoil.AdamW(device, parameters);
const sequences = new trefoil.Sequences(device, [tokens]);
const layout = trefoil.sparseLayout(sequences, shape.nsa);
for (let step = 1; step <= 120; step++) {
  const words = Array.from({ length: tokens }, (_, i) => 1 + ((i * i + 7 * step * i) % (kinds - 1)));
  const flag = (step * 29) % tokens;
  words[flag] = 0;
  const loss = trefoil.withTape(device, (tape) => {
    const output = model.loss(
      tape,
      words,
      Array.from(words, (_, i) => Number(i > flag)),
      layout,
    );
    tape.backward(output);
    return output.item();
  });
  optimizer.step({ learningRate: 5e-3 });
  if (step === 1 || step % 30 === 0) console.log(`step ${step}: loss ${loss.toFixed(3)}`);
}
for (const held of [layout, sequences, optimizer, model.store]) held.free();
