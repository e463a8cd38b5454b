/**
 * Every CUDA source compiles, with the macros that a training really asks for: a model is run on a device that launches
 * nothing and lists what it was asked to compile. Needs a compiler, no GPU.
 */
import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { afterAll, describe, expect, it } from 'vitest';
import { configSchema } from '../src/config/schema.js';
import { CudaCompiler, findBackend, type KernelRequest, Nvcc } from '../src/device/cuda/compile.js';
import { ListingCuda } from '../src/device/cuda/listing.js';
import { prefill } from '../src/infer/decode.js';
import { DecodeCache } from '../src/model/cache.js';
import { DecodeStep, decodeStepContext, decodeStepRefusal } from '../src/model/decode-step.js';
import { LanguageModel } from '../src/model/language-model.js';
import { type ModelShape, modelShape } from '../src/model/shape.js';
import { AdamW } from '../src/ops/adamw/op.js';
import type { SparseOptions } from '../src/ops/attention/nsa.js';
import { checksums } from '../src/ops/checksum/op.js';
import { GradientNorms } from '../src/ops/gradnorm/op.js';
import { Muon } from '../src/ops/muon/op.js';
import { exp, log, mul, scale } from '../src/ops/pointwise/op.js';
import { SETTINGS } from '../src/ops/sample/op.js';
import { slice } from '../src/ops/slice/op.js';
import { softmax } from '../src/ops/softmax/op.js';
import { mean, sum } from '../src/ops/sum/op.js';
import { STEP_SCALARS } from '../src/tensor/optimizer.js';
import { Tape } from '../src/tensor/tape.js';
import { Tensor } from '../src/tensor/tensor.js';
import { cudaCompilerAbsence } from '../src/testing/devices.js';

const listing = (architecture = 90) => new ListingCuda({ architecture, multiprocessors: 132 });

type Section = Record<string, unknown>;

function shapeOf(model: Section, nsa: Section = {}): ModelShape {
  const sizes = { dim: 128, n_layers: 1, n_heads: 12, n_kv_groups: 2, d_k: 64, d_v: 64, mlp_ratio: 2 };
  return modelShape(configSchema.parse({ model: { ...sizes, ...model }, nsa }), 256);
}

/** With `train.scorer_loss`: what makes a sparse model use its context. */
const RECIPE: Section = { rope: 'window', cmp_rope: 'none' };

/** Everything a step compiles. */
function wantedBy(
  shape: ModelShape,
  dtype: 'f32' | 'bf16',
  kernels: SparseOptions,
  architecture?: number,
): readonly KernelRequest[] {
  const device = listing(architecture);
  const model = new LanguageModel(device, shape, 1, dtype);
  const trained = model.parameters.map((parameter) => ({ parameter, weightDecay: 0 }));
  const optimizers = [new AdamW(device, trained), new Muon(device, trained, { dtype })];
  const lengths = [300, 7];
  const [ids, targets] = [0, 1].map(() => Tensor.zeros(device, [307], 'i32'));
  const tape = new Tape(device);
  tape.backward(model.loss(tape, ids, targets, { lengths, kernels }));
  tape.end();
  model.losses(ids, targets, { lengths, kernels });
  const gradients = model.parameters.flatMap(({ gradient }) => (gradient ? [gradient] : []));
  for (const optimizer of optimizers) {
    optimizer.stepOnDevice(Tensor.zeros(device, [STEP_SCALARS]), new GradientNorms(device).launch(gradients));
    optimizer.step({ learningRate: 1e-3, keepGradients: true });
  }
  return device.requests;
}

/** Everything that reading a prompt in tiles and decoding compile. */
function wantedToDecode(
  shape: ModelShape,
  dtype: 'f32' | 'bf16',
  batch: number,
  architecture?: number,
): readonly KernelRequest[] {
  const device = listing(architecture);
  const model = new LanguageModel(device, shape, 1, dtype);
  const cache = new DecodeCache(device, shape, dtype);
  const sequences = Array.from({ length: batch }, () => cache.sequence());
  const prompts = sequences.map(() => Array.from({ length: 70 }, (_, i) => i));
  prefill(model, sequences, prompts, 50);
  // Scores in shared memory, and where they do not fit.
  if (decodeStepRefusal(model) === null)
    for (const context of [8192, Math.min(2 ** 20, decodeStepContext(model, batch))]) {
      const step = new DecodeStep(model, cache, batch, { context });
      step.launch();
      step.sample(new Float64Array(batch * SETTINGS));
    }
  checksums(device, [Tensor.zeros(device, [10])]); // of files of cached prefixes
  return device.requests;
}

