import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import { CpuDevice } from '../device/cpu/cpu.js';
import type { Device } from '../device/device.js';
import { exportedBy, RecordingCuda } from '../testing/recording-cuda.js';
import { BatchUploader } from '../train/device-batch.js';
import { LocalGradients } from '../train/gradient-exchange.js';
import { createOptimizer, launchGradients, localContext } from '../train/step.js';
import { LanguageModel } from './language-model.js';
import { blockTensors, estimateMemory, namedParameters, parameterCount, weightMatrices } from './memory.js';
import { type ComputeDtype, headShapeOf, layerShapes, type ModelShape, modelShape, sparseShapeOf } from './shape.js';
import { trainedParameters } from './trainable.js';

const MIB = 2 ** 20;

/** Peak of training on a device of its own; the second step finds all gradients in their places, as every later one. */
function peakOf(device: Device, shape: ModelShape, config: Config, dtype: ComputeDtype): number {
  const { seq_len: length, batch_size: sequences } = config.train;
  const model = new LanguageModel(device, shape, 1, dtype);
  expect(parameterCount(shape)).toBe(model.parameterCount);
  const sizes = model.parameters.map(({ value }) => value.size);
  const blocks = layerShapes(shape).flatMap(blockTensors);
  expect(sizes.slice(1, 1 + blocks.length)).toEqual(blocks);
  expect(namedParameters(shape).map(([name]) => name)).toEqual(model.parameters.map(({ name }) => name));
  if (config.train.lora !== null) model.adapt(config.train.lora);
  const trained = trainedParameters(model.parameters, config);
  const optimizer = createOptimizer(model, { trained }, config);
  expect(new Set(weightMatrices(shape))).toEqual(new Set(countedMatrices(model)));
  const uploader = new BatchUploader(device, config.nsa);
  const context = { ...localContext({ model, config, optimizer, uploader }), exchange: new LocalGradients(trained) };
  const total = length * sequences;
  const tokens = new Int32Array(total).map((_, i) => i % shape.vocabSize);
  const batch = {
    inputs: tokens,
    targets: tokens,
    targetCount: total,
    sampleIds: [0],
    epoch: 0,
    cuSeqlens: Int32Array.from({ length: sequences + 1 }, (_, i) => i * length),
  };
  for (let step = 0; step < 2; step++) {
    const held = uploader.upload(batch);
    for (const mean of launchGradients(context, [held], [1])) mean.free();
    uploader.release(held);
    optimizer.step({ learningRate: 1e-3, keepGradients: true });
  }
  optimizer.free();
  return device.pool.peakBytesInUse;
}

/** The weight matrices of a model: each shape once, with their number. */
function countedMatrices({ parameters }: LanguageModel): ReturnType<typeof weightMatrices> {
  const counts = new Map<string, { rows: number; columns: number; count: number }>();
  for (const { value, matrices } of parameters)
    for (const rows of matrices) {
      const [, columns] = value.shape;
      const known = counts.get(`${rows} ${columns}`);
      counts.set(`${rows} ${columns}`, { rows, columns, count: (known?.count ?? 0) + 1 });
    }
  return [...counts.values()];
}

interface Overrides {
  readonly model?: object;
  readonly nsa?: object;
  readonly runtime?: object;
  readonly train?: object;
}

const LORA = { lora: { rank: 8 }, init_from: 'model' };

