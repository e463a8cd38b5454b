/**
 * A rank on a GPU is lost, wherever it is lost: the other one names it and ends in time. The ranks are processes of the real
 * command line; their GPU computes nothing and their NCCL is a library of the tests (idle-gpu.cpp), since only there can a
 * rank be lost inside a given call, and calls block as they do when a GPU waits for ever. ranks-cuda.test.ts has the real ones.
 */
import { spawnSync } from 'node:child_process';
import { existsSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { processState } from '../process-identity.js';
import { readAnomaly, runPaths } from '../run/paths.js';
import { ended, startProgram, trefoilMain } from '../testing/cli.js';
import { buildIdleGpu, type IdleGpu, idleGpuAbsence } from '../testing/idle-gpu.js';
import { type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';
import { freeStorePort } from '../testing/store-port.js';

const absence = idleGpuAbsence();
const namespaces =
  spawnSync('unshare', ['--uts', 'hostname', 'elsewhere']).status === 0
    ? null
    : 'no right to give a process a host name';
/** Longer than healthy ranks of a busy machine keep each other waiting. */
const TIMEOUT_MINUTES = '0.2';
/** Until the other one has ended: the time limit, and what a busy machine needs beyond it. */
const PROMISED_MS = 90_000;

let gpu: IdleGpu;
let folder: { path: string; remove: () => void };
beforeAll(() => {
  if (absence) return;
  gpu = buildIdleGpu();
  folder = temporaryFolder();
});
afterAll(() => {
  gpu?.remove();
  folder?.remove();
});

interface Case {
  /** Faults inside a call of rank 1, and of rank 0: function, which call of it, what happens. */
  readonly faults: readonly [first: string, second: string];
  /** How CUDA and NCCL behave. */
  readonly behaviour?: Readonly<Record<string, string>>;
  readonly config?: TinyOverrides;
  /** Rank 1 is on a machine of another name. */
  readonly isElsewhere?: boolean;
  /** NSA_PG_TIMEOUT_MIN. */
  readonly minutes?: string;
}

/** One pair of ranks starts at a time: more would keep each other waiting on a machine of two cores. */
let turn: Promise<unknown> = Promise.resolve();

/** Starts both ranks and waits for the end of rank 0, which has to come soon after rank 1 was lost. */
async function loseRank(name: string, lost: Case) {
  const started = turn.then(() => startRanks(name, lost));
  turn = started.catch(() => {}); // a failure is this test's, not that of the next in line
  const { ranks, outDir, lostAt } = await started;
  const [first] = ranks;
  try {
    const end = await Promise.race([first.done, sleep(PROMISED_MS + 5000).then(() => null)]);
    expect(end, `rank 0 hangs: ${first.output()}`).not.toBeNull();
    expect(performance.now() - lostAt).toBeLessThan(PROMISED_MS);
    return { ...end!, outDir, output: first.output() };
  } finally {
    for (const { child } of ranks) child.kill('SIGKILL');
  }
}

/** Starts both ranks and waits until rank 1 is lost. */
async function startRanks(name: string, lost: Case) {
  const { faults, behaviour = {}, config = {}, isElsewhere = false, minutes = TIMEOUT_MINUTES } = lost;
  const place = join(folder.path, name.replaceAll(' ', '-'));
  const outDir = join(place, 'run');
  const text = tinyConfig(place, {
    ...config,
    runtime: { device: 'cuda', deterministic: true, ...config.runtime },
    train: { steps: 1_000_000, eval_every: 0, save_every: 0, bucket_mb: 0.05, out_dir: outDir, ...config.train },
  });
  const file = join(place, 'config.yaml');
  writeFileSync(file, stringify(text));
  const port = await freeStorePort();
  const started = performance.now();
  const ranks = [0, 1].map((rank) => {
    const command = [process.execPath, trefoilMain(), 'train', '--config', file];
    const there = ['unshare', '--uts', 'sh', '-c', 'hostname elsewhere && exec "$0" "$@"'];
    const [program, ...words] = rank === 1 && isElsewhere ? [...there, ...command] : command;
    const child = startProgram(program, words, {
      ...gpu.env,
      ...behaviour,
      IDLE_GPU_FAULT: faults[1 - rank],
      RANK: `${rank}`,
      WORLD_SIZE: '2',
      LOCAL_RANK: `${rank}`,
      TREFOIL_SHARE_GPU: '1',
      MASTER_ADDR: '127.0.0.1',
      MASTER_PORT: `${port}`,
      NSA_PG_TIMEOUT_MIN: minutes,
    });
    let output = '';
    for (const stream of [child.stdout!, child.stderr!])
      stream.setEncoding('utf8').on('data', (piece: string) => {
        output += piece;
      });
    return { child, output: () => output, done: ended(child) };
  });
  while (processState(ranks[1].child.pid!) === 'running') {
    if (performance.now() - started > 300_000) {
      for (const { child } of ranks) child.kill('SIGKILL');
      throw new Error(`rank 1 was not lost: ${ranks[1].output()}`);
    }
    await sleep(20);
  }
  return { ranks, outDir, lostAt: performance.now() };
}

const who = 'rank 1 on \\S+ \\(pid \\d+';
const gone = (where: string) => new RegExp(`^trefoil: rank 0: ${who}, ${where}\\): its process is gone`, 'm');
const stalls = (where: string) =>
  new RegExp(`^trefoil: rank 0: ${who}, ${where}\\): kept the other ranks waiting`, 'm');
const NOWHERE = 'no section known';
/** The log thread writes the section: a rank that is stopped right after it entered a step may still be listed in one before. */
const STEP = 'section (?:between|fetch|step) at step \\d+';
/** In the first step that thread may not have written anything yet. */
const FIRST_STEP = `(?:section \\w+ at step \\d+|${NOWHERE})`;

/** Every step launched one by one, and enough launches to fill a small queue. */
const eager: TinyOverrides = { runtime: { cuda_graph: false }, train: { zero: 1 } };
const shortQueue = { IDLE_GPU_QUEUE: '20' };

// Concurrent: after the start all of them mostly wait.
describe.concurrent('a rank on a GPU that is lost', () => {
  const onIdleGpu = (name: string, body: () => Promise<void>) =>
    it(name, async (context) => {
      if (absence) return context.skip(absence);
      await body();
    });

  onIdleGpu('while they join', async () => {
    const { signal, output } = await loseRank('join', { faults: ['ncclCommInitRank:1:KILL', ''] });
    expect(output).toMatch(gone(NOWHERE));
    expect(signal).toBe('SIGKILL'); // a thread that never returns cannot leave by itself
  });

  onIdleGpu('before there is a run: killed', async () => {
    const { code, output } = await loseRank('boot', { faults: ['ncclAllReduce:1:KILL', ''] });
    expect(output).toMatch(gone(NOWHERE));
    expect(code).toBe(1);
  });

  onIdleGpu('before there is a run: stopped', async () => {
    const { code, output } = await loseRank('boot stop', { faults: ['ncclAllReduce:2:STOP', ''] });
    expect(output).toMatch(stalls(NOWHERE));
    expect(code).toBe(1);
  });

  onIdleGpu('in a step that is a graph: killed', async () => {
    const { code, output, outDir } = await loseRank('graph', { faults: ['cuGraphLaunch:5:KILL', ''] });
    expect(output).toMatch(gone(STEP));
    expect([code, readAnomaly(outDir)]).toEqual([1, 'rank_gone']);
  });

  onIdleGpu('in a step that is a graph: stopped', async () => {
    const { code, output, outDir } = await loseRank('graph stop', { faults: ['cuGraphLaunch:5:STOP', ''] });
    expect(output).toMatch(stalls(STEP));
    expect([code, readAnomaly(outDir)]).toEqual([1, 'rank_stall']);
  });

  for (const [signal, verdict, anomaly] of [
    ['KILL', gone(FIRST_STEP), 'rank_gone'],
    ['STOP', stalls(FIRST_STEP), 'rank_stall'],
  ] as const)
    onIdleGpu(`while a launch blocks because the queue is full: ${signal}`, async () => {
      const faults = [`ncclReduceScatter:10:${signal}`, ''] as const;
      const found = await loseRank(`queue ${signal}`, { faults, behaviour: shortQueue, config: eager });
      expect(found.output).toMatch(verdict);
      expect([found.signal, readAnomaly(found.outDir)]).toEqual(['SIGKILL', anomaly]);
    });

  onIdleGpu('while taking memory waits for the GPU', async () => {
    const faults = ['ncclReduceScatter:1:KILL', ''] as const;
    const behaviour = { IDLE_GPU_IMPLICIT: '1' };
    const { signal, output } = await loseRank('memory', { faults, behaviour, config: eager });
    expect(output).toMatch(gone(FIRST_STEP));
    expect(signal).toBe('SIGKILL');
  });

  onIdleGpu('while NCCL connects on first use', async () => {
    const faults = ['ncclAllGather:1:STOP', ''] as const;
    const behaviour = { IDLE_GPU_CONNECT: '1' };
    const { signal, output } = await loseRank('connect', { faults, behaviour, config: { train: { zero: 1 } } });
    expect(output).toMatch(stalls(FIRST_STEP));
    expect(signal).toBe('SIGKILL');
  });

  onIdleGpu('does not keep one that ends for a reason of its own', async () => {
    const { code, output } = await loseRank('own', { faults: ['cuGraphLaunch:3:STOP', 'cuGraphLaunch:3:700'] });
    expect(output).toMatch(/^trefoil: rank 0: CUDA: cuGraphLaunch failed/m);
    expect(code).toBe(1);
  });

  onIdleGpu('at the very end, when all files are written', async () => {
    const faults = ['ncclCommFinalize:1:STOP', ''] as const;
    const { signal, output, outDir } = await loseRank('end', { faults, config: { train: { steps: 4 } } });
    expect(output).toMatch(/^done: .*\n(.*\n)*trefoil: rank 0: leaving NCCL took longer than \d+ s/m);
    expect(signal).toBe('SIGKILL');
    expect(existsSync(runPaths(outDir).model)).toBe(true);
  });

  const onTwoMachines = (name: string, body: () => Promise<void>) =>
    it(name, async (context) => {
      if (absence ?? namespaces) return context.skip((absence ?? namespaces)!);
      await body();
    });

  onTwoMachines('on another machine, and NCCL tells that somebody is gone', async () => {
    const faults = ['cuGraphLaunch:5:KILL', ''] as const;
    const behaviour = { IDLE_GPU_REPORTS: '1' };
    const { code, output } = await loseRank('elsewhere', { faults, behaviour, isElsewhere: true, minutes: '15' });
    // The store's word or the lifeline's, whichever comes first.
    expect(output).toMatch(/^trefoil: rank 0: rank 1 on elsewhere \(pid \d+(, section .*)?\)(: its process)? is gone/m);
    expect(code).toBe(1);
  });

  onTwoMachines('on another machine, and NCCL tells nothing', async () => {
    const faults = ['cuGraphLaunch:5:KILL', ''] as const;
    const { code, output } = await loseRank('silent', { faults, isElsewhere: true, minutes: '15' });
    expect(output).toMatch(gone(STEP));
    expect(output).toContain('rank 1 on elsewhere');
    expect(code).toBe(1);
  });

  onTwoMachines('on another machine, while a launch blocks', async () => {
    const faults = ['ncclReduceScatter:10:KILL', ''] as const;
    const way = { behaviour: shortQueue, config: eager, isElsewhere: true, minutes: '15' };
    const { signal, output, outDir } = await loseRank('silent queue', { faults, ...way });
    expect(output).toMatch(gone(FIRST_STEP));
    expect([signal, readAnomaly(outDir)]).toEqual(['SIGKILL', 'rank_gone']);
  });

  onTwoMachines('on another machine, before there is a run: stopped', async () => {
    const faults = ['ncclAllReduce:2:STOP', ''] as const;
    const { code, output } = await loseRank('boot stop elsewhere', { faults, isElsewhere: true });
    expect(output).toMatch(stalls(NOWHERE));
    expect(output).toContain('rank 1 on elsewhere');
    expect(code).toBe(1);
  });

  onTwoMachines('on another machine, while they join: stopped', async () => {
    const faults = ['ncclCommInitRank:1:STOP', ''] as const;
    const { signal, output } = await loseRank('join stop elsewhere', { faults, isElsewhere: true });
    expect(output).toMatch(stalls(NOWHERE));
    expect(output).toContain('rank 1 on elsewhere');
    expect(signal).toBe('SIGKILL');
  });
});
