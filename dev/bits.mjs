// The bits of results on this machine: hashes of sixteen operations with their gradients, and of training runs.
//
//   node dev/bits.mjs [--steps 25] [--threads N]
//
// Prints JSON: a hash for every operation, and the losses of the first steps of the quickstart with a hash of the weights
// after them. Two machines, compilers or instruction sets give the same bits where all of it is equal: CXX, TREFOIL_MARCH and
// TREFOIL_KERNELS choose how kernels are made (docs/explain/determinism.md). Needs `npm run build`.
import { createHash } from 'node:crypto';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import * as nn from '../dist/exports/nn.js';
import { openDevice, readConfig, train } from '../dist/index.js';

const { values: given } = parseArgs({
  options: { steps: { type: 'string', default: '25' }, threads: { type: 'string' } },
});
const device = openDevice('cpu', given.threads ? { threads: Number(given.threads) } : {});

const hashOf = (arrays) => {
  const hash = createHash('sha256');
  for (const { buffer, byteOffset, byteLength } of arrays) hash.update(new Uint8Array(buffer, byteOffset, byteLength));
  return hash.digest('hex').slice(0, 16);
};

let stream = 0;
const random = (shape, deviation = 1) => {
  const tensor = nn.Tensor.empty(device, shape);
  nn.fillNormal(tensor, { seed: 5, stream: stream++ }, deviation);
  return tensor;
};
const integers = (count, limit) => {
  const tensor = nn.Tensor.empty(device, [count], 'i32');
  nn.fillIntegers(tensor, { seed: 6, stream: stream++ }, limit);
  return tensor;
};

/** Hashes what `compute` returns and, for the first of it, the gradients of the inputs. */
function results(inputs, compute) {
  const tape = new nn.Tape(device);
  const watched = inputs.map((input) => tape.watch(tape.own(input)));
  const outputs = [compute(tape, ...watched)].flat();
  const read = outputs.map((tensor) => tensor.read().slice());
  const slope = random(outputs[0].shape);
  tape.backward(outputs[0], slope.read());
  slope.free();
  for (const input of watched) read.push(tape.gradient(input).read().slice());
  tape.end();
  return hashOf(read);
}

// Awkward sizes: no multiple of a vector, rows longer and shorter than one.
const lengths = [1, 77, 300];
const total = 378;
const heads = { q: [total, 4, 24], k: [total, 2, 24], v: [total, 2, 40] };
const sparse = { l: 16, d: 8, lSel: 32, nSel: 5, w: 24 };
const operations = {
  random: () => hashOf([random([1001]).read(), integers(1001, 50257).read()]),
  linear: () => results([random([37, 530]), random([45, 530])], (tape, x, w) => nn.linear(tape, x, w)),
  rmsnorm: () => results([random([50, 91]), random([91])], (tape, x, w) => nn.rmsnorm(tape, x, w)),
  softmax: () => results([random([50, 91], 4)], (tape, x) => nn.softmax(tape, x)),
  activation: () => results([random([50, 90], 5)], (tape, x) => nn.swiglu(tape, x)),
  pointwise: () => results([random([5000], 10)], (tape, x) => nn.log(tape, nn.exp(tape, x))),
  sum: () => results([random([50, 91])], (tape, x) => nn.sum(tape, x, 'rows')),
  embedding: () => {
    const ids = integers(500, 91);
    return results([random([91, 77])], (tape, table) => nn.embedding(tape, table, ids));
  },
  crossentropy: () => {
    const targets = integers(50, 203);
    return results([random([50, 203], 5)], (tape, x) => nn.crossEntropy(tape, x, targets));
  },
  rope: () => {
    const table = new nn.RotaryTable(device, { size: 24, theta: 10000 });
    const tokens = new nn.Sequences(device, lengths);
    return results([random(heads.q)], (tape, x) => nn.rotate(tape, x, tokens, { table, start: 100000 }));
  },
  gate: () => {
    const logits = random([total, 12], 3);
    return results([logits], (tape, x) => {
      const gates = nn.gate(tape, x, { kind: 'softmax', temperature: 0.7 });
      const { entropyMean, maxMean } = nn.gateStatistics(device, [gates]);
      return [gates, nn.Tensor.from(device, Float64Array.of(entropyMean ?? 0, maxMean ?? 0), [2], 'f64')];
    });
  },
  compress: () => {
    const tokens = new nn.Sequences(device, lengths);
    return results([random([total, 2, 24]), random([16, 2, 24])], (tape, x, w) =>
      nn.compressConv(tape, x, w, { tokens, l: 16, d: 8 }),
    );
  },
  dense: () => {
    const tokens = new nn.Sequences(device, lengths);
    return results([random(heads.q), random(heads.k), random(heads.v)], (tape, q, k, v) =>
      nn.denseAttention(tape, { q, k, v }, tokens),
    );
  },
  nsa: () => attention({}),
  scorer: () => attention({ scorerWeight: 0.3 }),
  optimizers: () => {
    const hashes = [nn.AdamW, nn.Muon].map((Optimizer) => {
      const weights = [new nn.Parameter(device, 'w', [45, 91], [45]), new nn.Parameter(device, 'b', [91])];
      for (const { value } of weights) nn.fillNormal(value, { seed: 7, stream: stream++ });
      const optimizer = new Optimizer(
        device,
        weights.map((parameter) => ({ parameter, weightDecay: 0.1 })),
      );
      const norms = [];
      for (let step = 0; step < 3; step++) {
        const tape = new nn.Tape(device);
        const x = tape.own(random([60, 91]));
        const y = nn.linear(tape, nn.rmsnorm(tape, x, weights[1].value), weights[0].value);
        tape.backward(nn.sum(tape, nn.mul(tape, y, y)));
        tape.end();
        norms.push(
          nn.gradientNorm(
            device,
            weights.map(({ gradient }) => gradient),
          ).norm,
        );
        optimizer.step({ learningRate: 0.01 });
      }
      return [hashOf(weights.map(({ value }) => value.read())), ...norms].join(' ');
    });
    return hashOf([new TextEncoder().encode(hashes.join(' '))]);
  },
};

function attention(options) {
  const tokens = new nn.Sequences(device, lengths);
  const compressed = tokens.compressed(sparse).total;
  const inputs = {
    q: random(heads.q),
    kCmp: random([compressed, 2, 24]),
    vCmp: random([compressed, 2, 40]),
    kSel: random(heads.k),
    vSel: random(heads.v),
    kWin: random(heads.k),
    vWin: random(heads.v),
    gates: random([total, 4, 3], 0.5),
  };
  const names = Object.keys(inputs);
  return results(Object.values(inputs), (tape, ...tensors) => {
    const all = Object.fromEntries(names.map((name, i) => [name, tensors[i]]));
    const { out, selected } = nn.nativeSparseAttention(tape, all, tokens, sparse, options);
    return [out, selected];
  });
}
/** Losses of the first steps of the quickstart, and a hash of the weights and moments after them. */
async function quickstart(steps) {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-bits-'));
  try {
    const run = { steps, eval_every: 0, save_every: 0, out_dir: join(folder, 'run') };
    const config = readConfig('quickstart', { train: run });
    const losses = [];
    const save = join(folder, 'model.safetensors');
    await train({ config, device, save, onStep: ({ loss }) => void losses.push(loss) });
    return { losses, weights: hashOf([readFileSync(save)]) };
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

const hashes = Object.fromEntries(Object.entries(operations).map(([name, run]) => [name, run()]));
const steps = Number(given.steps);
console.log(JSON.stringify({ hashes, ...(steps > 0 && { quickstart: await quickstart(steps) }) }, null, 1));