describe('memory estimate on the CPU', () => {
  it.each<[string, Overrides]>([
    ['sparse', {}],
    ['sparse with checkpointing', { runtime: { gradient_checkpointing: true } }],
    ['dense', { model: { attention: 'dense' } }],
    ['swiglu, phi conv', { model: { mlp: 'swiglu' }, nsa: { phi: 'conv' } }],
    ['phi mlp', { nsa: { phi: 'mlp' } }],
    [
      'q/k norm and biases',
      { model: { qk_norm: true, qkv_bias: true, out_bias: true, mlp_bias: true, mlp_hidden: 333 } },
    ],
    ['shared keys and values', { nsa: { shared_kv: true } }],
    ['shared keys and values, rope before, phi conv', { nsa: { shared_kv: true, cmp_rope: 'before', phi: 'conv' } }],
    ['dense, q/k norm and bias', { model: { attention: 'dense', qk_norm: true, qkv_bias: true } }],
    ['window layers', { model: { layer_pattern: ['nsa', 'window'] } }],
    [
      'window layers last, checkpointing, Muon',
      {
        model: { layer_pattern: ['nsa', 'window', 'window'] },
        runtime: { gradient_checkpointing: true },
        train: { optimizer: 'muon' },
      },
    ],
    ['Muon', { train: { optimizer: 'muon' } }],
    ['Muon, swiglu, phi mlp', { model: { mlp: 'swiglu' }, nsa: { phi: 'mlp' }, train: { optimizer: 'muon' } }],
    ['adapters', { train: LORA }],
    [
      'adapters of rank 64, swiglu, checkpointing',
      { model: { mlp: 'swiglu' }, runtime: { gradient_checkpointing: true }, train: { ...LORA, lora: { rank: 64 } } },
    ],
    [
      'adapters of a dense model, some layers',
      { model: { attention: 'dense' }, train: { ...LORA, lora: { targets: ['q_proj', 'down_proj'] } } },
    ],
    ['adapters, phi mlp', { nsa: { phi: 'mlp' }, train: LORA }],
    ['the last layer', { train: { trainable: ['blocks.3.*', 'norm'] } }],
    ['norms', { train: { trainable: ['*norm'] } }],
    ['the head alone', { train: { trainable: ['head'] } }],
    ['bf16 in the config, which the CPU computes in f32', { runtime: { precision: 'bf16' } }],
  ])('%s: is within 10 %% of what a step takes', (_, overrides) => {
    const config = parseConfig({
      model: { dim: 128, n_layers: 4, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32, ...overrides.model },
      nsa: { l: 16, d: 8, l_sel: 32, n_sel: 6, w: 64, ...overrides.nsa },
      runtime: overrides.runtime ?? {},
      train: { seq_len: 1024, batch_size: 2, ...overrides.train },
    });
    const shape = modelShape(config, 256);
    const ratio = estimateMemory(shape, config, 'cpu').total / peakOf(new CpuDevice(), shape, config, 'f32');
    expect(ratio).toBeGreaterThan(0.9);
    expect(ratio).toBeLessThan(1.1);
  });
});

/** The 125m shape of the shipped configs. */
function gpuConfig({ model, nsa, runtime, train }: Overrides): Config {
  return parseConfig({
    model: { dim: 768, n_layers: 12, n_heads: 12, n_kv_groups: 2, d_k: 64, d_v: 64, mlp: 'silu', ...model },
    nsa: { l: 32, d: 16, l_sel: 64, n_sel: 16, w: 512, ...nsa },
    runtime: { device: 'cuda', precision: 'bf16', ...runtime },
    train: { seq_len: 2048, batch_size: 32, ...train },
  });
}

/** 1.3B parameters with 24 layers, whose layers are large enough for FP8. */
const LARGE = { dim: 2048, n_layers: 3, n_heads: 32, n_kv_groups: 4 };

/** Every tensor of a step counted, without a GPU: the very allocations that training makes there. */
function counted(overrides: Overrides, vocabulary = 50_304) {
  const config = gpuConfig(overrides);
  const shape = modelShape(config, vocabulary);
  const device = new RecordingCuda(exportedBy({ heads: headShapeOf(shape), sparse: sparseShapeOf(shape) }));
  const dtype = config.runtime.precision === 'bf16' ? 'bf16' : 'f32';
  return { estimate: estimateMemory(shape, config).total, peak: peakOf(device, shape, config, dtype) };
}

/** With `train.scorer_loss`: what makes a sparse model use its context. */
const RECIPE: Overrides = { nsa: { rope: 'window', cmp_rope: 'none' } };

