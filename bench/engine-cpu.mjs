// The cost of the engine while decoding on the CPU: CPU time of a token in the engine, and of the same model without
// it, on one thread. CPU time, because a busy machine changes it little.
//
//   node bench/engine-cpu.mjs MODEL [--streams 1,8] [--tokens 40] [--rounds 5]
import { parseArgs } from 'node:util';
import { createEngine, loadModel, openDevice } from '../dist/index.js';
import { prefill, readTokens } from '../dist/infer/decode.js';
import { DecodeCache } from '../dist/model/cache.js';
import { median } from './markdown.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    streams: { type: 'string', default: '1,8' },
    tokens: { type: 'string', default: '40' },
    rounds: { type: 'string', default: '5' },
  },
});
const [path] = positionals;
if (!path) throw new Error('usage: node bench/engine-cpu.mjs MODEL [--streams 1,8] [--tokens N] [--rounds N]');
const count = Number(values.tokens);
const device = openDevice('cpu', { threads: 1 });
const source = loadModel(device, path);
const { model } = source;
const prompts = (streams) =>
  Array.from({ length: streams }, (_, row) => Array.from({ length: 64 }, (_, i) => (i * 7919 + row) % 256));
const cpuMs = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
};

function argmax(logits) {
  let best = 0;
  for (let token = 1; token < logits.length; token++) if (logits[token] > logits[best]) best = token;
  return [best];
}

function alone(streams) {
  const cache = new DecodeCache(device, model.shape, model.dtype);
  const sequences = Array.from({ length: streams }, () => cache.sequence());
  let logits = prefill(model, sequences, prompts(streams));
  const startedAt = cpuMs();
  for (let i = 0; i < count; i++) logits = readTokens(model, sequences, logits.map(argmax));
  const ms = (cpuMs() - startedAt) / (count * streams);
  for (const sequence of sequences) sequence.free();
  return ms;
}

/** From the moment when all streams have a token to the end of the first. */
async function inEngine(streams) {
  const engine = createEngine(source, { maxBatch: streams });
  const seen = new Array(streams).fill(0);
  let startedAt = null;
  let ms = null;
  const stream = (prompt, row) =>
    new Promise((resolve) => {
      const onToken = () => {
        seen[row] += 1;
        if (startedAt === null && seen.every((tokens) => tokens > 0)) startedAt = cpuMs();
        if (ms === null && seen[row] > count) ms = (cpuMs() - startedAt) / (count * streams);
      };
      const push = ({ type }) => (type === 'token' ? onToken() : type === 'end' && resolve());
      const request = { prompt, maxNewTokens: count + 1, ignoreSeparator: true, sampling: { temperature: 0 } };
      engine.listen(request, { push, end: () => {} });
    });
  await Promise.all(prompts(streams).map(stream));
  await engine.close();
  return ms;
}

for (const streams of values.streams.split(',').map(Number)) {
  const rounds = [];
  for (let i = 0; i < Number(values.rounds); i++) {
    const before = alone(streams);
    const engine = await inEngine(streams);
    rounds.push({ alone: (before + alone(streams)) / 2, engine });
  }
  const ratios = rounds.map(({ alone, engine }) => alone / engine);
  console.log(
    `${streams} streams: ${median(rounds.map(({ alone }) => alone)).toFixed(2)} ms a token alone, ` +
      `${median(rounds.map(({ engine }) => engine)).toFixed(2)} in the engine, ratio ${median(ratios).toFixed(3)} ` +
      `(${Math.min(...ratios).toFixed(3)} to ${Math.max(...ratios).toFixed(3)})`,
  );
}
model.free();
