// The equations of `trefoil plan` against measured runs: what they predict for several ranks from the step of one, beside
// what was measured.
//
//   node bench/plan-check.mjs bench/results/ranks-*.json [--json]
//
// Needs `npm run build`. A file holds the runs of one model on one machine:
//
//   { "machine": "…", "device": "cpu" | "cuda",
//     "config": "base", "set": { "data.tokenizer": "gpt2" },     the model, as train takes it
//     "seq_len": 256, "batch_size": 4, "accumulate_grad_batches": 1,   of one rank
//     "link_gbs": 3.1, "latency_us": 40,     measured between two ranks: bus bandwidth of a large sum, time of a small one
//     "rows": [ { "ranks": 1, "ms_step": 140.2 },     the computing that the others are predicted from
//               { "ranks": 2, "ms_step": 300.1, "exposed_ms": 12.0,
//                 "wire": "f32", "zero1": false, "overlap": true, "bucket_mib": 16, "share": 2 } ] }
//
// `share` is how many ranks compute on one device at the same time: each has that part of its speed. In the first row it
// says that what was measured is a rank's computing beside another's. Left out: what the example shows, and 1 for `share`. A row may have a batch_size of its own, when the global batch is what stays the same; the rate of the
// one rank then holds for it too.
import { readFileSync } from 'node:fs';
import { parseArgs } from 'node:util';
import { parseTrainFlags } from '../dist/config/flags.js';
import { loadConfig } from '../dist/config/load.js';
import { createTokenizer } from '../dist/data/tokenizer.js';
import { trainingFlops } from '../dist/model/flops.js';
import { parameterCount } from '../dist/model/memory.js';
import { modelShape } from '../dist/model/shape.js';
import { speedOf } from '../dist/plan/measured.js';
import { computeOf, stepOn } from '../dist/plan/step.js';

const MIB = 2 ** 20;
const { positionals, values } = parseArgs({ allowPositionals: true, options: { json: { type: 'boolean' } } });
if (positionals.length === 0) {
  console.error('usage: node bench/plan-check.mjs FILE... [--json]');
  process.exit(2);
}

/** Every part of the computation `share` times as long. */
function shared(compute, share) {
  return {
    ...compute,
    forward: compute.forward * share,
    backward: compute.backward.map((part) => ({ ...part, seconds: part.seconds * share })),
    update: compute.update * share,
  };
}

function caseOf(file, row) {
  const { seq_len, batch_size, accumulate_grad_batches = 1 } = { ...file, ...row };
  const words = Object.entries(file.set ?? {}).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
  const sizes = ['--seq-len', seq_len, '--batch-size', batch_size, '--accum-batches', accumulate_grad_batches];
  const { layer } = parseTrainFlags([...words, ...sizes.map(String)]);
  const { config } = loadConfig({ env: {}, flags: layer, config: file.config });
  const vocabulary =
    config.model.vocab_size ?? config.data.vocab_size ?? createTokenizer(config.data.tokenizer).vocabSize;
  return { shape: modelShape(config, vocabulary), config };
}

/** The rate that makes the prediction for one rank the measured step of one rank. */
function speedFrom(file) {
  const one = file.rows.find(({ ranks }) => ranks === 1);
  if (!one) throw new Error('no row with one rank: nothing to predict from');
  const { shape, config } = caseOf(file, one);
  const { seq_len, batch_size, accumulate_grad_batches } = config.train;
  const { used } = trainingFlops(shape, new Array(batch_size).fill(seq_len));
  const flops = used * accumulate_grad_batches;
  const ms = one.ms_step / (one.share ?? 1);
  const row = {
    config: file.config,
    attention: shape.attention,
    S: seq_len,
    batch: batch_size,
    ms_step: ms,
    mfu: flops / (ms * 1e6),
    params: parameterCount(shape),
    layers: shape.nLayers, // of a peak of 1 GFLOP/s
  };
  return speedOf({ machine: file.machine, device: file.device, peak_gflops: 1, rows: [row] });
}

function check(file) {
  const speed = speedFrom(file);
  // Two ranks and no other: every hop is the measured one. A small sum of two ranks is a start and two hops.
  const network = {
    perNode: 1,
    nodeBandwidth: file.link_gbs * 1e9,
    linkBandwidth: file.link_gbs * 1e9,
    nodeLatency: 0,
    linkLatency: 0,
    startLatency: (file.latency_us ?? 0) * 1e-6,
  };
  return file.rows.map((row) => {
    const { ranks, wire = 'f32', zero1 = false, overlap = true, bucket_mib = 16, share = 1 } = row;
    const compute = shared(computeOf(caseOf(file, row), speed), share);
    const step = stepOn(compute, ranks, { network, wire, zero1, overlap, bucketBytes: bucket_mib * MIB });
    const predicted = 1e3 * step.total;
    return {
      ranks,
      wire,
      zero1,
      overlap,
      share,
      predicted_ms: predicted,
      measured_ms: row.ms_step,
      ratio: row.ms_step / predicted,
      predicted_exposed_ms: 1e3 * step.exposed,
      measured_exposed_ms: row.exposed_ms ?? null,
    };
  });
}

const results = positionals.map((path) => {
  const file = JSON.parse(readFileSync(path, 'utf8'));
  return { file: path, machine: file.machine, rows: check(file) };
});
if (values.json) console.log(JSON.stringify(results, null, 2));
else
  for (const { file, machine, rows } of results) {
    console.log(`${file}: ${machine}`);
    for (const row of rows) {
      const how = [
        row.wire,
        row.zero1 ? 'ZeRO-1' : '',
        row.overlap ? '' : 'no overlap',
        row.share > 1 ? `${row.share} share a device` : '',
      ];
      const exposed = row.measured_exposed_ms === null ? '' : `, measured ${row.measured_exposed_ms.toFixed(1)}`;
      console.log(
        `  ${row.ranks} ranks (${how.filter(Boolean).join(', ')}): predicted ${row.predicted_ms.toFixed(1)} ms, ` +
          `measured ${row.measured_ms.toFixed(1)} ms, ratio ${row.ratio.toFixed(3)}; ` +
          `exposed ${row.predicted_exposed_ms.toFixed(1)} ms${exposed}`,
      );
    }
  }
