/** docs/reference/training.md: its formulas give what the trainer computes. test/package.slow.test.ts runs its program. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { parseConfig } from '../src/config/parse.js';
import { LanguageModel } from '../src/model/language-model.js';
import { modelShape } from '../src/model/shape.js';
import { root } from '../src/testing/cli.js';
import { cpu } from '../src/testing/devices.js';
import type { TokenBatch } from '../src/train/iterable-loader.js';
import { learningRate } from '../src/train/schedule.js';
import { HostStepper } from '../src/train/step.js';
import { Trainer } from '../src/train/trainer.js';

const page = readFileSync(join(root, 'docs/reference/training.md'), 'utf8');

/** The right-hand side of `name: s(p) = …` on the page, as a function of p. */
function shareOf(name: string, wsdDecayFraction: number): (p: number) => number {
  const formula = new RegExp(`^${name}: +s\\(p\\) = (.+)$`, 'm').exec(page)![1];
  const body = formula
    .replaceAll('wsd_decay_fraction', 'd')
    .replaceAll(/\b(cos|min)\b/g, 'Math.$1')
    .replaceAll('pi', 'Math.PI');
  return (p) => Number(new Function('p', 'd', `return ${body}`)(p, wsdDecayFraction));
}

describe('formulas of docs/reference/training.md', () => {
  it.each(['cosine', 'linear', 'wsd', 'constant'] as const)('learning rate: %s', (kind) => {
    expect(page.replaceAll('\n', ' ')).toContain(
      '`W = min(warmup_steps, floor(T / 2))`, `r = lr_min_ratio`, `p = (t - W) / (T - W)`',
    );
    expect(page).toContain('t <= W:  rate = lr * t / W\nt >  W:  rate = lr * (r + (1 - r) * s(p))');
    for (const [T, warmup, r, fraction] of [
      [50, 7, 0.1, 0.2],
      [9, 100, 0.25, 0.5],
      [20, 0, 0, 0.3],
    ]) {
      const share = shareOf(kind, fraction);
      const W = Math.min(warmup, Math.floor(T / 2));
      const settings = {
        steps: T,
        lr: 3e-4,
        lr_min_ratio: r,
        lr_schedule: kind,
        warmup_steps: warmup,
        wsd_decay_fraction: fraction,
      };
      for (let t = 1; t <= T; t++) {
        const expected = t <= W ? (3e-4 * t) / W : 3e-4 * (r + (1 - r) * share((t - W) / (T - W)));
        expect(learningRate(t, settings)).toBeCloseTo(expected, 12);
      }
    }
  });

  it('clipping, AdamW and which tensors decay', async () => {
    for (const line of [
      'factor = grad_clip / norm   otherwise',
      "m  = b1 * m + (1 - b1) * g'",
      "v  = b2 * v + (1 - b2) * g'^2",
      'w  = w - rate * ( (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * w )',
    ])
      expect(page).toContain(line);
    const config = parseConfig({
      model: { dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8, mlp_ratio: 2 },
      nsa: { l: 4, d: 2, l_sel: 8, n_sel: 3, w: 8 },
      train: { steps: 3, seq_len: 16, lr: 0.01, warmup_steps: 0, grad_clip: 0.5, weight_decay: 0.3, eps: 1e-4 },
    });
    const { betas, eps, grad_clip: clip, weight_decay: decay } = config.train;
    const model = new LanguageModel(cpu(), modelShape(config, 12), 1);
    const batch = (k: number): TokenBatch => ({
      inputs: Int32Array.from({ length: 16 }, (_, i) => (3 * i + k) % 12),
      targets: Int32Array.from({ length: 16 }, (_, i) => (5 * i + k) % 12),
      cuSeqlens: Int32Array.of(0, 16),
    });
    const trainer = new Trainer({ model, data: [0, 1, 2].map(batch), config });
    const weights = model.parameters.map(({ value }) => Float64Array.from(value.read() as Float32Array));
    const m = weights.map(({ length }) => new Float64Array(length));
    const v = weights.map(({ length }) => new Float64Array(length));
    let isClipped = false;
    for (let t = 1; t <= 3; t++) {
      // The gradients of the step, from a second pass over the same batch at the same weights.
      const own = await gradientsOf(model, config, batch(t - 1));
      const { learningRate: rate, gradientNorm } = (await trainer.step())!;
      const norm = Math.sqrt(own.reduce((sum, g) => sum + g.reduce((part, x) => part + x * x, 0), 0));
      expect(gradientNorm).toBeCloseTo(norm, 5);
      const factor = clip === 0 || norm <= clip ? 1 : clip / norm;
      isClipped ||= factor < 1;
      model.parameters.forEach(({ value }, k) => {
        const weightDecay = value.shape.length >= 2 ? decay : 0;
        weights[k].forEach((w, i) => {
          const g = factor * own[k][i];
          m[k][i] = betas[0] * m[k][i] + (1 - betas[0]) * g;
          v[k][i] = betas[1] * v[k][i] + (1 - betas[1]) * g * g;
          const update = m[k][i] / (1 - betas[0] ** t) / (Math.sqrt(v[k][i] / (1 - betas[1] ** t)) + eps);
          weights[k][i] = w - rate * (update + weightDecay * w);
        });
      });
    }
    expect(isClipped).toBe(true);
    const isVector = model.parameters.map(({ value }) => value.shape.length < 2);
    expect(new Set(isVector)).toEqual(new Set([true, false]));
    model.parameters.forEach(({ name, value }, k) => {
      const distance = Math.max(...(value.read() as Float32Array).map((w, i) => Math.abs(w - weights[k][i])));
      expect(distance, name).toBeLessThan(2e-5);
    });
    trainer.free();
    model.free();
  });

  it('Muon: which matrices, momentum, orthogonalisation and scale', async () => {
    for (const line of [
      "m = mu * m + (1 - mu) * g'",
      "u = mu * m + (1 - mu) * g'",
      'X = u / (norm(u) + 1e-7)',
      'A = X X^T;  X = 3.4445 X + (-4.775 A + 2.0315 A A) X',
      'w = w - rate * muon_lr_ratio * (0.2 * sqrt(max(rows, columns)) * X + weight_decay * w)',
    ])
      expect(page).toContain(line);
    const config = parseConfig({
      model: { dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8, mlp: 'swiglu', mlp_ratio: 2 },
      nsa: { l: 4, d: 2, l_sel: 8, n_sel: 3, w: 8 },
      train: {
        ...{
          steps: 1,
          seq_len: 16,
          lr: 0.01,
          lr_schedule: 'constant',
          warmup_steps: 0,
          grad_clip: 0,
          weight_decay: 0.3,
        },
        ...{ optimizer: 'muon', muon_momentum: 0.8, muon_lr_ratio: 3 },
      },
    });
    const model = new LanguageModel(cpu(), modelShape(config, 12), 1);
    const batch = (k: number): TokenBatch => ({
      inputs: Int32Array.from({ length: 16 }, (_, i) => (3 * i + k) % 12),
      targets: Int32Array.from({ length: 16 }, (_, i) => (5 * i + k) % 12),
      cuSeqlens: Int32Array.of(0, 16),
    });
    // Rows of the matrices inside each parameter: heads and groups times 8, and the two halves of swiglu.
    const rows: Record<string, number[]> = {
      'blocks.0.attention.qkv': [16, 8, 8, 8, 8, 8, 8],
      'blocks.0.attention.out': [16],
      'blocks.0.mlp.up': [32, 32],
      'blocks.0.mlp.down': [16],
    };
    const gradients = await gradientsOf(model, config, batch(0));
    const before = model.parameters.map(({ value }) => Float64Array.from(value.read() as Float32Array));
    const trainer = new Trainer({ model, data: [batch(0)], config });
    await trainer.step();
    const isTrained = new Set<string>();
    model.parameters.forEach(({ name, value }, k) => {
      const [, columns] = value.shape;
      let first = 0;
      for (const count of rows[name] ?? []) {
        const part = (values: Float64Array) => values.slice(first, first + count * columns);
        const w = part(before[k]);
        let x: Float64Array = part(gradients[k]).map((g) => 0.8 * 0.2 * g + 0.2 * g);
        const norm = Math.sqrt(x.reduce((sum, one) => sum + one * one, 0));
        x = x.map((one) => one / (norm + 1e-7));
        for (let i = 0; i < 5; i++) x = quintic(x, count, columns);
        const scale = 0.2 * Math.sqrt(Math.max(count, columns));
        const expected = w.map((one, i) => one - 0.01 * 3 * (scale * x[i] + 0.3 * one));
        const now = part(Float64Array.from(value.read() as Float32Array));
        const distance = Math.max(...now.map((one, i) => Math.abs(one - expected[i])));
        expect(distance, name).toBeLessThan(2e-5);
        first += count * columns;
        isTrained.add(name);
      }
    });
    expect(isTrained).toEqual(new Set(Object.keys(rows)));
    const byMuon = [...trainer.optimizer.state.keys()].filter((name) => name.endsWith('.momentum'));
    expect(new Set(byMuon)).toEqual(new Set(Object.keys(rows).map((name) => `${name}.momentum`)));
    trainer.free();
    model.free();
  });
});

