// When gradients are reduced and when the GPU computes, by the GPU's own clock: one training step of the 125m shape on
// several ranks, kernel by kernel; the same step with the same buckets sent after the backward pass, and in safe mode, whose
// buckets are of 1 MiB; and sums of every size by themselves. Needs `npm run build`. Every rank runs it, under any launcher:
//   torchrun --no-python --nproc-per-node 2 node dev/cuda/ranks-trace.mjs [--seq-len 2048] [--batch 4] [--bucket 16]
//     [--config base] [--most 155] [--out FOLDER]
// --most is the largest sum in MB. Rank 0 prints tables and writes trace.json and trace.svg.
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { loadConfig } from '../../dist/config/load.js';
import { parseConfig } from '../../dist/config/parse.js';
import { packBatch } from '../../dist/data/batch.js';
import { UniformSamples } from '../../dist/data/synthetic/uniform.js';
import { CudaDevice, gpuCount } from '../../dist/device/cuda/cuda.js';
import { chooseGpu } from '../../dist/device/cuda/gpu-choice.js';
import { LanguageModel } from '../../dist/model/language-model.js';
import { modelShape } from '../../dist/model/shape.js';
import { AdamW } from '../../dist/ops/adamw/op.js';
import { DataParallel } from '../../dist/train/data-parallel.js';
import { BatchUploader } from '../../dist/train/device-batch.js';
import { DeviceStepper } from '../../dist/train/device-stepper.js';
import { resolveRank } from '../../dist/train/ranks/identity.js';
import { openWorld } from '../../dist/train/ranks/world.js';

const { values } = parseArgs({
  options: {
    'seq-len': { type: 'string', default: '2048' },
    batch: { type: 'string', default: '4' },
    bucket: { type: 'string', default: '16' },
    config: { type: 'string', default: 'base' },
    most: { type: 'string', default: '155' },
    out: { type: 'string' },
  },
});

const identity = resolveRank(process.env);
const device = new CudaDevice({ index: chooseGpu(identity.localRank, gpuCount(), process.env) });
const world = await openWorld(identity, device, { timeoutSeconds: 120 });
const { config: base } = loadConfig({ env: {}, config: values.config });

const MIB = 2 ** 20;

/** Milliseconds of training steps, all of them and their median, and the timeline of one. */
function measure(overlap, bucketMib) {
  const config = parseConfig({
    ...base,
    data: { ...base.data, tokenizer: 'gpt2' },
    runtime: { ...base.runtime, precision: 'bf16', cuda_graph: false, aux_stats: false },
    train: {
      ...base.train,
      ...{ seq_len: Number(values['seq-len']), batch_size: Number(values.batch) },
    },
  });
  const model = new LanguageModel(device, modelShape(config, 50257), 1, 'bf16');
  const parallel = new DataParallel(device, world.collectives, model.parameters, {
    ...{ bucketBytes: bucketMib * MIB, overlap, wire: 'f32', zero: false },
  });
  const optimizer = new AdamW(
    device,
    parallel.trained.map((parameter) => ({ parameter, weightDecay: 0 })),
  );
  const uploader = new BatchUploader(device, config.nsa);
  const ranks = { exchange: parallel, agreement: world.agreement };
  const stepper = new DeviceStepper(device, { model, optimizer, uploader, config, ...ranks });
  const samples = new UniformSamples(50257, 1, 'train');
  const rows = Array.from({ length: Number(values.batch) }, (_, row) =>
    samples.locate(world.rank * Number(values.batch) + row),
  );
  const batches = [packBatch(samples, rows, { sequenceLength: Number(values['seq-len']), documentMask: false })];
  const targets = batches[0].targetCount * world.size;
  const step = () => {
    stepper.launch({ batches, targets, learningRate: 1e-4 });
    return stepper.read();
  };
  for (let i = 0; i < 3; i++) step();
  const times = Array.from({ length: 5 }, () => step().totalMs).sort((a, b) => a - b);
  world.together.wait();
  const timeline = device.timeline(() => {
    step();
  });
  stepper.free();
  uploader.free();
  optimizer.free();
  parallel.free();
  model.free();
  return { ms: times[2], times, buckets: parallel.bucketCount, timeline };
}

