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
const { profileCudaStep } = await load('bench/train.js');
const { trainCases } = await load('bench/train-cases.js');

const MAX_LAUNCHES = 10_000;
const LOADED_RUNS = 4; // of three steps, about two seconds: the clock has settled
const REST_MS = 600;
const device = new CudaDevice();
const stamps = Tensor.empty(device, [3 * MAX_LAUNCHES], 'f64');
const code = device.compile(new URL('./step-clock.cu', import.meta.url));

/** Kernels that `work` launches, with the difference of the stamps around each. */
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

let [loaded, rested] = [[], []];
device.profile = (steps) => {
  for (let i = 0; i < LOADED_RUNS; i++) steps();
  loaded = summary(recorded(steps));
  Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, REST_MS);
  rested = summary(recorded(steps));
  return new Map();
};
const lengths = [Number(values['seq-len'])];
profileCudaStep(device, trainCases({ device: 'cuda', lengths, kernels: ['adaptive'], attention: 'nsa' }, {})[0]);

console.log('kernel, calls: us, thousand cycles and MHz under load | the same, begun after a rest');
const cells = ({ us, kcycles, mhz }) => `${us.toFixed(0)} ${kcycles.toFixed(0)} ${mhz.toFixed(0)}`;
for (const row of loaded.slice(0, 30))
  console.log(`${row.name}, ${row.calls}: ${cells(row)} | ${cells(rested.find(({ name }) => name === row.name))}`);
if (values.out) writeFileSync(values.out, `${JSON.stringify({ loaded, rested }, null, 1)}\n`);
