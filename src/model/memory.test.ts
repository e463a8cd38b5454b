import { describe, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { CpuDevice } from '../device/cpu/cpu.js';
import { AdamW } from '../ops/adamw/op.js';
import { BatchUploader } from '../train/batches.js';
import { computeGradients } from '../train/optimizer-step.js';
import { LanguageModel } from './language-model.js';
import { estimateMemory, parameterCount } from './memory.js';
import { modelShape } from './shape.js';

/** Peak of one training step on a device of its own. */
function measure(overrides: { model?: object; nsa?: object; runtime?: object }) {
  const config = parseConfig({
    model: { dim: 128, n_layers: 4, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32, ...overrides.model },
    nsa: { l: 16, d: 8, l_sel: 32, n_sel: 6, w: 64, ...overrides.nsa },
    runtime: overrides.runtime ?? {},
    train: { seq_len: 1024, batch_size: 2 },
  });
  const device = new CpuDevice();
  const shape = modelShape(config, 256);
  const model = new LanguageModel(device, shape, 1);
  const optimizer = new AdamW(
    device,
    model.parameters.map((parameter) => ({ parameter, weightDecay: 0 })),
  );
  const uploader = new BatchUploader(device, config.nsa);
  const tokens = new Int32Array(2048).map((_, i) => i % 256);
  const batch = {
    ...{ inputs: tokens, targets: tokens, targetCount: 2048, sampleIds: [0, 1], epoch: 0 },
    cuSeqlens: Int32Array.from([0, 1024, 2048]),
  };
  computeGradients({ model, optimizer, uploader, config, observer: undefined }, [batch]);
  return { estimate: estimateMemory(shape, config), peak: device.pool.peakBytesInUse, model, shape };
}

describe('memory estimate', () => {
  it.each([
    ['sparse', {}],
    ['sparse with checkpointing', { runtime: { gradient_checkpointing: true } }],
    ['dense', { model: { attention: 'dense' } }],
    ['swiglu, phi conv', { model: { mlp: 'swiglu' }, nsa: { phi: 'conv' } }],
    ['phi mlp', { nsa: { phi: 'mlp' } }],
  ])('%s: is within 10 %% of what a step takes', (_, overrides) => {
    const { estimate, peak, model, shape } = measure(overrides);
    expect(parameterCount(shape)).toBe(model.parameterCount);
    expect(estimate.total / peak).toBeGreaterThan(0.9);
    expect(estimate.total / peak).toBeLessThan(1.1);
  });
});
