import { basename, dirname } from 'node:path';
import { describe, expect, it } from 'vitest';
import { readConfig } from '../config/load.js';
import { parseConfig } from '../config/parse.js';
import { shippedConfigs } from '../config/shipped.js';
import { ListingCuda } from '../device/cuda/listing.js';
import type { CudaCode, KernelMacros } from '../device/cuda/runtime.js';
import { headShapeOf, modelShape, sparseShapeOf } from '../model/shape.js';
import { exportedBy } from '../testing/recording-cuda.js';
import { trainingKernels } from './compile-ahead.js';

const GPU = { architecture: 90, multiprocessors: 132 };
const SIZES = { dim: 768, n_layers: 12, n_heads: 12, n_kv_groups: 2, d_k: 64, d_v: 64 };

/** Knows what compiled attention kernels say of themselves. */
class KnowingCuda extends ListingCuda {
  readonly #constants: (name: string) => number;

  constructor(constants: (name: string) => number) {
    super(GPU);
    this.#constants = constants;
  }

  override compile(source: URL, macros: KernelMacros = {}): CudaCode {
    return { ...super.compile(source, macros), constant: this.#constants };
  }
}

function kernelsOf(sections: Record<string, object>) {
  const config = parseConfig({
    ...sections,
    model: { ...SIZES, ...sections['model'] },
    train: { seq_len: 8192, batch_size: 2, ...sections['train'] },
    runtime: { precision: 'bf16', ...sections['runtime'] },
  });
  const shape = modelShape(config, 50304);
  const knowing = new KnowingCuda(exportedBy({ heads: headShapeOf(shape), sparse: sparseShapeOf(shape) }));
  return {
    listed: trainingKernels(config, shape, new ListingCuda(GPU)),
    known: trainingKernels(config, shape, knowing),
  };
}

describe('kernels that a training compiles', () => {
  it.each([
    ['bf16', {}],
    ['FP8', { runtime: { fp8: true } }],
    ['Muon, q/k norm', { model: { qk_norm: true }, train: { optimizer: 'muon' } }],
    ['window layers', { model: { layer_pattern: ['nsa', 'window'] } }],
    ['dense', { model: { attention: 'dense' } }],
    ['long sequences with checkpointing', { train: { seq_len: 65536 }, runtime: { gradient_checkpointing: true } }],
  ])('are listed without knowing what compiled code would say: %s', (_, sections) => {
    const { listed, known } = kernelsOf(sections);
    expect(listed).toEqual(known);
  });

  // A configuration that cannot be listed could not be trained on a GPU.
  const INCOMPLETE = ['base', 'text_cpu', 'lora']; // the last two need a path and a model
  const CONFIGS = shippedConfigs().filter((name) => !INCOMPLETE.includes(name));
  it.each(CONFIGS)('are listed for the shipped config %s', (name) => {
    const config = readConfig(name);
    expect(trainingKernels(config, modelShape(config, 50304), new ListingCuda(GPU)).length).toBeGreaterThan(8);
  });

  it.each([
    ['branch kernels', { runtime: { fused: false } }],
    ['fp32', { runtime: { precision: 'fp32' } }],
    ['no statistics', { runtime: { aux_stats: false } }],
    ['phi conv', { nsa: { phi: 'conv' } }],
    ['phi mlp', { nsa: { phi: 'mlp' } }],
    ['shared keys', { nsa: { shared_kv: true, l: 8, d: 8 } }],
    ['a wide model of 32 heads', { model: { dim: 2048, n_heads: 32, n_kv_groups: 4 } }],
    ['SwiGLU, biases, tied', { model: { mlp: 'swiglu', qkv_bias: true, mlp_bias: true, tie_embeddings: true } }],
    ['short sequences', { train: { seq_len: 40 } }],
  ])('are listed with %s', (_, sections) => {
    expect(kernelsOf(sections).listed.length).toBeGreaterThan(8);
  });

  it.each([80, 89, 100, 120])('are listed for compute capability %i / 10', (architecture) => {
    const config = parseConfig({ model: SIZES, runtime: { precision: 'bf16' }, train: { seq_len: 4096 } });
    const device = new ListingCuda({ ...GPU, architecture });
    expect(trainingKernels(config, modelShape(config, 50304), device).length).toBeGreaterThan(8);
  });

  it('are those of every part of a step', () => {
    const folders = new Set(kernelsOf({}).listed.map(({ source }) => basename(dirname(source))));
    for (const part of ['random', 'embedding', 'rmsnorm', 'rope', 'fused', 'activation', 'crossentropy', 'adamw'])
      expect(folders).toContain(part);
    const dense = kernelsOf({ model: { attention: 'dense' }, train: { optimizer: 'muon' } }).listed;
    expect(dense.some(({ source }) => source.endsWith('fused/selected.cu'))).toBe(false);
    expect(dense.some(({ source }) => source.includes('/muon/'))).toBe(true);
  });
});
