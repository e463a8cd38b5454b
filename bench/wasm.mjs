// Kernels in WebAssembly beside native ones: CPU time of one thread, both in one process and in turns.
//
//   node bench/wasm.mjs [--rounds 7] [--steps 20] [--threads N]
//
// Prints the ratio of native time to the time in WebAssembly (1 is as fast) of GEMM, dense attention, sparse attention forward
// and backward, AdamW and steps of the quickstart. TREFOIL_MARCH=x86-64-v3 compares with AVX2. Needs `npm run build`.
// With --threads: time on the clock of one thread over that of N threads, for both; needs idle processors.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import * as nn from '../dist/exports/nn.js';
import { openDevice, readConfig, train } from '../dist/index.js';
import { median } from './markdown.mjs';

const { values } = parseArgs({
  options: {
    rounds: { type: 'string', default: '7' },
    steps: { type: 'string', default: '20' },
    threads: { type: 'string' },
  },
});
const [rounds, steps] = [Number(values.rounds), Number(values.steps)];

const WARM_UP_MS = 500;

const cpuMs = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
};

function open(kernels) {
  process.env.TREFOIL_KERNELS = kernels;
  return openDevice('cpu', { threads: 1 });
}

/** `clock` returns milliseconds. */
function subjects(device, clock) {
  const random = (shape, stream = 1) => {
    const tensor = nn.Tensor.empty(device, shape);
    nn.fillNormal(tensor, { seed: 1, stream });
    return tensor;
  };
  const onTape = (inputs, compute) => () => {
    const tape = new nn.Tape(device);
    const watched = inputs().map((input) => tape.watch(tape.own(input)));
    const result = compute(tape, ...watched);
    if (result) tape.backward(nn.sum(tape, result));
    tape.end();
  };
  const [x, w] = [random([256, 512]), random([1024, 512])];
  const tokens = new nn.Sequences(device, [512]);
  const long = new nn.Sequences(device, [1024]);
  const sparse = { l: 32, d: 16, lSel: 64, nSel: 8, w: 128 };
  const blocks = long.compressed(sparse).total;
  const heads = [1024, 4, 64];
  const keys = [1024, 1, 64];
  const parameter = new nn.Parameter(device, 'w', [2048, 512], [2048], random([2048, 512]));
  const adamw = new nn.AdamW(device, [{ parameter, weightDecay: 0.1 }]);
  const tape = new nn.Tape(device);
  tape.backward(nn.sum(tape, nn.mul(tape, parameter.value, parameter.value)));
  tape.end();
  return {
    'GEMM 256x512x1024': () => {
      const products = new nn.Tape(device);
      for (let i = 0; i < 10; i++) nn.linear(products, x, w);
      products.end();
    },
    'dense attention, forward': () => {
      const forward = new nn.Tape(device, { recording: false });
      const [q, k, v] = [1, 2, 3].map((stream) => forward.own(random([512, 4, 64], stream)));
      nn.denseAttention(forward, { q, k, v }, tokens);
      forward.end();
    },
    'sparse attention, forward and backward': onTape(
      () =>
        [heads, [blocks, 1, 64], [blocks, 1, 64], keys, keys, keys, keys, [1024, 4, 3]].map((shape) => random(shape)),
      (tape, q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates) =>
        nn.nativeSparseAttention(tape, { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates }, long, sparse).out,
    ),
    AdamW: () => {
      for (let i = 0; i < 5; i++) adamw.step({ learningRate: 1e-3, keepGradients: true });
    },
    [`quickstart, ${steps} steps`]: async () => {
      const folder = mkdtempSync(join(tmpdir(), 'trefoil-bench-'));
      const run = { steps, eval_every: 0, save_every: 0, out_dir: join(folder, 'run') };
      let begun = 0;
      let spent = 0;
      // From the second step on: the first one makes the samples.
      const onStep = ({ step }) => {
        if (step === 1) begun = clock();
        else spent = clock() - begun;
      };
      await train({ config: readConfig('quickstart', { train: run }), device, onStep });
      rmSync(folder, { recursive: true, force: true });
      return spent;
    },
  };
}

/** Prints the times of each subject on two devices, or with two numbers of threads, measured in turns, and their ratio. */
async function compare(sides, clock) {
  const all = new Map(sides.map(({ device }) => [device, subjects(device, clock)]));
  const call = async ({ device, threads }, subject) => {
    device.threads = threads;
    const begun = clock();
    const own = await all.get(device)[subject]();
    return own ?? clock() - begun;
  };
  for (const subject of Object.keys(all.get(sides[0].device))) {
    const times = [[], []];
    // V8 optimises a kernel in WebAssembly while it runs: after one call of some milliseconds it has not.
    for (const side of sides)
      for (const begun = performance.now(); performance.now() - begun < WARM_UP_MS; await setImmediate())
        await call(side, subject);
    for (let round = 0; round < rounds; round++)
      for (const which of round % 2 === 0 ? [0, 1] : [1, 0]) times[which].push(await call(sides[which], subject));
    const ratios = times[0].map((first, i) => first / times[1][i]).sort((x, y) => x - y);
    const [first, second] = sides.map(({ name }, which) => `${name} ${median(times[which]).toFixed(2)} ms`);
    const range = `${ratios[0].toFixed(2)} to ${ratios[ratios.length - 1].toFixed(2)}`;
    const best = (Math.min(...times[0]) / Math.min(...times[1])).toFixed(2);
    console.log(`${subject}: ${first}, ${second}, ratio ${median(ratios).toFixed(2)} (${range}; lowest times ${best})`);
  }
}

const [native, wasm] = [open('native'), open('wasm')];
console.log(`${native.kernelSource.name}; ${wasm.kernelSource.name}, Node ${process.versions.node}`);
if (values.threads) {
  const many = Number(values.threads);
  for (const [name, device] of Object.entries({ native, 'in WebAssembly': wasm })) {
    const one = { name: `${name}, 1 thread`, device, threads: 1 };
    await compare([one, { name: `${many} threads`, device, threads: many }], () => performance.now());
  }
} else {
  const sides = Object.entries({ native, WebAssembly: wasm }).map(([name, device]) => ({ name, device, threads: 1 }));
  await compare(sides, cpuMs);
}
process.exit(0);
