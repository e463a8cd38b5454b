/** Trainings with `model.layer_pattern`: what they record about sparse layers, how they resume, and what reads the model. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { inspectSelection } from '../evaluate/selection.js';
import { traceText } from '../evaluate/trace.js';
import { decodeStepRefusal } from '../model/decode-step.js';
import { trainingFlops } from '../model/flops.js';
import { LanguageModel } from '../model/language-model.js';
import { modelShape } from '../model/shape.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { cpu } from '../testing/devices.js';
import { EmulatedCuda } from '../testing/emulated-cuda.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';

let folder: ReturnType<typeof temporaryFolder>;
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const PATTERN = { n_layers: 4, layer_pattern: ['window', 'nsa'] };
const config = (name: string, overrides: TinyOverrides = {}) =>
  tinyConfig(folder.path, {
    model: PATTERN,
    ...overrides,
    train: { steps: 8, eval_every: 4, save_every: 4, out_dir: join(folder.path, name), ...overrides.train },
  });
const losses = (name: string) =>
  readCsv(runPaths(join(folder.path, name)).training, TRAINING_CSV).rows.map(({ loss }) => loss);

it('trains, records the sparse layers by their indices, and resumes bit for bit', async () => {
  await runTraining(config('whole'));
  const paths = runPaths(join(folder.path, 'whole'));
  const [line] = readFileSync(paths.attention, 'utf8').trim().split('\n');
  const statistics = JSON.parse(line);
  expect(statistics.sparse_layers).toEqual([1, 3]);
  expect([statistics.entropy.length, statistics.distance.length, statistics.layers.length]).toEqual([2, 2, 1]);
  const beat = tailHeartbeats(paths.heartbeat(0), 9).findLast(({ msg }) => msg === 'progress')!;
  expect(beat.gate_entropy_mean).toBeGreaterThan(0);
  expect(beat.sel_k_mean).toBeGreaterThan(0);

  const isFifth = (said: string) => said.startsWith('step 0005');
  await runTraining(config('broken'), { onLine: (said, signals) => isFifth(said) && signals.emit('SIGTERM') });
  const other = config('broken', { model: { n_layers: 4 } });
  await expect(runTraining(other, { resume: 'auto' })).rejects.toThrow('model.layer_pattern');
  await runTraining(config('broken'), { resume: 'auto' });
  expect(losses('broken')).toEqual(losses('whole'));
  await runTraining(config('checkpointed', { runtime: { gradient_checkpointing: true } }));
  expect(losses('checkpointed')).toEqual(losses('whole'));
});

it('has statistics of sparse layers only, and no fused decode step', () => {
  const { model: sizes, nsa } = config('unused');
  const shape = modelShape({ model: sizes, nsa }, 64);
  const model = new LanguageModel(cpu(), shape, 1);
  const tokens = Array.from({ length: 80 }, (_, i) => (7 * i) % 64);
  expect(inspectSelection(model, tokens).map(({ layer }) => layer)).toEqual([1, 3]);
  const { selected, gates } = traceText(model, tokens);
  const ofLayer = <T extends Int16Array | Uint8Array>(all: T, layer: number) =>
    Array.from(all.subarray((layer * all.length) / 4, ((layer + 1) * all.length) / 4));
  for (const layer of [0, 2]) {
    expect(new Set(ofLayer(selected, layer))).toEqual(new Set([-1]));
    expect(ofLayer(gates, layer).slice(-3)).toEqual([0, 0, 255]);
  }
  for (const layer of [1, 3]) {
    expect(Math.max(...ofLayer(selected, layer))).toBeGreaterThan(0);
    expect(ofLayer(gates, layer).slice(-3)).toEqual([85, 85, 85]); // a new gate is uniform
  }
  model.free();
  const device = new EmulatedCuda();
  const onGpu = new LanguageModel(device, shape, 1, 'bf16');
  expect(decodeStepRefusal(onGpu)).toBe('window layers are not fused');
  onGpu.free();
});

it('counts fewer operations than sparse layers, and refuses patterns that cannot work', () => {
  const flops = (layer_pattern: ('nsa' | 'window')[]) =>
    trainingFlops(modelShape(parseConfig({ model: { n_layers: 2, layer_pattern } }), 256), [4096]).used;
  const mixed = flops(['nsa', 'window']);
  expect(mixed).toBeLessThan(flops(['nsa']));
  expect(flops(['window', 'nsa'])).toBe(mixed);
  const refused = (model: object) => () => parseConfig({ model });
  expect(refused({ layer_pattern: ['window'] })).toThrow('model.layer_pattern: [window] gives none of the');
  expect(refused({ n_layers: 1, layer_pattern: ['window', 'nsa'] })).toThrow('gives none of the 1 layers');
  expect(refused({ attention: 'dense', layer_pattern: ['nsa', 'window'] })).toThrow('needs model.attention nsa');
  expect(refused({ layer_pattern: [] })).toThrow('model.layer_pattern');
});