describe('memory estimate on a GPU', () => {
  // Measured on one H200 with bench train (dev/log/2026-11-benchmarks.md): 155.5M parameters, bf16, 65,536
  // tokens a step at every S, no checkpointing. The pool rounds sizes up by at most an eighth.
  const H200_PEAK_MIB = 25_607;

  it.each([2048, 8192, 65_536])('is within 10 %% of what an H200 used for 65,536 tokens of S = %i', (seq_len) => {
    const { estimate, peak } = counted({
      model: { tie_embeddings: false },
      train: { seq_len, batch_size: 65_536 / seq_len },
    });
    expect(estimate / MIB).toBeGreaterThan(0.9 * H200_PEAK_MIB);
    expect(estimate / MIB).toBeLessThan(1.1 * H200_PEAK_MIB);
    // The count without a GPU is what the GPU counted, but for some small buffers of the trainer.
    expect(Math.abs(peak / MIB - H200_PEAK_MIB)).toBeLessThan(8);
  });

  it('is within 10 % of what an H200 used for the production config, evaluations included', () => {
    const config = gpuConfig({
      model: { tie_embeddings: false },
      runtime: { gradient_checkpointing: true },
      train: { batch_size: 1, eval_every: 250 },
    });
    // gpu_mem_alloc of the 1,000 steps of 125m_1xa100_production (dev/log/2026-11-benchmarks.md).
    const share = estimateMemory(modelShape(config, 50_304), config).total / MIB / 3327;
    expect(share).toBeGreaterThan(0.9);
    expect(share).toBeLessThan(1.1);
  });

  it.each<[string, Overrides]>([
    ['checkpointing', { runtime: { gradient_checkpointing: true } }],
    [
      'checkpointing, one long sequence',
      { runtime: { gradient_checkpointing: true }, train: { seq_len: 65_536, batch_size: 1 } },
    ],
    [
      'checkpointing, a million tokens',
      { runtime: { gradient_checkpointing: true }, train: { seq_len: 2 ** 20, batch_size: 1 } },
    ],
    [
      'checkpointing, a million tokens, FP8',
      { runtime: { gradient_checkpointing: true, fp8: true }, train: { seq_len: 2 ** 20, batch_size: 1 } },
    ],
    ['deterministic', { runtime: { deterministic: true, gradient_checkpointing: true } }],
    ['query-major selection', { runtime: { selection_kernel: 'v1', gradient_checkpointing: true } }],
    ['a small batch', { train: { batch_size: 1 } }],
    ['the scorer loss', { train: { scorer_loss: 0.1 } }],
    [
      'the scorer loss, positions in the window alone',
      { ...RECIPE, train: { scorer_loss: 0.1, seq_len: 32_768, batch_size: 2 } },
    ],
    [
      'the same with checkpointing',
      { ...RECIPE, runtime: { gradient_checkpointing: true }, train: { scorer_loss: 0.1 } },
    ],
    ['the same in a fixed order', { ...RECIPE, runtime: { deterministic: true }, train: { scorer_loss: 0.1 } }],
    ['the same beside branch kernels', { ...RECIPE, runtime: { fused: false }, train: { scorer_loss: 0.1 } }],
    ['dense', { model: { attention: 'dense' } }],
    ['window layers', { model: { layer_pattern: ['nsa', 'window'] } }],
    [
      'window layers with checkpointing',
      { model: { layer_pattern: ['window', 'nsa'] }, runtime: { gradient_checkpointing: true } },
    ],
    ['dense with checkpointing', { model: { attention: 'dense' }, runtime: { gradient_checkpointing: true } }],
    ['swiglu, phi conv, tied', { model: { mlp: 'swiglu', tie_embeddings: true }, nsa: { phi: 'conv' } }],
    ['phi mlp', { nsa: { phi: 'mlp' } }],
    ['shared keys and values', { nsa: { shared_kv: true } }],
    ['shared keys and values, other forced blocks', { nsa: { shared_kv: true, init_blocks: 0 } }],
    ['heads that the fused kernels refuse', { model: { d_k: 40, d_v: 40 } }],
    ['fused kernels switched off', { runtime: { fused: false } }],
    ['fp32', { runtime: { precision: 'fp32' } }],
    ['FP8 in the loss', { runtime: { fp8: true } }],
    ['FP8 in all layers', { model: LARGE, runtime: { fp8: true }, train: { seq_len: 8192, batch_size: 4 } }],
    [
      'FP8 with checkpointing',
      { model: LARGE, runtime: { fp8: true, gradient_checkpointing: true }, train: { seq_len: 8192, batch_size: 4 } },
    ],
    [
      'FP8, dense, swiglu',
      { model: { ...LARGE, attention: 'dense', mlp: 'swiglu' }, runtime: { fp8: true }, train: { batch_size: 8 } },
    ],
  ])('%s: is within 10 %% of all tensors of a step', (_, overrides) => {
    const { estimate, peak } = counted(overrides);
    expect(estimate / peak).toBeGreaterThan(0.9);
    expect(estimate / peak).toBeLessThan(1.1);
  });

  it('is for the device that is asked about: bf16 halves what a GPU holds, and nothing on the CPU', () => {
    const config = gpuConfig({});
    const shape = modelShape(config, 50_304);
    const [gpu, cpu] = [estimateMemory(shape, config), estimateMemory(shape, config, 'cpu')];
    expect(gpu.activations).toBeLessThan(0.6 * cpu.activations);
    expect(gpu.weights).toBe(cpu.weights);
    // A bf16 copy of every matrix: the embedding, which is only looked up in, has none.
    const matrices = (gpu.state - cpu.state) / 2;
    expect(matrices).toBeLessThan(parameterCount(shape));
    expect(cpu.state).toBe(16 * parameterCount(shape));
  });
});
