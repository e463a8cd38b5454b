// Text from a model as it is generated: piece by piece, until an AbortSignal or a stop string, and several prompts at
// once. The model here is a fresh one; give `loadModel` the folder of a run to use yours.
import { generate, generateAll, openDevice, parseConfig } from 'trefoil';
import { createTokenizer } from 'trefoil/data';
import { LanguageModel, modelShape } from 'trefoil/nn';

const device = openDevice('auto');
const config = parseConfig({
  model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
  nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16 },
});
const tokenizer = createTokenizer('byte');
using model = new LanguageModel(device, modelShape(config, tokenizer.vocabSize), 1);
const source = { model, tokenizer, config }; // what loadModel(device, folder) returns

const controller = new AbortController();
const stream = generate(source, 'Once upon a time', { maxNewTokens: 1000, signal: controller.signal });
let pieces = 0;
for (;;) {
  const { done, value } = await stream.next();
  if (done) {
    console.log(`ended: ${value.finishReason} after ${value.tokens.length} tokens in ${pieces} pieces`);
    break;
  }
  pieces += 1;
  if (pieces === 10) controller.abort(); // for example because the client has gone
}

const texts = ['', '', ''];
const options = { maxNewTokens: 20, sampling: { temperature: 0.8, topK: 40, topP: 0.95, seed: 7 }, stop: ['\n\n'] };
for await (const { index, text } of generateAll(source, ['One', 'Two', 'Three'], options)) texts[index] += text;
console.log(`characters of three texts: ${texts.map((text) => text.length).join(' ')}`);