describe('CUDA sources', () => {
  const missing = cudaCompilerAbsence();
  const cache = mkdtempSync(join(tmpdir(), 'trefoil-sources-'));
  afterAll(() => rmSync(cache, { recursive: true, force: true }));

  const CASES: readonly [string, ModelShape, 'f32' | 'bf16', SparseOptions][] = [
    ['the 125m shape in bf16', shapeOf({}), 'bf16', {}],
    ['query-major', shapeOf({}), 'bf16', { kernel: 'v1' }],
    ['mma.sync', shapeOf({}), 'bf16', { mmaSync: true }],
    ['fp32', shapeOf({}), 'f32', {}],
    ['branch kernels in bf16', shapeOf({}), 'bf16', { fusedFrom: Number.POSITIVE_INFINITY }],
    ['the scorer loss in bf16', shapeOf({}), 'bf16', { scorerWeight: 0.1 }],
    ['the recipe for context', shapeOf({}, RECIPE), 'bf16', { scorerWeight: 0.1 }],
    ['its branch kernels', shapeOf({}, RECIPE), 'bf16', { scorerWeight: 0.1, fusedFrom: Number.POSITIVE_INFINITY }],
    ['the scorer loss in fp32', shapeOf({}), 'f32', { scorerWeight: 0.1 }],
    ['dense, SwiGLU', shapeOf({ attention: 'dense', mlp: 'swiglu' }), 'bf16', {}],
    ['window layers', shapeOf({ n_layers: 2, layer_pattern: ['nsa', 'window'] }), 'bf16', {}],
    ['conv', shapeOf({}, { phi: 'conv' }), 'bf16', { fusedFrom: Number.POSITIVE_INFINITY }],
    ['mlp, tied', shapeOf({ tie_embeddings: true }, { phi: 'mlp' }), 'f32', {}],
  ];

  const compileAll = async (wanted: readonly KernelRequest[], isFirst: boolean, architecture = 90) => {
    if (missing) return; // said once, below
    const backend = findBackend();
    if (backend instanceof Nvcc && !isFirst && !process.env['TREFOIL_LONG']) return; // said below
    const compiler = new CudaCompiler(architecture, backend, { cache });
    for (const { source, macros } of wanted) {
      expect(Buffer.from(compiler.cubin(source, macros).subarray(1, 4)).toString(), source).toBe('ELF');
      await setImmediate(); // a compilation blocks the thread, and the test runner wants to hear of it
    }
  };

  it.each(CASES)('of %s compile for Hopper', async (name, shape, dtype, kernels) => {
    const wanted = wantedBy(shape, dtype, kernels);
    expect(wanted.length).toBeGreaterThan(10);
    await compileAll(wanted, name === CASES[0][0]);
  });

  // Hopper is above; the others share its sources but not its instructions.
  it.each([80, 89, 100, 120])('of a training step compile for compute capability %i / 10', async (architecture) => {
    if (!process.env['TREFOIL_LONG']) return; // said below
    await compileAll(wantedBy(shapeOf({}), 'bf16', {}, architecture), false, architecture);
    for (const positions of [{}, RECIPE])
      await compileAll(wantedToDecode(shapeOf({}, positions), 'bf16', 2, architecture), false, architecture);
    await compileAll(wantedBy(shapeOf({}, RECIPE), 'bf16', { scorerWeight: 0.1 }, architecture), false, architecture);
  });

  const DECODE: readonly [string, ModelShape, 'f32' | 'bf16', number, number][] = [
    ['one sequence', shapeOf({}), 'bf16', 1, 4],
    ['one sequence, positions in the window alone', shapeOf({}, RECIPE), 'bf16', 1, 4],
    ['one sequence, SwiGLU', shapeOf({ mlp: 'swiglu' }), 'bf16', 1, 4],
    ['20 sequences, SwiGLU', shapeOf({ mlp: 'swiglu' }), 'bf16', 20, 4],
    ['33 sequences, SwiGLU, conv', shapeOf({ mlp: 'swiglu' }, { phi: 'conv' }), 'bf16', 33, 4],
    ['a dense model', shapeOf({ attention: 'dense' }), 'bf16', 2, 3],
    ['fp32', shapeOf({}), 'f32', 2, 0],
  ];
  it.each(DECODE)('of decoding %s compile for Hopper', async (_, shape, dtype, batch, fused) => {
    const wanted = wantedToDecode(shape, dtype, batch);
    const step = wanted.filter(({ source }) => source.includes('/attention/decode/step/'));
    expect(new Set(step.map(({ source }) => source)).size).toBe(fused);
    await compileAll(wanted, false);
  });

  it('of the operations for experiments compile for Hopper', async () => {
    const device = listing();
    for (const dtype of ['f32', 'bf16'] as const) {
      const tape = new Tape(device);
      const x = tape.watch(tape.zeros([4, 8], dtype));
      const y = slice(tape, softmax(tape, log(tape, exp(tape, scale(tape, mul(tape, x, x), 2)))), 1, 0, 4);
      tape.backward([sum(tape, y), mean(tape, y, 'last')], [1, 1]);
      tape.end();
    }
    expect(device.requests).toHaveLength(9); // four sources by dtype, and the partial sums of bf16 in f32
    await compileAll(device.requests, true);
  });

  // GPUs without FP8 instructions compile the loss too, and its header with them.
  it.each([90, 80, 89, 100, 120])('of FP8 products compile for compute capability %i / 10', async (architecture) => {
    const source = (path: string) => fileURLToPath(new URL(`../src/ops/${path}`, import.meta.url));
    const codes = { DTYPE: 'bf16', DTYPE_INTO: 'bf16', CODES_OF_LOGITS: 1 };
    const wanted: KernelRequest[] = [
      { source: source('linear/fp8.cu'), macros: { SOURCE: 'Plain' } },
      { source: source('linear/fp8.cu'), macros: { SOURCE: 'SiluGradient' } },
      { source: source('rmsnorm/fp8.cu'), macros: { VECTORS: 3, ROWS: 64 } },
      { source: source('crossentropy/cuda.cu'), macros: codes },
    ];
    await compileAll(wanted, architecture === 90 || architecture === 80, architecture);
  });

  it('were all really compiled', (context) => {
    if (missing) context.skip(missing);
    if (!process.env['TREFOIL_LONG']) context.skip('a training step for Hopper only: TREFOIL_LONG=1 compiles for all');
    if (findBackend() instanceof Nvcc && !process.env['TREFOIL_LONG'])
      context.skip(
        'only the first case: nvcc is slow without NVRTC (pip install nvidia-cuda-nvrtc, or TREFOIL_LONG=1)',
      );
  });
});

