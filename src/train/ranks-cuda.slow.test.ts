/** Several ranks on one GPU, as processes of the real command line: the losses of one rank, in every way of exchanging. */

import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { ended, startTrefoil } from '../testing/cli.js';
import { ncclAbsence } from '../testing/nccl.js';
import { type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';
import { freeStorePort } from '../testing/store-port.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const absence = cudaAbsence() ?? ncclAbsence();
const onGpu = (name: string, body: () => Promise<void>) =>
  it(name, async (context) => {
    if (absence) return context.skip(absence);
    await body();
  });

interface Run {
  readonly outDir: string;
  readonly ranks: readonly { code: number | null; output: string }[];
}

/** Trains on `world` ranks that share the GPU; the batch of a step is the same for any number. */
async function trained(name: string, world: number, overrides: TinyOverrides = {}, words: string[] = []): Promise<Run> {
  const { started, outDir } = await start(name, world, overrides, words);
  const ranks = await Promise.all(started.map(({ done }) => done));
  for (const { code, output } of ranks) expect(code, output).toBe(0);
  return { outDir, ranks };
}

async function start(name: string, world: number, overrides: TinyOverrides, words: string[] = [], minutes = '1') {
  const outDir = join(folder.path, name);
  const config = tinyConfig(folder.path, {
    ...overrides,
    model: { dim: 64, d_k: 16, d_v: 16, ...overrides.model },
    runtime: { device: 'cuda', deterministic: true, ...overrides.runtime },
    train: {
      steps: 12,
      eval_every: 6,
      save_every: 0,
      out_dir: outDir,
      batch_size: 4 / world,
      bucket_mb: 0.2,
      hash_every: 5,
      ...overrides.train,
    },
  });
  const file = join(folder.path, `${name}.yaml`);
  writeFileSync(file, stringify(config));
  const port = await freeStorePort();
  const started = Array.from({ length: world }, (_, rank) => {
    const env: Record<string, string> =
      world === 1
        ? {}
        : {
            RANK: `${rank}`,
            WORLD_SIZE: `${world}`,
            LOCAL_RANK: `${rank}`,
            TREFOIL_SHARE_GPU: '1',
            MASTER_ADDR: '127.0.0.1',
            MASTER_PORT: `${port}`,
            NSA_PG_TIMEOUT_MIN: minutes,
          };
    const child = startTrefoil(['train', '--config', file, ...words], env);
    let output = '';
    for (const stream of [child.stdout!, child.stderr!])
      stream.setEncoding('utf8').on('data', (text: string) => {
        output += text;
      });
    const done = ended(child).then(({ code }) => ({ code, output }));
    const says = (text: string) =>
      new Promise<void>((resolve, reject) => {
        const look = () => output.includes(text) && resolve();
        for (const stream of [child.stdout!, child.stderr!]) stream.on('data', look);
        look();
        void done.then(() => reject(new Error(`ended without "${text}": ${output}`)));
      });
    return { child, done, says };
  });
  return { started, outDir };
}

const losses = ({ outDir }: { outDir: string }) =>
  readCsv(runPaths(outDir).training, TRAINING_CSV).rows.map(({ loss }) => loss);

function largestDifference(a: readonly number[], b: readonly number[]): number {
  expect(a.length).toBe(b.length);
  return Math.max(...a.map((value, i) => Math.abs(value - b[i]) / Math.abs(b[i])));
}

describe('ranks on a GPU', () => {
  onGpu('train like one rank, in fp32 and bf16, and hold the same weights', async () => {
    for (const precision of ['fp32', 'bf16'] as const) {
      const one = losses(await trained(`${precision}-1`, 1, { runtime: { precision } }));
      expect(one.at(-1)!).toBeLessThan(one[0] - 0.1);
      const two = losses(await trained(`${precision}-2`, 2, { runtime: { precision } }));
      expect(largestDifference(two, one)).toBeLessThan(precision === 'fp32' ? 1e-4 : 1e-2);
    }
  });

  onGpu('give the same bits as a graph, launched one by one, and all at the end', async () => {
    const runtime = { precision: 'bf16' };
    const first = losses(await trained('graph', 2, { runtime }));
    expect(losses(await trained('eager', 2, { runtime: { ...runtime, cuda_graph: false } }))).toEqual(first);
    expect(losses(await trained('safe', 2, { runtime, train: { ddp_safe: true } }))).toEqual(first);
  });

  onGpu('keep optimizer state of their own part with zero, for the same losses and less memory', async () => {
    const model = { dim: 256, d_k: 16, d_v: 16, n_layers: 4 };
    const peak = ({ outDir }: Run) =>
      tailHeartbeats(runPaths(outDir).heartbeat(0), 5).findLast(({ msg }) => msg === 'progress')!.gpu_mem_peak!;
    const whole = await trained('whole', 2, { model });
    const parts = await trained('parts', 2, { model, train: { zero: 1 } });
    expect(largestDifference(losses(parts), losses(whole))).toBeLessThan(1e-5);
    expect(peak(parts)).toBeLessThan(peak(whole));
  });

  onGpu('accumulate, round on the wire, and mask documents', async () => {
    const one = losses(await trained('plain', 1));
    const train = { batch_size: 1, accumulate_grad_batches: 2 };
    expect(largestDifference(losses(await trained('accumulate', 2, { train })), one)).toBeLessThan(1e-4);
    expect(largestDifference(losses(await trained('wire', 2, { train: { wire: 'bf16' } })), one)).toBeLessThan(1e-2);
    const data = { document_mask: true };
    const masked = losses(await trained('masked-1', 1, { data }));
    expect(largestDifference(losses(await trained('masked-2', 2, { data })), masked)).toBeLessThan(1e-4);
  });

  onGpu('go on from a checkpoint bit for bit, and with another number of ranks', async () => {
    const train = { steps: 12, save_every: 6, eval_every: 0, lr_schedule: 'constant', zero: 1 };
    const whole = losses(await trained('undisturbed', 2, { train }));
    for (const world of [2, 1]) {
      const name = `on-${world}`;
      await trained(name, 2, { train: { ...train, steps: 6 } });
      const after = losses(await trained(name, world, { train }, ['--resume', 'auto']));
      if (world === 2) expect(after).toEqual(whole);
      else expect(largestDifference(after, whole)).toBeLessThan(1e-4);
    }
  });

  for (const [signal, verdict] of [
    ['SIGKILL', 'its process is gone'],
    ['SIGSTOP', 'kept the other ranks waiting for'],
  ] as const)
    onGpu(`name a rank that gets ${signal}, and stop`, async () => {
      const { started } = await start(signal, 2, { train: { steps: 100_000, eval_every: 0 } }, [], '0.2');
      try {
        await started[0].says('step 0005');
        const lost = performance.now();
        started[1].child.kill(signal);
        const { code, output } = await started[0].done;
        expect(performance.now() - lost).toBeLessThan(30_000);
        expect(code, output).toBe(1);
        expect(output).toMatch(new RegExp(`rank 1 on \\S+ \\(pid \\d+, section \\w+ at step \\d+\\): ${verdict}`));
      } finally {
        for (const { child } of started) child.kill('SIGKILL');
      }
    });
});
