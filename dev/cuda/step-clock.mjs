// Cycles, microseconds and the multiprocessors' clock of every kernel of a training step, under load and after a rest: tells
// a kernel that does more work from one that runs at a lower clock. Needs `npm run build` and a GPU.
//   node dev/cuda/step-clock.mjs [--seq-len 8192] [--out FILE]
import { writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const dist = join(dirname(fileURLToPath(import.meta.url)), '..', '..', 'dist');
const { values } = parseArgs({ options: { 'seq-len': { type: 'string', default: '8192' }, out: { type: 'string' } } });
const load = (path) => import(join(dist, path));
const { CudaDevice } = await load('device/cuda/cuda.js');
const { Tensor } = await load('tensor/tensor.js');
const { caseShape, trainCases } = await load('bench/train-cases.js');
const { LanguageModel } = await load('model/language-model.js');
const { AdamW } = await load('ops/adamw/op.js');
const { BatchUploader } = await load('train/batches.js');
const { createStepper } = await load('train/stepper.js');
const { SyntheticSamples } = await load('data/synthetic.js');
const { packBatch } = await load('data/batch.js');

const MOST_LAUNCHES = 10_000;
const LOADED_STEPS = 14; // two seconds: the clock has settled
const device = new CudaDevice();
const stamps = Tensor.empty(device, [3 * MOST_LAUNCHES], 'f64');
const code = device.compile(new URL('./step-clock.cu', import.meta.url));

/** Kernels of `work` with the difference of the stamps around each. */
function recorded(work) {
  const names = [];
  const plain = device.marked.bind(device);
  let isStamping = false;
  const stamp = () => {
    isStamping = true;
    code.launch('stamp', { grid: 1, block: 1 }, stamps, names.length);
    isStamping = false;
  };
  device.marked = (name, stream, launch) => {
    if (isStamping) return plain(name, stream, launch);
    stamp();
    names.push(typeof name === 'string' ? name : name());
    launch();
  };
  try {
    work();
    stamp();
    device.synchronize();
  } finally {
    delete device.marked;
  }
  const bytes = new Uint8Array(24 * (names.length + 1));
  device.download(stamps.pointer, bytes);
  const words = new BigUint64Array(bytes.buffer);
  return names.map((name, i) => {
    if (words[3 * i + 2] !== words[3 * i + 5]) throw new Error('stamps of two multiprocessors cannot be compared');
    const [cycles, ns] = [0, 1].map((k) => Number(words[3 * i + 3 + k] - words[3 * i + k]));
    return { name, cycles, us: ns / 1000, mhz: (1000 * cycles) / ns };
  });
}

const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];
function summary(launches) {
  return [...new Set(launches.map(({ name }) => name))]
    .map((name) => {
      const own = launches.filter((launch) => launch.name === name);
      const of = (key) => median(own.map((launch) => launch[key]));
      return { name, calls: own.length, us: of('us'), kcycles: of('cycles') / 1000, mhz: of('mhz') };
    })
    .sort((a, b) => b.calls * b.us - a.calls * a.us);
}

const length = Number(values['seq-len']);
const [{ config }] = trainCases({ device: 'cuda', lengths: [length], kernels: ['adaptive'], attention: 'nsa' }, {});
const eager = { ...config, runtime: { ...config.runtime, cuda_graph: false } };
const shape = caseShape({ config });
const model = new LanguageModel(device, shape, 1, 'bf16');
const trained = model.parameters.map((parameter) => ({ parameter, weightDecay: 0.1 }));
const optimizer = new AdamW(device, trained, { betas: config.train.betas, epsilon: config.train.eps });
const stepper = createStepper({ model, optimizer, uploader: new BatchUploader(device, config.nsa), config: eager });
const samples = new SyntheticSamples(shape.vocab_size, 1, 'train');
const rows = Array.from({ length: config.train.batch_size }, (_, i) => samples.locate(i));
const batches = [packBatch(samples, rows, { sequenceLength: length, documentMask: false })];
const step = () => stepper.step({ batches, learningRate: 1e-5, accept: () => true });

for (let i = 0; i < LOADED_STEPS; i++) step();
const loaded = summary(recorded(step));
device.synchronize();
Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 600);
const rested = summary(recorded(step));
console.log('kernel, calls: us, thousand cycles and MHz under load | after a rest');
for (const { name, calls, us, kcycles, mhz } of loaded.slice(0, 30)) {
  const other = rested.find((row) => row.name === name);
  const cells = (row) => `${row.us.toFixed(0)} ${row.kcycles.toFixed(0)} ${row.mhz.toFixed(0)}`;
  console.log(`${name}, ${calls}: ${cells({ us, kcycles, mhz })} | ${other ? cells(other) : ''}`);
}
if (values.out) writeFileSync(values.out, `${JSON.stringify({ loaded, rested }, null, 1)}\n`);
process.exit(0);