/** 3.4445 X + (-4.775 A + 2.0315 A A) X with A = X Xᵀ, for X [rows, columns]. */
function quintic(x: Float64Array, rows: number, columns: number): Float64Array {
  const row = (r: number) => x.subarray(r * columns, (r + 1) * columns);
  const index = Array.from({ length: rows }, (_, i) => i);
  const a = index.map((i) => index.map((j) => row(i).reduce((sum, one, t) => sum + one * row(j)[t], 0)));
  const b = index.map((i) =>
    index.map((j) => -4.775 * a[i][j] + 2.0315 * index.reduce((sum, t) => sum + a[i][t] * a[t][j], 0)),
  );
  return x.map((one, at) => {
    const [i, j] = [Math.floor(at / columns), at % columns];
    return 3.4445 * one + index.reduce((sum, t) => sum + b[i][t] * x[t * columns + j], 0);
  });
}

/** The gradients of one batch at the model's present weights, from a trainer that makes no update. */
async function gradientsOf(model: LanguageModel, config: ReturnType<typeof parseConfig>, batch: TokenBatch) {
  let gradients: Float64Array[] = [];
  const probe = new Trainer({
    model,
    data: [batch],
    config: { ...config, train: { ...config.train, weight_decay: 0 } },
    stepper: (context) => {
      const inner = new HostStepper(context);
      return {
        launch: (inputs) => inner.launch(inputs),
        read: () => {
          const result = inner.read();
          gradients = model.parameters.map(({ gradient }) => Float64Array.from(gradient!.read() as Float32Array));
          return result;
        },
        update: () => {},
        free: () => inner.free(),
      };
    },
  });
  await probe.step();
  probe.free();
  return gradients;
}
