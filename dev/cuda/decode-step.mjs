// A decode step of the 125m shape on one GPU: milliseconds of a token end to end, of a layer's attention, of its
// parts alone, and of every kind of kernel launched by itself. Needs `npm run build`.
//   node dev/cuda/decode-step.mjs [--lengths 4096,65536] [--batches 1,32] [--runs 40] [--out FILE]
//     [--clusters 2,4]     also measure clusters of these sizes
//     [--spread on|off]    the compressed branch over the whole GPU, or not (default: by the context)
//   node dev/cuda/decode-step.mjs --once --batches 1 --lengths 65536      one step, for a profiler
import { writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const dist = join(dirname(fileURLToPath(import.meta.url)), '..', '..', 'dist');
const { values } = parseArgs({
  options: {
    lengths: { type: 'string', default: '4096,65536' },
    batches: { type: 'string', default: '1,32' },
    runs: { type: 'string', default: '40' },
    clusters: { type: 'string' },
    spread: { type: 'string' },
    once: { type: 'boolean', default: false },
    out: { type: 'string' },
  },
});
const load = (path) => import(join(dist, path));
const { CudaDevice } = await load('device/cuda/cuda.js');
const { caseShape, trainCases } = await load('bench/train-cases.js');
const { fillCache } = await load('bench/decode-setup.js');
const { DecodeCache } = await load('model/cache.js');
const { LanguageModel } = await load('model/language-model.js');
const { DeviceDecoder } = await load('infer/device-decoder.js');
const { STEP_PARTS } = await load('ops/attention/decode/step/step.js');

const numbers = (text) => text.split(',').map(Number);
const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];
const runs = Number(values.runs);
const device = new CudaDevice();
const [named] = trainCases({ config: 'm7c_125m_80g', attention: 'nsa' }, {});
const shape = caseShape(named);
const model = new LanguageModel(device, shape, 1, 'bf16');
const { compressed, selection, selected, window } = STEP_PARTS;
const PARTS = {
  'merges alone': 0,
  compressed,
  'compressed and selection': compressed | selection,
  selected,
  window,
  attention: STEP_PARTS.all,
};

function timeGraph(work) {
  work();
  const graph = device.record(work);
  for (let i = 0; i < 3; i++) graph.replay();
  const ms = median(device.time(() => graph.replay(), runs));
  graph.free();
  return ms;
}

function measure(S, batch, cluster) {
  const cache = new DecodeCache(device, shape, 'bf16');
  const sequences = Array.from({ length: batch }, () => cache.sequence());
  const spread = values.spread ? { spread: values.spread === 'on' } : {};
  const decoder = new DeviceDecoder(model, cache, { ...(cluster ? { cluster } : {}), ...spread });
  try {
    fillCache(cache, sequences, S - 1);
    decoder.launch(
      sequences,
      sequences.map((_, row) => row % 7),
    );
    decoder.next();
    const next = () => {
      decoder.launch(sequences);
      return decoder.next();
    };
    if (values.once) return { S, batch, token: next()[0] };
    for (let i = 0; i < 3; i++) next();
    const times = [];
    for (let i = 0; i < runs; i++) {
      const from = performance.now();
      next();
      times.push(performance.now() - from);
    }
    const ms = median(times);
    const step = decoder.prepare(sequences);
    const parts = {};
    for (const [name, mask] of Object.entries(PARTS)) parts[name] = timeGraph(() => step.launchAttention(mask));
    for (const [name, { ms: sum, calls }] of device.profile(() => step.launch())) parts[`${name} x${calls}`] = sum;
    return {
      ...{ S, batch, cluster, ms, tokens_per_s: (1000 * batch) / ms },
      ...{ attention_layer_us: (1000 * parts.attention) / shape.nLayers, parts },
    };
  } finally {
    decoder.free();
    for (const sequence of sequences) sequence.free();
    device.pool.trim();
  }
}

const rows = [];
for (const batch of numbers(values.batches))
  for (const S of numbers(values.lengths))
    for (const cluster of [null, ...(values.clusters ? numbers(values.clusters) : [])]) {
      const row = measure(S, batch, cluster);
      rows.push(row);
      if (values.once) continue;
      const { ms, tokens_per_s, attention_layer_us, parts } = row;
      const plan = cluster ? `, clusters of ${cluster}` : '';
      console.log(`S ${S}, batch ${batch}${plan}: ${ms.toFixed(4)} ms, ${tokens_per_s.toFixed(0)} tok/s`);
      console.log(`  attention ${attention_layer_us.toFixed(1)} us a layer; all layers, alone:`);
      for (const [name, part] of Object.entries(parts)) console.log(`  ${name}: ${(1000 * part).toFixed(1)} us`);
    }
model.free();
if (values.out) writeFileSync(values.out, `${JSON.stringify(rows, null, 1)}\n`);
