// Another model from the same layers: one block applied twice with shared weights (a looped transformer), which labels
// every token with 1 if token 0 occurred earlier in the sequence and else with 0.
import { openDevice, parseConfig } from 'trefoil';
import * as nn from 'trefoil/nn';

const [tokens, kinds] = [64, 32];
const device = openDevice('cpu');
const config = parseConfig({
  model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16, mlp: 'swiglu', mlp_ratio: 2 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 32 },
});
const shape = nn.modelShape(config, kinds);

class FlagDetector {
  readonly store = new nn.ParameterStore(device, 1, 2);
  readonly table = this.store.matrix('table', [kinds, shape.dim]);
  readonly block = new nn.Block(this.store, 'block', shape);
  readonly norm = this.store.constant('norm', [shape.dim], 1);
  readonly head = this.store.matrix('head', [2, shape.dim]);

  loss(tape: nn.Tape, words: number[], labels: number[]): nn.Tensor {
    let x: nn.Tensor = nn.embedding(tape, this.table.value, tape.from(words, [tokens], 'i32'));
    for (let i = 0; i < 2; i++) x = this.block.forward(tape, x, { lengths: [tokens] });
    const logits = nn.linear(tape, nn.rmsnorm(tape, x, this.norm.value), this.head.value);
    return nn.crossEntropy(tape, logits, tape.from(labels, [tokens], 'i32'));
  }
}

const model = new FlagDetector();
const parameters = model.store.parameters.map((parameter) => ({ parameter, weightDecay: 0 }));
using optimizer = new nn.AdamW(device, parameters);
for (let step = 1; step <= 120; step++) {
  const words = Array.from({ length: tokens }, (_, i) => 1 + ((i * i + 7 * step * i) % (kinds - 1)));
  const flag = (step * 29) % tokens;
  words[flag] = 0;
  const labels = Array.from(words, (_, i) => Number(i > flag));
  using tape = new nn.Tape(device);
  const loss = model.loss(tape, words, labels);
  tape.backward(loss);
  optimizer.step({ learningRate: 5e-3 });
  if (step === 1 || step % 30 === 0) console.log(`step ${step}: loss ${loss.item().toFixed(3)}`);
}
model.store.free();
