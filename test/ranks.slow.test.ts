/**
 * Trainings on several ranks over MPI, as mpirun and `trefoil launch` start them: the numbers of one process, the same bits
 * every time, whatever way gradients take; and what happens when a rank is killed or stopped, or their number changes.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { runCli } from '../src/cli/testing/run.js';
import { readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { readSection, tailHeartbeats } from '../src/run/logs/heartbeat.js';
import { runPaths } from '../src/run/paths.js';
import { root, trefoil, trefoilMain } from '../src/testing/cli.js';
import { mpirunAbsence, startLaunch, startMpirun } from '../src/testing/ranks.js';
import { type TinyOverrides, temporaryFolder, tinyConfig } from '../src/testing/run.js';

const absence = mpirunAbsence();
const PROGRAM = join(root, 'test', 'ranks', 'program.mjs');
const STEPS = 50;
const LONG = process.env['TREFOIL_LONG'] === '1';
/** Kills and stops of ranks in one training; two are one of each. */
const FAULTS = Number(process.env['TREFOIL_FAULTS'] ?? (LONG ? 20 : 2));
/** Steps behind the last of them: the run must not be over before a busy machine lets this test see where it is. */
const TAIL = 200;

interface Outcome {
  readonly status: string;
  readonly losses: readonly number[];
  readonly said: readonly string[];
  readonly valLoss: number | null;
  readonly weights: string;
}
type Outcomes = Readonly<Record<string, Outcome>>;

let folder: ReturnType<typeof temporaryFolder>;

beforeAll(() => {
  folder = temporaryFolder();
  trefoilMain();
});
afterAll(() => folder.remove());

/** A global batch of 4 sequences: every number of ranks sees the same data. */
function config(name: string, ranks: number, overrides: TinyOverrides = {}) {
  const train = { steps: STEPS, seq_len: 64, batch_size: 4 / ranks, log_every: 1, eval_every: 25, save_every: 0 };
  return tinyConfig(folder.path, {
    ...overrides,
    runtime: { threads: 1, tensorboard: false, ...overrides.runtime },
    train: { ...train, out_dir: join(folder.path, name), ...overrides.train },
  });
}

async function trainAll(ranks: number, jobs: Record<string, TinyOverrides>): Promise<Outcomes> {
  const path = join(folder.path, `jobs-${ranks}.json`);
  const entries = Object.entries(jobs).map(([name, overrides]) => [
    name,
    { config: config(`${name}-${ranks}`, ranks, overrides) },
  ]);
  writeFileSync(path, JSON.stringify(Object.fromEntries(entries)));
  const { code, stdout, stderr } = await startMpirun(ranks, [process.execPath, PROGRAM, path]).ended;
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout);
}

/** The largest relative distance of two courses of losses. */
function distance(a: readonly number[], b: readonly number[]): number {
  expect(a).toHaveLength(b.length);
  return Math.max(...a.map((loss, i) => Math.abs(loss - b[i]) / Math.abs(b[i])));
}

/** Blocks so small that sequences of 64 tokens have some to choose from. */
const SCORED: TinyOverrides = { nsa: { l: 4, d: 2, l_sel: 4, n_sel: 7 }, train: { scorer_loss: 0.1 } };

