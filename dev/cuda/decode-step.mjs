// A decode step of the 125m shape on one GPU: milliseconds of a token end to end (`ms`: the host waits for it before it
// launches the next step; `ahead_ms`: it launches the next one first), of the step on the device alone (`device_ms`), of
// a layer's attention, of its parts alone, and of every kind of kernel launched by itself. Needs `npm run build`.
//   node dev/cuda/decode-step.mjs [--lengths 4096,65536] [--batches 1,32] [--runs 40] [--out FILE]
//     [--clusters 2,4]     also measure clusters of these sizes
//     [--spread on|off]    the compressed branch over the whole GPU, or not (default: by the context)
//     [--dist FOLDER]      another build than dist/, to compare two
//     [--brief]            whole steps and attention only
//   node dev/cuda/decode-step.mjs --once --batches 1 --lengths 65536      one step, for a profiler
import { writeFileSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const { values } = parseArgs({
  options: {
    lengths: { type: 'string', default: '4096,65536' },
    batches: { type: 'string', default: '1,32' },
    runs: { type: 'string', default: '40' },
    clusters: { type: 'string' },
    spread: { type: 'string' },
    once: { type: 'boolean', default: false },
    out: { type: 'string' },
    dist: { type: 'string' },
    brief: { type: 'boolean', default: false },
  },
});
const dist = resolve(values.dist ?? join(dirname(fileURLToPath(import.meta.url)), '..', '..', 'dist'));
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
const [named] = trainCases({ config: '125m_80g', attention: 'nsa' }, {});
const shape = caseShape(named);
const model = new LanguageModel(device, shape, 1, 'bf16');
/** Whole steps of a replayed graph need pages for the tokens they append. */
const STEPS_AHEAD = 4 * runs + 16;
const { compressed, selection, selected, window } = STEP_PARTS;
const PARTS = {
  ...(values.brief
    ? {}
    : {
        'merges alone': 0,
        compressed,
        'compressed and selection': compressed | selection,
        selected,
        window,
      }),
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

/** The median of the host's time of a step [ms]. */
function timeSteps(step) {
  for (let i = 0; i < 3; i++) step();
  const times = [];
  for (let i = 0; i < runs; i++) {
    const from = performance.now();
    step();
    times.push(performance.now() - from);
  }
  return median(times);
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
    for (const sequence of sequences) cache.reserve(sequence, STEPS_AHEAD);
    const ms = timeSteps(next);
    decoder.launch(sequences);
    let tokens = decoder.nextLater();
    const aheadMs = timeSteps(() => {
      decoder.launch(sequences);
      const following = decoder.nextLater();
      tokens();
      tokens = following;
    });
    tokens();
    const step = decoder.prepare(sequences);
    const parts = {};
    for (const [name, mask] of Object.entries(PARTS)) parts[name] = timeGraph(() => step.launchAttention(mask));
    const deviceMs = timeGraph(() => step.launch());
    if (!values.brief)
      for (const [name, { ms: sum, calls }] of device.profile(() => step.launch())) parts[`${name} x${calls}`] = sum;
    return {
      ...{ S, batch, cluster, ms, tokens_per_s: (1000 * batch) / ms, ahead_ms: aheadMs, device_ms: deviceMs },
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
      const { ms, tokens_per_s, ahead_ms, device_ms, attention_layer_us, parts } = row;
      const plan = cluster ? `, clusters of ${cluster}` : '';
      console.log(`S ${S}, batch ${batch}${plan}: ${ms.toFixed(4)} ms, ${tokens_per_s.toFixed(0)} tok/s`);
      const ahead = `${ahead_ms.toFixed(4)} ms, ${((1000 * batch) / ahead_ms).toFixed(0)} tok/s`;
      console.log(`  next step launched ahead ${ahead}; on the device ${device_ms.toFixed(4)} ms`);
      console.log(`  attention ${attention_layer_us.toFixed(1)} us a layer; all layers, alone:`);
      for (const [name, part] of Object.entries(parts)) console.log(`  ${name}: ${(1000 * part).toFixed(1)} us`);
    }
model.free();
if (values.out) writeFileSync(values.out, `${JSON.stringify(rows, null, 1)}\n`);
