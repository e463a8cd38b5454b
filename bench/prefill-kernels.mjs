// Forward passes of the 125M shape with v1, v2 and adaptive in the selected branch, on one thread of the CPU.
//
//   node bench/prefill-kernels.mjs [--lengths 512,1024,2048] [--rounds 7] [--layers 2]
//
// CPU time of the process in milliseconds, median of the rounds; the kernels take turns, so that a busy machine slows all
// of them. `ratios` are those of v1 to v2 in each round, sorted. Needs `npm run build`.
import { parseArgs } from 'node:util';
import { caseShape, trainCases } from '../dist/bench/train-cases.js';
import { CpuDevice } from '../dist/device/cpu/cpu.js';
import { prefill } from '../dist/infer/decode.js';
import { DecodeCache } from '../dist/model/cache.js';
import { LanguageModel } from '../dist/model/language-model.js';

const KERNELS = ['v1', 'v2', 'adaptive'];
const option = (name) => ({ type: 'string', default: name });
const { values } = parseArgs({
  options: { lengths: option('512,1024,2048'), rounds: option('7'), layers: option('2') },
});

const [named] = trainCases({ config: 'base', attention: 'nsa' }, {});
const shape = { ...caseShape(named), nLayers: Number(values.layers) };
const device = new CpuDevice({ threads: 1 });
const model = new LanguageModel(device, shape, 1);
const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];

const rows = values.lengths.split(',').map((text) => {
  const S = Number(text);
  const cache = new DecodeCache(device, shape);
  const prompts = [Array.from({ length: S }, (_, i) => (i * 7919) % shape.vocabSize)];
  const run = (kernel) => {
    const sequence = cache.sequence();
    const before = process.cpuUsage();
    prefill(model, [sequence], prompts, null, { kernels: { kernel } });
    const { user, system } = process.cpuUsage(before);
    sequence.free();
    return (user + system) / 1000;
  };
  for (const kernel of KERNELS) run(kernel); // compiles
  const rounds = Array.from({ length: Number(values.rounds) }, () => KERNELS.map(run));
  const ms = KERNELS.map((kernel, i) => [kernel, Number(median(rounds.map((round) => round[i])).toFixed(1))]);
  const ratios = rounds.map(([v1, v2]) => Number((v1 / v2).toFixed(3))).sort((a, b) => a - b);
  return { S, ...Object.fromEntries(ms), ratios };
});
model.free();
console.log(JSON.stringify({ device: device.name, layers: shape.nLayers, rows }, null, 2));
