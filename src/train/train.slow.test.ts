import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import type { Config } from '../config/schema.js';
import { findCheckpoint } from '../run/checkpoint/read.js';
import { readCsv, TRAINING_CSV, VAL_CSV } from '../run/logs/csv.js';
import { tailHeartbeats } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { readSafetensors } from '../run/safetensors.js';
import { cpu } from '../testing/devices.js';
import { runTraining, temporaryFolder, tinyConfig } from '../testing/run.js';
import type { CheckpointRecord, EvaluationRecord } from './options.js';
import { train } from './train.js';
import type { TrainingStep } from './trainer.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const rows = (config: Config) =>
  readCsv(runPaths(config.train.out_dir).training, TRAINING_CSV).rows.map(({ step, loss, lr }) => ({ step, loss, lr }));
const weights = (config: Config) => readSafetensors(runPaths(config.train.out_dir).model).tensors;

describe('train', () => {
  it('leaves every file of a run, and the loss falls', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 60, log_every: 20, eval_every: 30, save_every: 25 } });
    const { result } = await runTraining(config, { save: join(folder.path, 'extra.safetensors') });
    expect(result.status).toBe('done');
    expect(result.lastLoss!).toBeLessThan(result.firstLoss! - 0.7);
    const paths = runPaths(config.train.out_dir);
    expect(rows(config).map(({ step }) => step)).toEqual([1, 20, 40, 60]);
    expect(readCsv(paths.val, VAL_CSV).rows.map(({ step }) => step)).toEqual([30, 60]);
    const beats = tailHeartbeats(paths.heartbeat(0), 100);
    expect(beats.filter(({ msg }) => msg === 'progress')).toHaveLength(60);
    expect(beats.slice(0, 2).map(({ msg }) => msg)).toEqual(['boot', 'loader_ready']);
    expect(beats.at(-1)!.msg).toBe('stop');
    const step = beats.find(({ step: at, msg }) => at === 7 && msg === 'progress')!;
    expect(step.gate_entropy_mean!).toBeGreaterThan(1);
    expect(step.gate_branch_shares).toHaveLength(3);
    expect(step.sel_k_max).toBe(4);
    expect(step.grad_norm!).toBeGreaterThan(0);
    expect(step.data).toBe('text');
    for (const file of [
      paths.metrics,
      paths.env,
      paths.config,
      paths.model,
      paths.modelConfig,
      paths.kStats,
      paths.tensorboard,
    ])
      expect(existsSync(file), file).toBe(true);
    expect(readSafetensors(join(folder.path, 'extra.safetensors')).tensors).toEqual(weights(config));
    const metrics = JSON.parse(readFileSync(paths.metrics, 'utf8'));
    expect(metrics).toMatchObject({ status: 'done', step: 60, device: 'cpu', dtype: 'fp32', tokens_seen: 60 * 128 });
  });

  it('never reports an MFU above 1: a step that exceeds the measured peak raises it', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 5 } });
    await runTraining(config, { peakFlops: 1 });
    const shares = tailHeartbeats(runPaths(config.train.out_dir).heartbeat(0), 100).flatMap(({ mfu }) => mfu ?? []);
    expect(shares).toHaveLength(5);
    expect(Math.max(...shares)).toBe(1);
    expect(Math.min(...shares)).toBeGreaterThan(0);
  });

  it('keeps the lines that it prints in run.log, also those of a resumed run', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 4, save_every: 2, eval_every: 0 } });
    const { said: first, warned } = await runTraining(config);
    const { said: second } = await runTraining({ ...config, train: { ...config.train, steps: 6 } }, { resume: 'auto' });
    const log = readFileSync(runPaths(config.train.out_dir).log, 'utf8').split('\n');
    expect(log.filter((line) => line.startsWith('step '))).toHaveLength(
      [...first, ...second].filter((line) => line.startsWith('step ')).length,
    );
    expect(log).toEqual(expect.arrayContaining([...first, ...second, ...warned.map((line) => `warning: ${line}`)]));
  });

  it('refuses to save weights under the name of another format, before anything is created', async () => {
    const config = tinyConfig(folder.path);
    const save = join(folder.path, 'model.pt');
    await expect(runTraining(config, { save })).rejects.toThrow('name it FILE.safetensors');
    expect([existsSync(save), existsSync(config.train.out_dir)]).toEqual([false, false]);
  });

  it('gives the same bits twice with one seed, and others with another', async () => {
    const configs = ['a', 'b', 'c'].map((name) =>
      tinyConfig(folder.path, { train: { steps: 6, out_dir: join(folder.path, name), seed: name === 'c' ? 2 : 1 } }),
    );
    for (const config of configs) await runTraining(config);
    expect(rows(configs[1])).toEqual(rows(configs[0]));
    expect(weights(configs[1])).toEqual(weights(configs[0]));
    expect(rows(configs[2])).not.toEqual(rows(configs[0]));
  });

  it('resumes exactly: losses, evaluations and weights of an interrupted run are those of a whole one', async () => {
    const whole = tinyConfig(folder.path, { train: { out_dir: join(folder.path, 'whole') } });
    await runTraining(whole);
    const parts = tinyConfig(folder.path, { train: { out_dir: join(folder.path, 'parts') } });
    let signalled = false;
    const first = await runTraining(parts, {
      onLine: (line, signals) => {
        if (line.startsWith('step 0007') && !signalled) signals.emit('SIGTERM');
        signalled ||= line.startsWith('step 0007');
      },
    });
    expect(first.result).toMatchObject({ status: 'signalled', step: 7 });
    const second = await runTraining(parts, { resume: 'auto' });
    expect(second.said.some((line) => line.startsWith('resumed from') && line.endsWith('at step 7'))).toBe(true);
    expect(rows(parts)).toEqual(rows(whole));
    const val = (config: Config) => readFileSync(runPaths(config.train.out_dir).val, 'utf8');
    expect(val(parts)).toBe(val(whole));
    expect(weights(parts)).toEqual(weights(whole));
  });

  it.each([false, true])('accumulates gradients to those of the one big batch, document_mask %s', async (mask) => {
    const data = { document_mask: mask };
    const big = tinyConfig(folder.path, {
      data,
      train: { batch_size: 4, out_dir: join(folder.path, 'big'), eval_every: 0, save_every: 0 },
    });
    const small = tinyConfig(folder.path, {
      data,
      train: {
        batch_size: 1,
        accumulate_grad_batches: 4,
        out_dir: join(folder.path, 'small'),
        eval_every: 0,
        save_every: 0,
      },
    });
    await runTraining(big);
    await runTraining(small);
    rows(big).forEach(({ loss }, i) => {
      expect(Math.abs(rows(small)[i].loss - loss)).toBeLessThan(1e-6 * Math.max(1, Math.abs(loss)) * 2);
    });
  });

  it('gives the same bits with gradient checkpointing', async () => {
    const plain = tinyConfig(folder.path, { train: { steps: 5, out_dir: join(folder.path, 'plain') } });
    const checkpointed = tinyConfig(folder.path, {
      runtime: { gradient_checkpointing: true },
      train: { steps: 5, out_dir: join(folder.path, 'checkpointed') },
    });
    await runTraining(plain);
    await runTraining(checkpointed);
    expect(rows(checkpointed)).toEqual(rows(plain));
  });

  it('halts on .HALT after a checkpoint, and goes on when asked', async () => {
    const config = tinyConfig(folder.path);
    const paths = runPaths(config.train.out_dir);
    const { result } = await runTraining(config, {
      onLine: (line) => line.startsWith('step 0003') && writeFileSync(paths.halt, 'enough'),
    });
    expect(result).toMatchObject({ status: 'halted', step: 3 });
    expect(findCheckpoint(config.train.out_dir, 'auto')!.step).toBe(3);
    expect(existsSync(paths.model)).toBe(false);
    expect((await runTraining(config, { resume: 'auto' })).result.status).toBe('done');
  });

  it('stops after the step that a program aborted in, with a checkpoint, and tells it of every step', async () => {
    const config = tinyConfig(folder.path, { train: { log_every: 5, save_every: 0, eval_every: 0 } });
    const controller = new AbortController();
    const losses: number[] = [];
    const onStep = ({ step, loss }: TrainingStep) => {
      losses.push(loss);
      if (step === 3) controller.abort();
    };
    const { result, said } = await runTraining(config, { signal: controller.signal, onStep });
    expect(result).toMatchObject({ status: 'signalled', step: 3, firstLoss: losses[0], lastLoss: losses[2] });
    expect(losses).toHaveLength(3);
    expect(said).toContain('stopped after step 3 by abort');
    expect(findCheckpoint(config.train.out_dir, 'auto')!.step).toBe(3);
  });

  it('reports evaluations and checkpoints to the program', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 9 } });
    const evaluations: EvaluationRecord[] = [];
    const checkpoints: CheckpointRecord[] = [];
    const { result } = await runTraining(config, {
      onEvaluation: (record) => evaluations.push(record),
      onCheckpoint: (record) => checkpoints.push(record),
    });
    expect(evaluations.map(({ step }) => step)).toEqual([5, 9]);
    expect(evaluations[1].loss).toBe(result.valLoss);
    expect(checkpoints.map(({ step }) => step)).toEqual([4, 5, 8, 9]);
    expect(existsSync(checkpoints[3].path!)).toBe(true);
  });

  it('reports when the checkpoint is already beyond train.steps', async () => {
    await runTraining(tinyConfig(folder.path, { train: { steps: 8 } }));
    const { result, warned } = await runTraining(tinyConfig(folder.path, { train: { steps: 4 } }), { resume: 'auto' });
    expect(result).toMatchObject({ status: 'done', step: 8 });
    expect(warned).toEqual([
      'train.steps is 4, but the checkpoint is already at step 8: nothing is trained; use --steps with more than 8',
    ]);
  });

  it('needs no more than a config and a device, and installs no signal handlers', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 2 } });
    const signals = ['SIGTERM', 'SIGINT', 'SIGUSR1', 'SIGUSR2'];
    const handlers = () => signals.map((signal) => process.listenerCount(signal));
    const [before, warnings] = [handlers(), vi.spyOn(console, 'warn').mockReturnValue()];
    const during: number[][] = [];
    const onStep = () => during.push(handlers());
    expect(await train({ config, device: cpu(), onStep })).toMatchObject({ status: 'done', step: 2 });
    expect([...during, handlers()]).toEqual([before, before, before]);
    expect(warnings).not.toHaveBeenCalled();
    warnings.mockRestore();
  });

  it('saves on SIGUSR2 and dumps on SIGUSR1, and goes on', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 200, save_every: 0, eval_every: 0 } });
    const { result, said, warned } = await runTraining(config, {
      onLine: (line, signals) => {
        if (line.startsWith('step 0002')) signals.emit('SIGUSR2');
        if (line.startsWith('step 0003')) signals.emit('SIGUSR1');
      },
    });
    expect(result.status).toBe('done');
    expect(findCheckpoint(config.train.out_dir, 'auto')!.step).toBe(2);
    expect(said).toContain('saved the checkpoint of step 2 (SIGUSR2); it stays until you delete it');
    const dump = readFileSync(
      warned.find((line) => line.startsWith('SIGUSR1'))!.replace('SIGUSR1: wrote ', ''),
      'utf8',
    );
    expect(JSON.parse(dump)).toMatchObject({ step: 3, section: 'step', rank: 0, after: { step: expect.any(Number) } });
    // The steps themselves, not the handler of the signal.
    const frames = (JSON.parse(dump).stacks as { frames: string[] }[]).flatMap((stack) => stack.frames).join('\n');
    expect(frames).toContain('/step.');
    expect(frames).not.toContain('getReport');
    expect(dump).not.toContain('environmentVariables');
  });

  it('stops on SIGHUP as on SIGTERM: the terminal is gone, the work is not', async () => {
    const config = tinyConfig(folder.path, { train: { save_every: 0, eval_every: 0 } });
    const { result, said } = await runTraining(config, {
      onLine: (line, signals) => line.startsWith('step 0003') && signals.emit('SIGHUP'),
    });
    expect(result).toMatchObject({ status: 'signalled', step: 3 });
    expect(said).toContain('stopped after step 3 by SIGHUP');
    expect(findCheckpoint(config.train.out_dir, 'auto')!.step).toBe(3);
  });

  it('estimates the time left without the first step, which compiles kernels, and removes the live line at the end', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 3, save_every: 0, eval_every: 0 } });
    let shown = '';
    const terminal = { isTTY: true, columns: 100, write: (text: string) => (shown += text) };
    await train({ config, device: cpu(), terminal, say: () => {}, warn: () => {} });
    expect(shown).toMatch(/ 1\/3 .* \? left/);
    expect(shown).toMatch(/ 2\/3 .* \d+:\d\d left/);
    expect(shown.endsWith('\r\x1b[K')).toBe(true); // whatever is printed next has a line of its own
  });

  it('says that nothing is left to do when all steps are done', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 4 } });
    await runTraining(config);
    const { said } = await runTraining(config, { resume: 'auto' });
    expect(said).toContain('all 4 steps are done; --steps with more than 4 continues');
  });

  it('says what a failed save of the last step means', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 4, save_every: 2, eval_every: 0 } });
    let saves = 0;
    const { warned } = await runTraining(config, {
      saveOptions: {
        onWrite: () => {
          if (saves > 0) throw Object.assign(new Error('no space'), { code: 'ENOSPC', syscall: 'write', errno: -28 });
        },
      },
      onCheckpoint: () => {
        saves += 1;
      },
    });
    expect(warned.join('\n')).toContain('this was the last step, so --resume auto would continue from step 2');
  });

  it('applies nothing when the loss is not finite, and says where to look', async () => {
    const config = tinyConfig(folder.path, {
      train: { lr: 1e30, grad_clip: 0, warmup_steps: 0, save_every: 1, eval_every: 0 },
    });
    const { result, warned } = await runTraining(config);
    expect(result.status).toBe('non-finite');
    const paths = runPaths(config.train.out_dir);
    expect(readFileSync(paths.anomalyType, 'utf8').trim()).toMatch(/^nonfinite_(loss|gradient)$/);
    expect(existsSync(paths.halt)).toBe(true);
    const dump = JSON.parse(readFileSync(join(config.train.out_dir, `anomaly_step${result.step + 1}.json`), 'utf8'));
    expect(dump.batches[0].sample_ids).toHaveLength(2);
    expect(dump.parameters.length).toBeGreaterThan(10);
    expect(warned.at(-1)).toContain('the update was not applied');
    expect(findCheckpoint(config.train.out_dir, 'auto')!.step).toBe(result.step);
  });

  it('refuses a folder that holds a run, and a model of another shape on resume', async () => {
    const config = tinyConfig(folder.path, { train: { steps: 4 } });
    await runTraining(config);
    await expect(runTraining(config)).rejects.toThrow(
      "go on with --resume auto or choose another --out-dir (in TypeScript: resume: 'auto' or train.out_dir)",
    );
    const other = tinyConfig(folder.path, { model: { dim: 48 }, train: { steps: 4 } });
    await expect(runTraining(other, { resume: 'auto' })).rejects.toThrow(
      /^model\.dim: 32 -> 48 is not allowed on resume; keep 32\nthe config of that run: --config \S+\/config\.yaml$/,
    );
  });

  it('refuses a bad resume before data is opened or tokenised', async () => {
    await runTraining(tinyConfig(folder.path, { train: { steps: 4 } }));
    vi.stubEnv('TREFOIL_CACHE', join(folder.path, 'cache'));
    try {
      for (const [overrides, message] of [
        [{ model: { dim: 48 } }, 'model.dim: 32 -> 48 is not allowed on resume'],
        [{ data: { path: join(folder.path, 'nothing-here') }, model: { dim: 48 } }, 'model.dim: 32 -> 48'],
      ] as const)
        await expect(runTraining(tinyConfig(folder.path, overrides), { resume: 'auto' })).rejects.toThrow(message);
      const missing = runTraining(tinyConfig(folder.path), { resume: join(folder.path, 'run/checkpoints/step-99') });
      await expect(missing).rejects.toThrow('step-99: there is no such checkpoint');
      expect(existsSync(join(folder.path, 'cache', 'data'))).toBe(false);
    } finally {
      vi.unstubAllEnvs();
    }
  });

  it('prints what changed when a run is resumed with another setting', async () => {
    await runTraining(tinyConfig(folder.path, { train: { steps: 4 } }));
    const { said } = await runTraining(tinyConfig(folder.path, { train: { steps: 6, lr: 1e-4 } }), { resume: 'auto' });
    expect(said).toContain('changed since: train.lr: 0.003 -> 0.0001');
    expect(said).toContain('changed since: train.steps: 4 -> 6');
  });

  it('trains dense attention on the same data', async () => {
    const config = tinyConfig(folder.path, { model: { attention: 'dense' }, train: { steps: 40, eval_every: 0 } });
    const { result } = await runTraining(config);
    expect(result.lastLoss!).toBeLessThan(result.firstLoss! - 0.5);
  });

  it('never learns uniform random tokens: a leak would', async () => {
    const config = tinyConfig(folder.path, {
      data: { source: 'synthetic', path: null, vocab_size: 64 },
      model: { dim: 64, n_layers: 2 },
      train: { steps: 150, batch_size: 8, seq_len: 128, lr: 3e-3, eval_every: 0, save_every: 0 },
    });
    await runTraining(config);
    const tail = rows(config)
      .slice(-30)
      .map(({ loss }) => loss);
    const mean = tail.reduce((sum, loss) => sum + loss, 0) / tail.length;
    expect(mean).toBeGreaterThan(Math.log(64) - 0.02);
  });

  describe('switches of runtime and data', () => {
    const short = { steps: 2, eval_every: 0, save_every: 0 };

    it('debug_timing, print_kernels and debug_compare say what they measure', async () => {
      const config = tinyConfig(folder.path, {
        runtime: { debug_timing: true, print_kernels: true, debug_compare: true, strict_asserts: true },
        train: short,
      });
      const { said } = await runTraining(config);
      expect(said.some((line) => /^timing 1 \| fetch .*ms \| gradients .*ms \| update .*ms$/.test(line))).toBe(true);
      expect(said).toContain('attention kernels at S = 64: cmp = cpu fp32, score = cpu fp32, sel = v1, win = cpu fp32');
      const compared = said.find((line) => line.startsWith('compare 1 |'))!;
      expect(Number(compared.split(' ').at(-1))).toBeLessThan(2e-5);
    });

    it('reference_kernels trains with the float64 reference, to the same losses but for rounding', async () => {
      const [fast, slow] = [false, true].map((reference_kernels) =>
        tinyConfig(folder.path, {
          runtime: { reference_kernels },
          train: { ...short, out_dir: join(folder.path, String(reference_kernels)) },
        }),
      );
      await runTraining(fast);
      await runTraining(slow);
      rows(fast).forEach(({ loss }, i) => {
        expect(Math.abs(rows(slow)[i].loss - loss)).toBeLessThan(1e-5);
      });
    });

    it('selection kernels give the same bits', async () => {
      const kernels = [{ selection_kernel: 'v1' }, { selection_kernel: 'v2' }, { selection_v2_min_len: 1 }];
      const configs = kernels.map((runtime, i) =>
        tinyConfig(folder.path, { runtime, train: { ...short, out_dir: join(folder.path, `k${i}`) } }),
      );
      for (const config of configs) await runTraining(config);
      expect(rows(configs[1])).toEqual(rows(configs[0]));
      expect(rows(configs[2])).toEqual(rows(configs[0]));
    });

    it('leaves out the files that are switched off', async () => {
      const config = tinyConfig(folder.path, {
        runtime: { tensorboard: false, csv_logs: false, aux_stats: false },
        train: short,
      });
      await runTraining(config);
      const paths = runPaths(config.train.out_dir);
      expect([paths.tensorboard, paths.training, paths.val].map((path) => existsSync(path))).toEqual([
        false,
        false,
        false,
      ]);
      expect(tailHeartbeats(paths.heartbeat(0), 5).some((beat) => beat.gate_entropy_mean !== undefined)).toBe(false);
    });

    it('prints samples at an interval of steps', async () => {
      const { said } = await runTraining(tinyConfig(folder.path, { train: { ...short, sample_every: 2 } }));
      expect(said.filter((line) => line.startsWith('sample '))).toHaveLength(1);
    });

    it('refuses several ranks where no launcher started any', async () => {
      await expect(runTraining(tinyConfig(folder.path, { train: { ...short, ddp: 1 } }))).rejects.toThrow('train.ddp');
    });

    it('skips the update of a spike when asked, and counts it', async () => {
      const config = tinyConfig(folder.path, {
        train: { steps: 40, eval_every: 0, save_every: 0, spike_skip: true, spike_z: 0.5 },
      });
      const { warned } = await runTraining(config);
      const skipped = warned.filter((line) => line.includes('; update skipped')).length;
      expect(skipped).toBeGreaterThan(0);
      const metrics = JSON.parse(readFileSync(runPaths(config.train.out_dir).metrics, 'utf8'));
      expect(metrics).toMatchObject({ spikes: skipped, skipped_updates: skipped });
    });
  });
});