describe('data parallel training on CPUs', () => {
  let one: Outcomes;
  let two: Outcomes;

  beforeAll(async () => {
    if (absence) return;
    one = await trainAll(1, { plain: {}, muon: { train: { optimizer: 'muon' } }, scored: SCORED });
    two = await trainAll(2, {
      plain: { train: { hash_every: 10 } },
      again: {},
      zero: { train: { zero: 1, save_every: 25 } },
      checkpointed: { runtime: { gradient_checkpointing: true }, train: { bucket_mb: 0.01 } },
      safe: { train: { ddp_safe: true, bucket_mb: 0.01 } },
      accumulated: { train: { batch_size: 1, accumulate_grad_batches: 2, bucket_mb: 0.02 } },
      bf16: { train: { wire: 'bf16' } },
      muon: { train: { optimizer: 'muon', hash_every: 10 } },
      masked: { data: { document_mask: true } },
      scored: SCORED,
    });
  });

  it('two ranks have the losses of one within 1e-6 over 50 steps, and its evaluations', ({ skip }) => {
    if (absence) skip(absence);
    expect(one['plain'].losses).toHaveLength(STEPS);
    expect(distance(two['plain'].losses, one['plain'].losses)).toBeLessThan(1e-6);
    expect(distance([two['plain'].valLoss!], [one['plain'].valLoss!])).toBeLessThan(1e-6);
    expect(one['plain'].losses[STEPS - 1]).toBeLessThan(0.9 * one['plain'].losses[0]);
  });

  it('four ranks too', async ({ skip }) => {
    if (absence) skip(absence);
    const four = await trainAll(4, { plain: { train: { zero: 1 } } });
    expect(distance(four['plain'].losses, one['plain'].losses)).toBeLessThan(1e-6);
  });

  it('a training is repeated bit for bit', ({ skip }) => {
    if (absence) skip(absence);
    expect(two['again'].weights).toBe(two['plain'].weights);
  });

  it.for(['zero', 'checkpointed', 'safe'])('%s gives the same bits', (name, { skip }) => {
    if (absence) skip(absence);
    expect(two[name].losses).toEqual(two['plain'].losses);
    expect(two[name].weights).toBe(two['plain'].weights);
  });

  it('accumulation gives the same numbers', ({ skip }) => {
    if (absence) skip(absence);
    expect(distance(two['accumulated'].losses, one['plain'].losses)).toBeLessThan(1e-6);
  });

  it('Muon has the losses of one process, and the same weights on all ranks', ({ skip }) => {
    if (absence) skip(absence);
    expect(two['muon'].status).toBe('done'); // hash_every has compared the weights
    expect(distance(two['muon'].losses, one['muon'].losses)).toBeLessThan(1e-4);
    expect(distance(two['muon'].losses, two['plain'].losses)).toBeGreaterThan(1e-2);
  });

  it('the scorer loss is that of one process', ({ skip }) => {
    if (absence) skip(absence);
    expect(distance(two['scored'].losses, one['scored'].losses)).toBeLessThan(1e-6);
    expect(distance(one['scored'].losses, one['plain'].losses)).toBeGreaterThan(1e-4);
  });

  it('bf16 on the wire is close, and is not the same', ({ skip }) => {
    if (absence) skip(absence);
    const apart = distance(two['bf16'].losses, one['plain'].losses);
    expect(apart).toBeLessThan(1e-2);
    expect(apart).toBeGreaterThan(1e-9);
  });

  it('ranks with different numbers of targets weigh them as one process does', async ({ skip }) => {
    if (absence) skip(absence);
    const masked = await trainAll(1, { masked: { data: { document_mask: true } } });
    expect(distance(two['masked'].losses, masked['masked'].losses)).toBeLessThan(1e-6);
  });

  it('ZeRO-1 saves the optimizer in parts, under one manifest', ({ skip }) => {
    if (absence) skip(absence);
    const { files } = JSON.parse(
      readFileSync(join(folder.path, 'zero-2', 'checkpoints', 'step-50', 'manifest.json'), 'utf8'),
    );
    expect(Object.keys(files).sort()).toEqual([
      ...['model.safetensors', 'optimizer-rank0.safetensors', 'optimizer-rank1.safetensors', 'state.json'],
    ]);
    const bytes = (name: string): number => files[`${name}.safetensors`].bytes;
    const moments = 2 * bytes('model');
    expect(bytes('optimizer-rank0')).toBeLessThan(0.6 * moments);
    expect(bytes('optimizer-rank1')).toBeLessThan(0.6 * moments);
  });

  it('every rank has a heartbeat, the first one the rest', ({ skip }) => {
    if (absence) skip(absence);
    const paths = runPaths(join(folder.path, 'plain-2'));
    for (const rank of [0, 1])
      expect(tailHeartbeats(paths.heartbeat(rank), 1)[0]).toMatchObject({ rank, world: 2, step: STEPS, msg: 'stop' });
    expect(existsSync(paths.section(0)) || existsSync(paths.section(1))).toBe(false);
    expect(readCsv(paths.training, TRAINING_CSV).rows).toHaveLength(STEPS);
    expect(JSON.parse(readFileSync(paths.metrics, 'utf8'))).toMatchObject({ ranks: 2, batch_size: 4 });
  });
});