/** Milliseconds of a sum by its bytes, while nothing else runs: the median of five. */
function measureSums(most) {
  const sizes = [8, 65_536, 1e6, 2.4e6, 4.7e6, 9.4e6, 26e6, 155e6].filter((bytes) => bytes <= most);
  const memory = device.pool.take(most);
  const sums = sizes.map((bytes) => {
    const span = { address: memory.address, count: Math.floor(bytes / 4), dtype: 'f32' };
    const sum = () => {
      world.collectives.allReduce(span);
      world.collectives.join();
    };
    for (let i = 0; i < 2; i++) sum();
    device.synchronize();
    const ms = device.time(sum, 5).sort((a, b) => a - b)[2];
    return { bytes, ms, gbs: bytes / ms / 1e6 };
  });
  device.pool.give(memory);
  return sums;
}

/** Stretches of time in which something ran; what is closer than `gap` is one. */
function stretches(entries, gap = 0.02) {
  const merged = [];
  for (const { from, to } of [...entries].sort((a, b) => a.from - b.from)) {
    const last = merged.at(-1);
    if (last && from - last.to < gap) last.to = Math.max(last.to, to);
    else merged.push({ from, to });
  }
  return merged;
}

const length = (list) => list.reduce((sum, { from, to }) => sum + to - from, 0);
const common = (list, { from, to }) =>
  list.reduce((sum, other) => sum + Math.max(0, Math.min(to, other.to) - Math.max(from, other.from)), 0);

const bucketMib = Number(values.bucket);
const traced = measure(true, bucketMib);
const after = measure(false, bucketMib);
const safe = measure(false, Math.min(1, bucketMib));
const sums = measureSums(Number(values.most) * 1e6);
const reductions = traced.timeline.filter(({ isBeside }) => isBeside);
const compute = stretches(traced.timeline.filter(({ isBeside }) => !isBeside));
const gradientReductions = reductions.filter(({ name }) => !name.endsWith('f64'));
const busy = stretches(gradientReductions, 0);
const hidden = busy.reduce((sum, one) => sum + common(compute, one), 0);
const summary = {
  ranks: world.size,
  seq_len: Number(values['seq-len']),
  batch_per_rank: Number(values.batch),
  buckets: traced.buckets,
  step_ms_overlapped: traced.ms,
  step_ms_reduced_after: after.ms,
  step_ms_safe_mode: safe.ms,
  buckets_safe_mode: safe.buckets,
  steps_ms: { overlapped: traced.times, after: after.times, safe: safe.times },
  compute_ms: length(compute),
  reduction_ms: length(busy),
  reduction_ms_beside_compute: hidden,
};

if (world.isFirst) {
  console.log('  from ms     to ms   beside compute  collective');
  for (const one of gradientReductions.slice(0, 60)) {
    const share = (100 * common(compute, one)) / (one.to - one.from);
    console.log(
      `${one.from.toFixed(2).padStart(9)} ${one.to.toFixed(2).padStart(9)} ${share.toFixed(0).padStart(14)} %  ${one.name}`,
    );
  }
  console.log('      sum of     takes ms      GB/s');
  for (const { bytes, ms, gbs } of sums)
    console.log(`${String(bytes).padStart(12)} ${ms.toFixed(3).padStart(12)} ${gbs.toFixed(3).padStart(9)}`);
  console.log(JSON.stringify(summary));
  if (values.out) {
    mkdirSync(values.out, { recursive: true });
    writeFileSync(
      join(values.out, 'trace.json'),
      `${JSON.stringify({ summary, sums, compute, reductions }, null, 1)}\n`,
    );
    writeFileSync(join(values.out, 'trace.svg'), svg(compute, gradientReductions));
  }
}
world.together.wait();
world.close();

function svg(lanes, beside) {
  const [width, left] = [1000, 110];
  const end = Math.max(...[...lanes, ...beside].map(({ to }) => to));
  const x = (ms) => left + ((width - left - 10) * ms) / end;
  const row = (list, y, color) =>
    list
      .map(({ from, to }) => {
        const w = Math.max(0.5, x(to) - x(from));
        return `<rect x="${x(from).toFixed(1)}" y="${y}" width="${w.toFixed(1)}" height="26" fill="${color}" stroke="white" stroke-width="0.3"/>`;
      })
      .join('\n');
  const ticks = Array.from({ length: 6 }, (_, i) => (end * i) / 5)
    .map((ms) => `<text x="${x(ms).toFixed(1)}" y="92" text-anchor="middle">${ms.toFixed(0)} ms</text>`)
    .join('\n');
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="100" font-family="sans-serif" font-size="12">
<rect width="${width}" height="100" fill="white"/>
<text x="5" y="27">computation</text><text x="5" y="62">reductions</text>
${row(lanes, 10, '#4878a8')}
${row(beside, 45, '#d08030')}
${ticks}
</svg>
`;
}
