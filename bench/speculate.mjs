// Speculative decoding by prompt look-up on the CPU. Times are CPU time of one thread, so that other programs on the
// machine disturb them little.
//
//   node bench/speculate.mjs cost [--lengths 1024,4096,16384,65536]
//     time of a step that reads 1, 5 or 9 tokens, by context length, for sparse and dense attention (4 layers, 256 wide)
//   node bench/speculate.mjs gain MODEL [--tokens 512]
//     tokens per CPU second of a model with and without, on a prompt that repeats itself and on one that does not
import { parseArgs } from 'node:util';
import { fillCache } from '../dist/bench/decode-setup.js';
import { configSchema } from '../dist/config/schema.js';
import { createEngine, loadModel, openDevice } from '../dist/index.js';
import { readRows } from '../dist/infer/decode.js';
import { DecodeCache } from '../dist/model/cache.js';
import { LanguageModel } from '../dist/model/language-model.js';
import { modelShape } from '../dist/model/shape.js';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    lengths: { type: 'string', default: '1024,4096,16384,65536' },
    tokens: { type: 'string', default: '512' },
  },
});
const [kind, path] = positionals;
const device = openDevice('cpu', { threads: 1 });
const DRAFTS = 8;

/** Milliseconds of CPU time of this process. */
function cpuTime() {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
}

function cost() {
  const model = { dim: 256, n_layers: 4, n_heads: 8, n_kv_groups: 2, d_k: 32, d_v: 32 };
  const nsa = { l: 32, d: 16, l_sel: 64, n_sel: 16, w: 512 };
  console.log('ms, best of 25       context   1 token  5 tokens  9 tokens   9 / 1');
  for (const attention of ['nsa', 'dense']) {
    const config = configSchema.parse({ model: { ...model, attention }, nsa, data: { tokenizer: 'byte' } });
    const network = new LanguageModel(device, modelShape(config, 256), 1);
    for (const length of values.lengths.split(',').map(Number)) {
      const cache = new DecodeCache(device, network.shape, network.dtype, DRAFTS);
      const sequence = cache.sequence();
      fillCache(cache, [sequence], length);
      const times = [0, 4, 8].map((drafts) => {
        const tokens = Array.from({ length: 1 + drafts }, (_, i) => i);
        const step = () => {
          const startedAt = cpuTime();
          // All but the first token are taken back, so every step has the same context.
          readRows(network, [sequence], [tokens], tokens, { drafts: [drafts] });
          sequence.truncate(sequence.settled);
          return cpuTime() - startedAt;
        };
        return Math.min(...Array.from({ length: 25 }, step));
      });
      const shown = times.map((ms) => ms.toFixed(2).padStart(9)).join(' ');
      console.log(
        `${attention.padEnd(18)} ${String(length).padStart(9)} ${shown} ${(times[2] / times[0]).toFixed(2).padStart(7)}`,
      );
      sequence.free();
    }
    network.free();
  }
}

async function gain() {
  if (!path) throw new Error('usage: node bench/speculate.mjs gain MODEL [--tokens N]');
  const loaded = loadModel(device, path);
  const line = 'Mia found the red ball under the old tree. ';
  const prompts = {
    'repeats itself': line.repeat(12) + line.slice(0, 9),
    ordinary: 'Once there was a small boat on a wide lake, and the children asked who had left it there. Mia',
  };
  console.log('prompt, sampling                  tok/s off   tok/s on   gain   accepted of guessed   same tokens');
  for (const [name, text] of Object.entries(prompts))
    for (const temperature of [0, 0.7]) {
      const results = [];
      for (const speculate of [0, DRAFTS]) {
        const engine = createEngine(loaded, { speculate, maxContext: 16384 });
        const request = {
          prompt: Array.from(loaded.tokenizer.encode(text)),
          maxNewTokens: Number(values.tokens),
          ignoreSeparator: true,
          sampling: { temperature, seed: 1 },
        };
        const tokens = [];
        let seconds = Number.POSITIVE_INFINITY;
        for (let run = 0; run < 3; run++) {
          tokens.length = 0;
          let startedAt = 0;
          for await (const event of engine.submit(request)) {
            if (event.type === 'prompt') startedAt = cpuTime();
            if (event.type === 'token') tokens.push(event.token);
          }
          seconds = Math.min(seconds, (cpuTime() - startedAt) / 1000);
        }
        results.push({ rate: tokens.length / seconds, tokens: tokens.join(), stats: engine.stats() });
        await engine.close();
      }
      const [off, on] = results;
      const { acceptedTokens, draftTokens } = on.stats;
      console.log(
        `${`${name}, temperature ${temperature}`.padEnd(33)} ${off.rate.toFixed(0).padStart(8)} ${on.rate.toFixed(0).padStart(10)}` +
          ` ${(on.rate / off.rate).toFixed(2).padStart(6)} ${`${acceptedTokens} of ${draftTokens}`.padStart(21)}` +
          ` ${String(off.tokens === on.tokens).padStart(13)}`,
      );
    }
  loaded.free();
}

if (kind === 'cost') cost();
else if (kind === 'gain') await gain();
else throw new Error('usage: node bench/speculate.mjs cost|gain');