describe('weights that differ between ranks', () => {
  it('are an alert that names the rank, and end the run without a checkpoint', async ({ skip }) => {
    if (absence) skip(absence);
    const path = join(folder.path, 'differ.json');
    const job = config('differ', 2, { train: { batch_size: 2, save_every: 1 } });
    writeFileSync(path, JSON.stringify({ differ: { config: job, seeds: [7, 7, 8] } }));
    const { code, stdout, stderr } = await startMpirun(3, [process.execPath, PROGRAM, path]).ended;
    expect(code, stderr).toBe(0);
    const { status, said, losses } = JSON.parse(stdout).differ;
    expect([status, losses]).toEqual(['ranks-differ', []]);
    expect(said.join('\n')).toMatch(/the weights differ between ranks: rank 2 on .* not as the others, after step 0/);
    const paths = runPaths(join(folder.path, 'differ'));
    expect(readFileSync(paths.anomalyType, 'utf8')).toBe('ranks_differ\n');
    expect(existsSync(paths.checkpoints)).toBe(false);
    for (const rank of [0, 1, 2])
      expect(tailHeartbeats(paths.heartbeat(rank), 1)[0]).toMatchObject({ msg: 'halt', rank });
    const health = await trefoil(['health', '--dir', join(folder.path, 'differ'), '--json']);
    expect(health.code).toBe(1);
    expect(JSON.parse(health.stdout).rows).toContainEqual(
      expect.objectContaining({ rule: 'anomaly', level: 'red', value: 'ranks_differ' }),
    );
  });
});

describe('a disk that takes the weights and not the parts of the optimizer', () => {
  let disk: string;
  let reason: string | null;

  beforeAll(() => {
    disk = join(folder.path, 'disk');
    mkdirSync(disk);
    const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=320k', 'tmpfs', disk], { encoding: 'utf8' });
    reason = mount.status === 0 ? null : `cannot mount a tmpfs: ${mount.error?.message ?? mount.stderr.trim()}`;
  });
  afterAll(() => {
    if (reason === null) spawnSync('umount', ['-l', disk]);
  });

  it('is a warning of all ranks together, and training goes on', async ({ skip }) => {
    if (absence ?? reason) skip(absence ?? reason!);
    const job = config('full', 2, { train: { steps: 4, save_every: 2, eval_every: 0, zero: 1 } });
    mkdirSync(job.train.out_dir);
    symlinkSync(disk, runPaths(job.train.out_dir).checkpoints);
    const path = join(folder.path, 'full.json');
    writeFileSync(path, JSON.stringify({ full: { config: job } }));
    const { code, stdout, stderr } = await startMpirun(2, [process.execPath, PROGRAM, path]).ended;
    expect(code, stderr).toBe(0);
    const { status, said, losses } = JSON.parse(stdout).full;
    expect([status, losses.length]).toEqual(['done', 4]);
    const failed = said.filter((line: string) => line.includes('was not saved'));
    expect(failed).toHaveLength(2);
    expect(failed[0]).toMatch(/checkpoint of step 2 was not saved: rank [01]: .*no space left.*training goes on/i);
    expect(readdirSync(disk)).toEqual([]);
  });
});

describe('collectives over MPI', () => {
  it('reduce, scatter, gather and broadcast every type, of any size, as float64 says', async ({ skip }) => {
    if (absence) skip(absence);
    const program = join(root, 'test', 'ranks', 'collectives.mjs');
    const { code, stdout, stderr } = await startMpirun(3, [process.execPath, program]).ended;
    expect(code, stderr).toBe(0);
    const { cases, failures } = JSON.parse(stdout);
    expect(failures).toEqual([]);
    expect(cases).toBeGreaterThan(50);
  });
});

/** Writes a config as a file for the command line. */
function configFile(name: string, ranks: number, overrides: TinyOverrides): string {
  const path = join(folder.path, `${name}.yaml`);
  writeFileSync(path, stringify(config(name, ranks, overrides)));
  return path;
}

async function until(isSo: () => boolean, what: string, seconds = 300): Promise<void> {
  const end = performance.now() + 1000 * seconds;
  while (!isSo()) {
    if (performance.now() > end) throw new Error(`waited ${seconds} s for ${what}`);
    await sleep(10);
  }
}

