// Decoding after long contexts on this machine's CPU: Trefoil with dense and with sparse attention beside llama.cpp (dense, flash
// attention, keys in f16), all of the 135M shape in bf16. llama.cpp reads a prompt; Trefoil's cache is filled with random numbers.
//
//   npm run build
//   node bench/peers/cpu/inference.mjs --folder F --rounds 0     # makes the files
//   node bench/peers/cpu/context.mjs --folder F [--lengths 1024,8192,32768] [--rounds 3] [--threads 1]
//
// A figure is milliseconds of processor time a token, the least of the rounds: one process decodes at all lengths, the programs
// in turns, but llama.cpp, whose prompt of 32,768 tokens takes minutes, once with `--rounds` decodings at each length.
import { spawnSync } from 'node:child_process';
import { openSync } from 'node:fs';
import { createRequire } from 'node:module';
import { join, resolve } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';
import { cpuSeconds } from './inference-task.mjs';

const TOKENS = 16; // a compressed block
const WARM_UPS = 2 * TOKENS + 1; // steps are recorded when their sizes come again
const { values: options } = parseArgs({
  options: {
    folder: { type: 'string' },
    lengths: { type: 'string', default: '1024,8192,32768' },
    rounds: { type: 'string', default: '3' },
    threads: { type: 'string', default: '1' },
    only: { type: 'string' },
  },
});
if (!options.folder) throw new Error('--folder: give the folder that inference.mjs filled');
const folder = resolve(options.folder);
const lengths = options.lengths.split(',').map(Number);
const rounds = Number(options.rounds);
const threads = Number(options.threads);
const capacity = Math.max(...lengths) + (TOKENS * rounds + WARM_UPS) * lengths.length + 64;

/** Seconds for each of TOKENS tokens, the least of the rounds. */
async function least(decode) {
  await decode(WARM_UPS);
  let best = Number.POSITIVE_INFINITY;
  for (let round = 0; round < rounds; round++) {
    const before = cpuSeconds();
    await decode(TOKENS);
    best = Math.min(best, (cpuSeconds() - before) / TOKENS);
  }
  return best;
}

async function llama() {
  const path = createRequire(join(folder, 'llama', 'x')).resolve('node-llama-cpp');
  const { getLlama, LlamaLogLevel } = await import(pathToFileURL(path).href);
  const program = await getLlama({ gpu: false, build: 'never', maxThreads: threads, logLevel: LlamaLogLevel.error });
  const model = await program.loadModel({ modelPath: join(folder, 'bf16.gguf'), useMmap: true });
  const context = await model.createContext({
    ...{ contextSize: capacity, batchSize: 512, sequences: 1, threads, flashAttention: true },
  });
  const sequence = context.getSequence();
  const ms = [];
  for (const length of lengths) {
    const missing = length - sequence.nextTokenIndex - 1;
    await sequence.evaluateWithoutGeneratingNewTokens(
      Array.from({ length: missing }, (_, i) => 300 + ((i * 7919) % 30_000)),
    );
    const decode = async (count) => {
      let left = count;
      for await (const _ of sequence.evaluate([300], { temperature: 0, yieldEogToken: true })) {
        left -= 1;
        if (left === 0) break;
      }
    };
    ms.push(1000 * (await least(decode)));
    console.error(`${length} tokens: ${ms.at(-1).toFixed(2)} ms`);
  }
  await program.dispose();
  return ms;
}

async function trefoil(attention) {
  const from = (path) => import(new URL(`../../../dist/${path}`, import.meta.url).href);
  const [{ openDevice }, { DecodeCache }, { LanguageModel }, { modelShape }, { PackedMatrix }, { Tensor }] =
    await Promise.all(
      ['device/open.js', 'model/cache.js', 'model/language-model.js', 'model/shape.js', 'ops/linear/packed.js']
        .map(from)
        .concat(from('tensor/tensor.js')),
    );
  const { RecordedSteps } = await from('infer/recorded-steps.js');
  const { readTokens } = await from('infer/decode.js');
  const { fillCache } = await from('bench/decode-setup.js');
  const { parseConfig } = await from('config/parse.js');
  const device = openDevice('cpu', { threads });
  const descriptor = openSync(join(folder, 'bf16', 'model.safetensors'), 'r');
  const config = parseConfig({
    ...{
      model: { dim: 576, n_layers: 30, n_heads: 9, n_kv_groups: 3, d_k: 64, d_v: 64, mlp: 'swiglu', mlp_hidden: 1536 },
    },
    ...{ nsa: {}, train: {}, data: {} },
  });
  const shape = { ...modelShape(config, 49_152), attention, tieEmbeddings: true };
  // Matrices are numbers from anywhere in the file.
  const read = (name, sizes) => {
    if (sizes.length === 2) {
      const matrix = new PackedMatrix(device, sizes, 'bf16');
      matrix.readRows([{ descriptor, offset: 2 ** 16, rows: sizes[0] }], 'bf16');
      return matrix;
    }
    const value = Tensor.empty(device, sizes);
    value.fill(name.includes('norm') ? 1 : 0.03);
    return value;
  };
  const model = new LanguageModel(device, shape, { read, free() {} });
  const steps = RecordedSteps.of(model);
  const ms = [];
  for (const length of lengths) {
    const cache = new DecodeCache(device, shape);
    const sequence = cache.sequence();
    fillCache(cache, [sequence], length - 1);
    const read = (i) => steps.read([sequence], [300 + i]) ?? readTokens(model, [sequence], [[300 + i]]);
    const decode = (count) => {
      for (let i = 0; i < count; i++) read(i);
    };
    ms.push(1000 * (await least(decode)));
    console.error(`${length} tokens: ${ms.at(-1).toFixed(2)} ms`);
    sequence.free();
  }
  return ms;
}

const PEERS = { llama, dense: () => trefoil('dense'), sparse: () => trefoil('nsa') };
if (options.only) {
  console.log(JSON.stringify(await PEERS[options.only]()));
  process.exit(0);
}
const results = Object.keys(PEERS).map((name) => {
  const words = [fileURLToPath(import.meta.url), '--only', name, ...process.argv.slice(2)];
  const { status, stdout, stderr } = spawnSync(process.execPath, words, { encoding: 'utf8' });
  if (status !== 0) throw new Error(`${name}: ${stderr}`);
  return JSON.parse(stdout.trim().split('\n').at(-1));
});
console.log('| tokens | llama.cpp ms | dense ms | ratio | sparse ms | ratio |\n|---|---|---|---|---|---|');
lengths.forEach((length, i) => {
  const [theirs, dense, sparse] = results.map((ms) => ms[i]);
  const cells = [length, theirs.toFixed(1), dense.toFixed(1), (theirs / dense).toFixed(2), sparse.toFixed(1)];
  console.log(`| ${[...cells, (theirs / sparse).toFixed(2)].join(' | ')} |`);
});