it('the scorer loss has kernels of its own where a forced branch closes the gate of the compressed branch', () => {
  const wanted = (nsa: Section) =>
    wantedBy(shapeOf({}, nsa), 'bf16', { scorerWeight: 0.1 }).filter(({ source }) => source.includes('scorer'));
  const names = (nsa: Section) => wanted(nsa).map(({ source }) => source.split('/').slice(-2).join('/'));
  expect(names({})).toContain('fused/scorer.cu');
  expect(names({ force_branch: 'sel' })).toEqual(['scorer-loss/cuda.cu']);
});

describe('scripts of dev/cuda', () => {
  const folder = new URL('../dev/cuda/', import.meta.url);
  const scripts = readdirSync(folder).filter((name) => name.endsWith('.mjs'));

  it.each(scripts)('%s: loads names that exist', async (script) => {
    const text = readFileSync(new URL(script, folder), 'utf8');
    const loads = [...text.matchAll(/const \{ ([\w, ]+) \} = await load\('([\w/-]+)\.js'\)/g)];
    expect(loads.length).toBe(text.split('await load(').length - 1);
    for (const [, names, path] of loads) {
      const module = await import(new URL(`../src/${path}.ts`, import.meta.url).href);
      expect(Object.keys(module), path).toEqual(expect.arrayContaining(names.split(', ')));
    }
  });
});