describe('a rank that is killed or stopped', () => {
  it.for(LONG ? [2, 3, 4] : [2, 4])(
    'of %i is named, the others end in time, and after the restart the weights are those of an undisturbed run',
    { timeout: FAULTS * 300_000 },
    async (ranks, { skip }) => {
      if (absence) skip(absence);
      const train = { steps: 60 * FAULTS + TAIL, save_every: 5, eval_every: 0, zero: 1 as const };
      const overrides = { train: { ...train, batch_size: Math.ceil(4 / ranks) } };
      const calm = configFile(`calm-${ranks}`, ranks, overrides);
      const quiet = startLaunch(['-n', `${ranks}`, '--', 'train', '--config', calm]);
      expect((await quiet.ended).code, quiet.output()).toBe(0);
      const troubled = configFile(`troubled-${ranks}`, ranks, overrides);
      const paths = runPaths(join(folder.path, `troubled-${ranks}`));
      const run = startLaunch(['-n', `${ranks}`, '--restarts', String(FAULTS), 'train', '--config', troubled], {
        NSA_PG_TIMEOUT_MIN: '0.3', // longer than a healthy rank of a busy machine keeps the other waiting
      });
      const hits: string[] = [];
      for (let fault = 0; fault < FAULTS; fault++) {
        const step = 60 * fault + 5 + Math.floor(40 * Math.random());
        const [rank, signal] = [ranks - 1 - (fault % ranks), fault % 3 === 1 ? 'SIGSTOP' : 'SIGKILL'] as const;
        await until(() => (readSection(paths.section(rank))?.step ?? 0) >= step, `step ${step}\n${run.output()}`);
        const section = readSection(paths.section(rank))!;
        const seen = run.output().length;
        process.kill(section.pid, signal);
        const hit = performance.now();
        await until(() => run.output().slice(seen).includes('; restarting ('), `a restart\n${run.output()}`);
        expect((performance.now() - hit) / 1000).toBeLessThan(90);
        hits.push(`${signal} of rank ${rank} at step ${section.step}`);
        expect(run.output().slice(seen)).toMatch(
          new RegExp(`rank ${rank}\\b.*pid ${section.pid}.*section \\w+ at step`),
        );
      }
      expect((await run.ended).code, run.output()).toBe(0);
      console.log(`${ranks} ranks: ${hits.join(', ')}`);
      const weights = (name: string) => readFileSync(runPaths(join(folder.path, name)).model);
      expect(weights(`troubled-${ranks}`).equals(weights(`calm-${ranks}`))).toBe(true);
      expect(readCsv(paths.training, TRAINING_CSV).rows.map(({ loss }) => loss)).toEqual(
        readCsv(runPaths(join(folder.path, `calm-${ranks}`)).training, TRAINING_CSV).rows.map(({ loss }) => loss),
      );
    },
  );

  it('a signal to one of them ends all with a checkpoint; launch passes signals and the exit code on', async ({
    skip,
  }) => {
    if (absence) skip(absence);
    const path = configFile('signalled', 2, { train: { steps: 100_000, save_every: 10, eval_every: 0 } });
    const paths = runPaths(join(folder.path, 'signalled'));
    const run = startLaunch(['-n', '2', 'train', '--config', path]);
    await until(() => (readSection(paths.section(1))?.step ?? 0) > 11, `step 11\n${run.output()}`);
    process.kill(readSection(paths.section(1))!.pid, 'SIGTERM');
    expect((await run.ended).code, run.output()).toBe(4);
    expect(run.output()).toMatch(/^\[0\] stopped after step \d+ by SIGTERM$/m);
    const [last] = tailHeartbeats(paths.heartbeat(1), 1);
    expect(last).toMatchObject({ msg: 'stop', rank: 1 });
    expect(existsSync(join(paths.checkpoints, `step-${last.step}`))).toBe(true);
    const again = startLaunch(['-n', '2', 'train', '--config', path, '--resume', 'auto']);
    await until(() => (readSection(paths.section(0))?.step ?? 0) > last.step, `more steps\n${again.output()}`);
    const second = startLaunch(['-n', '2', 'train', '--config', path, '--resume', 'auto']);
    expect((await second.ended).code, second.output()).toBe(2);
    expect(second.output()).toMatch(/^\[0\] trefoil: rank 0: .*the folder is in use by process \d+ on /m);
    const status = JSON.parse((await trefoil(['status', '--dir', join(folder.path, 'signalled'), '--json'])).stdout)
      .runs[0];
    expect(status.ranks.map(({ rank }: { rank: number }) => rank)).toEqual([0, 1]);
    again.child.kill('SIGTERM');
    expect((await again.ended).code, again.output()).toBe(4);
    const anew = startLaunch(['-n', '2', '--restarts', '2', 'train', '--config', path]);
    expect((await anew.ended).code, anew.output()).toBe(2);
    expect(anew.output()).toMatch(/holds a run already/);
    expect(anew.output()).not.toContain('; restarting (');
  });
});

