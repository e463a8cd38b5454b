/** Training on a GPU: the same run as on the CPU, replayed as a graph, and checkpoints that both can read. */
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { Config } from '../config/schema.js';
import { packBatch } from '../data/batch.js';
import { UniformSamples } from '../data/synthetic/uniform.js';
import { CudaDevice, cudaAbsence } from '../device/cuda/cuda.js';
import { LanguageModel } from '../model/language-model.js';
import { modelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import { readCsv, TRAINING_CSV, VAL_CSV } from '../run/logs/csv.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { cpu, cuda } from '../testing/devices.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';
import { BatchUploader } from './device-batch.js';
import { DeviceStepper } from './device-stepper.js';
import { localContext } from './step.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const absence = cudaAbsence();
const onGpu = (name: string, body: () => Promise<void> | void) =>
  it(name, async (context) => {
    if (absence) return context.skip(absence);
    await body();
  });

/** Heads of 16: small, and a shape that the fused kernels take. */
const MODEL = { dim: 64, d_k: 16, d_v: 16 };

function config(name: string, overrides: TinyOverrides = {}): Config {
  return tinyConfig(folder.path, {
    ...overrides,
    model: { ...MODEL, ...overrides.model },
    train: { steps: 50, eval_every: 25, save_every: 0, out_dir: join(folder.path, name), ...overrides.train },
  });
}

const losses = ({ train }: Config) =>
  readCsv(runPaths(train.out_dir).training, TRAINING_CSV).rows.map(({ loss }) => loss);
const evaluations = ({ train }: Config) =>
  readCsv(runPaths(train.out_dir).val, VAL_CSV).rows.map(({ val_loss }) => val_loss);

function lastStep({ train }: Config) {
  return tailHeartbeats(runPaths(train.out_dir).heartbeat(0), 5).findLast(({ msg }) => msg === 'progress')!;
}

async function trained(name: string, overrides: TinyOverrides = {}): Promise<number[]> {
  const chosen = config(name, overrides);
  await runTraining(chosen, { device: overrides.runtime?.['device'] === 'cpu' ? cpu() : cuda() });
  return [...losses(chosen), ...evaluations(chosen)];
}

function largestDifference(a: readonly number[], b: readonly number[]): number {
  expect(a).toHaveLength(b.length);
  return Math.max(...a.map((value, i) => Math.abs(value - b[i]) / Math.abs(b[i])));
}

describe('training on CUDA', () => {
  onGpu('follows the CPU over 50 steps, in fp32 and in bf16', async () => {
    const onCpu = await trained('cpu', { runtime: { device: 'cpu' } });
    expect(onCpu.at(49)!).toBeLessThan(onCpu[0] - 0.7);
    expect(largestDifference(await trained('fp32'), onCpu)).toBeLessThan(1e-3);
    expect(largestDifference(await trained('bf16', { runtime: { precision: 'bf16' } }), onCpu)).toBeLessThan(1e-2);
  });

  onGpu('compiles all of its kernels before the first step', async () => {
    const begun: { kernel: string; total: number | null }[] = [];
    const progress = {
      begin: (kernel: string, _: number, total: number | null) => void begun.push({ kernel, total }),
      end: () => {},
    };
    const device = new CudaDevice({ compiler: { cache: join(folder.path, 'kernels'), progress } });
    const chosen = config('cold', { train: { steps: 2, eval_every: 1 }, runtime: { precision: 'bf16' } });
    await runTraining(chosen, { device });
    expect(begun.length).toBeGreaterThan(10);
    expect(begun.filter(({ total }) => total === null)).toEqual([]);
  });

  onGpu('gives the same bits replayed as a graph and launched one by one, and again', async () => {
    for (const precision of ['fp32', 'bf16']) {
      const runtime = { precision, deterministic: true };
      const replayed = await trained(`${precision} graph`, { runtime });
      expect(await trained(`${precision} eager`, { runtime: { ...runtime, cuda_graph: false } })).toEqual(replayed);
      expect(await trained(`${precision} again`, { runtime })).toEqual(replayed);
    }
  });

  onGpu('trains with Muon as the CPU does, and with the same bits as a graph', async () => {
    const train = { optimizer: 'muon' };
    const onCpu = await trained('muon cpu', { runtime: { device: 'cpu' }, train });
    expect(largestDifference(await trained('muon fp32', { train }), onCpu)).toBeLessThan(1e-3);
    const runtime = { precision: 'bf16', deterministic: true };
    const replayed = await trained('muon graph', { runtime, train });
    expect(largestDifference(replayed, onCpu)).toBeLessThan(3e-2);
    expect(await trained('muon eager', { runtime: { ...runtime, cuda_graph: false }, train })).toEqual(replayed);
  });

  onGpu('resumes the checkpoints of the CPU, and the CPU those of the GPU', async () => {
    const whole = await trained('whole', { runtime: { device: 'cpu' }, train: { steps: 12, eval_every: 0 } });
    for (const [first, second] of [[cpu, cuda] as const, [cuda, cpu] as const]) {
      const name = `${first().kind} first`;
      const train = { steps: 12, save_every: 6, eval_every: 0 };
      const halting = config(name, { train });
      await runTraining(halting, {
        device: first(),
        onLine: (line, signals) => line.startsWith('step 0006') && signals.emit('SIGTERM'),
      });
      const { result } = await runTraining(halting, { device: second(), resume: 'auto' });
      expect(result.status).toBe('done');
      expect(largestDifference(losses(halting), whole)).toBeLessThan(1e-4);
    }
  });

  onGpu('goes on bit for bit after a stop, whatever it had looked at ahead', async () => {
    const runtime = { precision: 'bf16', deterministic: true };
    const train = { steps: 14, save_every: 5, eval_every: 7, accumulate_grad_batches: 2 };
    for (const data of [{}, { document_mask: true }]) {
      const name = JSON.stringify(data).replace(/\W/g, '');
      const whole = await trained(`whole ${name}`, { runtime, train, data });
      const halting = config(`halting ${name}`, { runtime, train, data });
      await runTraining(halting, {
        device: cuda(),
        onLine: (line, signals) => line.startsWith('step 0006') && signals.emit('SIGTERM'),
      });
      const { result } = await runTraining(halting, { device: cuda(), resume: 'auto' });
      expect(result.status).toBe('done');
      expect([...losses(halting), ...evaluations(halting)]).toEqual(whole);
    }
  });

  onGpu('gives the same losses with gradient checkpointing, in less memory', async () => {
    const model = { ...MODEL, n_layers: 6 };
    const peak = (run: Config) => lastStep(run).gpu_mem_peak!;
    const train = { steps: 8, eval_every: 0, seq_len: 1024, batch_size: 8 };
    const runs = [false, true].map((gradient_checkpointing) =>
      config(`checkpointing ${gradient_checkpointing}`, {
        model,
        train,
        runtime: { gradient_checkpointing, precision: 'bf16', deterministic: true },
      }),
    );
    for (const run of runs) await runTraining(run, { device: cuda() });
    expect(losses(runs[1])).toEqual(losses(runs[0]));
    expect(peak(runs[1])).toBeLessThan(0.7 * peak(runs[0]));
  });

  onGpu('accumulates micro-batches to the gradient of the one big batch', async () => {
    const big = await trained('big', { train: { steps: 8, batch_size: 4, eval_every: 0 } });
    const small = await trained('small', {
      train: { steps: 8, batch_size: 1, accumulate_grad_batches: 4, eval_every: 0 },
    });
    expect(largestDifference(small, big)).toBeLessThan(1e-5);
  });

  onGpu('trains documents of changing lengths, and counts which kernels served', async () => {
    const runtime = { precision: 'bf16' };
    const masked = config('masked', { runtime, data: { document_mask: true }, train: { steps: 30, eval_every: 0 } });
    const { result } = await runTraining(masked, { device: cuda() });
    expect(result.lastLoss!).toBeLessThan(result.firstLoss! - 0.3);
    const beat = lastStep(masked) as unknown as Record<string, unknown>;
    const served = ['union', 'outer', 'gather'].map((path) => Number(beat[`fb_attention_${path}`]));
    expect(served.reduce((sum, count) => sum + count)).toBe(30 * 2);
    expect(beat['fb_attention_portable']).toBe(0);
  });

  onGpu('changes nothing when the gradient is not finite', () => {
    const chosen = config('nan');
    const device = cuda();
    const model = new LanguageModel(device, modelShape(chosen, 256), 1, 'f32');
    const trainedParameters = model.parameters.map((parameter) => ({ parameter, weightDecay: 0 }));
    const optimizer = new AdamW(device, trainedParameters);
    const uploader = new BatchUploader(device, chosen.nsa);
    const stepper = new DeviceStepper(device, localContext({ model, optimizer, uploader, config: chosen }));
    const samples = new UniformSamples(256, 1, 'train');
    const rows = [0, 1].map((row) => samples.locate(row));
    const batches = [packBatch(samples, rows, { sequenceLength: 64, documentMask: false })];
    const step = () => {
      stepper.launch({ batches, learningRate: 1e-3 });
      return stepper.read();
    };
    expect([step(), step(), step()].every(({ finite }) => finite)).toBe(true);
    const head = model.parameters.at(-1)!;
    const before = head.value.read();
    const spoiled = model.parameters.find(({ name }) => name === 'norm')!;
    spoiled.value.write(new Float32Array(spoiled.value.size).fill(Number.NaN));
    const { finite, loss } = step();
    expect(finite).toBe(false);
    expect(loss).toBeNaN();
    expect(optimizer.steps).toBe(3);
    expect(head.value.read()).toEqual(before);
    stepper.free();
    uploader.free();
    optimizer.free();
    model.free();
  });
});