describe('another number of ranks on resume', () => {
  it('2, 1 and 3 ranks keep the order of samples and the numbers', async ({ skip }) => {
    if (absence) skip(absence);
    const common = { eval_every: 0, save_every: 10, steps: 30 };
    const job = (ranks: number, name: string, zero: 0 | 1) =>
      config(name, 1, { train: { ...common, batch_size: 6 / ranks, zero } });
    const run = async (ranks: number, name: string, zero: 0 | 1, until: number | null, resume: string | null) => {
      const path = join(folder.path, `resume-${ranks}.json`);
      writeFileSync(path, JSON.stringify({ [name]: { config: job(ranks, name, zero), resume, until } }));
      const { code, stdout, stderr } = await startMpirun(ranks, [process.execPath, PROGRAM, path]).ended;
      expect(code, stderr).toBe(0);
      return JSON.parse(stdout)[name] as Outcome;
    };
    const whole = await run(1, 'whole', 0, null, null);
    const losses = [...(await run(2, 'parts', 1, 10, null)).losses, ...(await run(1, 'parts', 0, 20, 'auto')).losses];
    const last = await run(3, 'parts', 1, null, 'auto');
    expect(last.said.join('\n')).toContain('ranks: 1 -> 3 (6 sequences a step as before');
    expect(distance([...losses, ...last.losses], whole.losses)).toBeLessThan(1e-6);
  });
});

describe('the number of ranks', () => {
  it.each([[[]], [['-n', 'auto']]])('is one per CPU socket where there is no GPU: launch %j', async (flags) => {
    const out = join(folder.path, `sockets${flags.length}`);
    const words = ['train', '--device', 'cpu', '--config', 'small_smoke', '--steps', '2', '--out-dir', out];
    const { code, stderr } = await trefoil(['launch', ...flags, '--', ...words]);
    expect(code, stderr).toBe(0);
    expect(stderr).toMatch(/^launch: starting \d+ ranks? \(one per CPU socket\)/);
  });
});

describe('what ranks on CPUs refuse', () => {
  it('--ddp 0 as one of several ranks: it would be one more training in the folder', async () => {
    const words = ['train', '--config', 'small_smoke', '--device', 'cpu', '--ddp', '0', '--steps', '1'];
    const result = await trefoil(words, { env: { RANK: '1', WORLD_SIZE: '2' } });
    expect(result.code).toBe(2);
    expect(result.stderr).toContain('train.ddp: 0 trains on one rank, but this is one of several');
  });

  it('RANK and WORLD_SIZE without MPI', async () => {
    const result = await trefoil(['train', '--config', 'small_smoke', '--device', 'cpu'], {
      env: { RANK: '0', WORLD_SIZE: '2' },
    });
    expect(result.code).toBe(2);
    expect(result.stderr).toContain('use `trefoil launch -n 2 -- train …` or `mpirun -n 2');
  });

  it.each([
    [['launch'], 'command missing'],
    [['launch', '-n', '2', 'generate'], 'command missing'],
    [['launch', '-n', '0', 'train'], "argument '0' is invalid. It must be an integer >= 1, or auto."],
    [['launch', '--nodes', '2', 'train'], "unknown option '--nodes'"],
    [
      ['launch', '-n', '2', 'train', '--device', 'cpu', '--config', 'small_smoke', '--ddp', '0'],
      'train.ddp: 0 trains on one rank, but launch starts 2; leave out one of the two [flag --ddp]',
    ],
    [['launch', '-n', '2', '--', 'train', '--stpes', '3'], "unknown option '--stpes' (did you mean --steps?)"],
  ])('%j', async (words, message) => {
    const { code, stderr } = await runCli(words);
    expect(code).toBe(2);
    expect(stderr).toContain(message);
  });
});
