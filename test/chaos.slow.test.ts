/**
 * Chaos: a training that streams from a hub, under random faults and started again after each, ends with the very files of
 * one that nothing disturbed: losses, evaluations, selection statistics, the position in the data, weights.
 *
 * Every kind of fault once here, always with the same choices; TREFOIL_LONG=1 makes it 200, with new choices, and
 * TREFOIL_FAULTS=<n> any other number; TREFOIL_FAULT=<part of its name> injects one kind only. A failure prints its seed;
 * TREFOIL_SEED=<seed> makes the same choices again.
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { findCheckpoint } from '../src/run/checkpoint/read.js';
import { readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { runPaths } from '../src/run/paths.js';
import { root } from '../src/testing/cli.js';
import { randomNumbers } from '../src/testing/random.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';
import { FAULTS, type Fault, filesOf, type Storm } from './chaos/faults.js';
import { Network } from './chaos/network.js';
import { Life } from './chaos/supervisor.js';

const LONG = process.env['TREFOIL_LONG'] === '1';
const KIND = process.env['TREFOIL_FAULT'] ?? '';
const COUNT = Number(process.env['TREFOIL_FAULTS'] ?? (LONG ? 200 : FAULTS.length));
const SEED = Number(process.env['TREFOIL_SEED'] ?? (LONG ? Math.floor(Math.random() * 1e9) : 1));
/** A fault lets a few steps pass, up to fifty on a fast machine; with this many the run does not end before the last fault. */
const STEPS = 8 * COUNT + 200;
const DISK_MIB = 48;

let folder: { path: string; remove: () => void };
let disk: string | null = null;
let network: Network;
const lives: Life[] = [];
/** The same data from another server, for the run that nothing disturbs. */
let calmNetwork: Network;
beforeAll(async () => {
  network = await Network.start();
  calmNetwork = await Network.start();
  folder = temporaryFolder();
  const path = join(folder.path, 'disk');
  mkdirSync(path);
  const mounted = spawnSync('mount', ['-t', 'tmpfs', '-o', `size=${DISK_MIB}m`, 'tmpfs', path]);
  disk = mounted.status === 0 ? path : null;
});
afterAll(async () => {
  for (const life of lives) life.send('SIGKILL'); // a test that failed leaves some
  await network.hub.close();
  await calmNetwork.hub.close();
  if (disk !== null) expect(spawnSync('umount', ['-l', disk]).status).toBe(0);
  folder.remove();
});

/** Builds the library under which system calls fail. */
function buildFaulty(): Storm['faulty'] {
  const [library, failing] = ['faulty-files.so', 'failing'].map((name) => join(folder.path, name));
  const source = join(root, 'src', 'testing', 'faulty-files.cpp');
  const { status } = spawnSync('g++', ['-shared', '-fPIC', '-O1', source, '-o', library, '-ldl']);
  return process.platform === 'linux' && status === 0 ? { library, failing } : null;
}

/** Every kind that can happen once, in random order, then any of them. */
function schedule(storm: Storm): Fault[] {
  const possible = FAULTS.filter(({ name }) => name.includes(KIND)).filter(({ name, absent }) => {
    const reason = absent?.(storm);
    if (reason !== undefined) console.log(`not injected: ${name}: ${reason}`);
    return reason === undefined;
  });
  const shuffled = possible.map((fault) => ({ fault, at: storm.random() })).sort((a, b) => a.at - b.at);
  const first = shuffled.map(({ fault }) => fault).slice(0, COUNT);
  const rest = Array.from(
    { length: COUNT - first.length },
    () => possible[Math.floor(storm.random() * possible.length)],
  );
  return [...first, ...rest];
}

/** A life that nothing disturbs, to its end. */
async function completes(args: readonly string[], { environment }: Network): Promise<void> {
  const life = new Life(args, environment);
  lives.push(life);
  expect(await life.ending, life.stderr).toEqual({ code: 0, signal: null });
}

describe(`chaos (${COUNT} faults, TREFOIL_SEED=${SEED})`, () => {
  it('ends with the files of an undisturbed run', async () => {
    const prepare = (name: string, outDir: string) => {
      const config = tinyConfig(folder.path, {
        model: { dim: 48, n_layers: 2 },
        data: network.data,
        train: { steps: STEPS, eval_every: 25, save_every: 3, keep_last: 4, out_dir: outDir },
      });
      const file = join(folder.path, `${name}.yaml`);
      writeFileSync(file, stringify(config));
      return { args: ['train', '--config', file, '--resume', 'auto'], outDir };
    };
    const calm = prepare('calm', join(folder.path, 'calm'));
    const isCalm = completes(calm.args, calmNetwork); // meanwhile: a storm waits much
    isCalm.catch(() => {}); // awaited below

    const stormy = prepare('stormy', join(disk ?? folder.path, 'stormy'));
    const storm: Storm = {
      ...stormy,
      disk,
      network,
      scratch: folder.path,
      faulty: buildFaulty(),
      random: randomNumbers(SEED),
      life: undefined,
      env: {},
    };
    const injected = new Map<string, number>();
    for (const { name, inject } of schedule(storm)) {
      await inject(storm).catch((error: unknown) => {
        if (storm.life) lives.push(storm.life);
        throw new Error(`${name} (fault ${[...injected.values()].reduce((a, b) => a + b, 0) + 1}, seed ${SEED})`, {
          cause: error,
        });
      });
      injected.set(name, (injected.get(name) ?? 0) + 1);
    }
    if (storm.life) {
      storm.life.send('SIGKILL');
      await storm.life.ending;
    }
    const before = findCheckpoint(stormy.outDir, 'auto')!.step;
    expect(before, 'the run was over before the last fault').toBeLessThan(STEPS);
    await completes(stormy.args, network);
    await isCalm;
    console.log(
      `${COUNT} faults up to step ${before} of ${STEPS}: ${[...injected].map(([name, n]) => `${name} ${n}`).join(', ')}`,
    );

    const [a, b] = [runPaths(calm.outDir), runPaths(stormy.outDir)];
    const losses = (path: string) => readCsv(path, TRAINING_CSV).rows.map(({ step, loss, lr }) => ({ step, loss, lr }));
    expect(losses(b.training)).toEqual(losses(a.training));
    expect(losses(b.training)).toHaveLength(STEPS);
    for (const file of ['val', 'kStats'] as const)
      expect(readFileSync(b[file], 'utf8')).toBe(readFileSync(a[file], 'utf8'));
    expect(readFileSync(b.model).equals(readFileSync(a.model))).toBe(true);
    const state = (outDir: string) => {
      const { config: _config, ...rest } = findCheckpoint(outDir, 'auto')!.state;
      return rest; // the loader's cursor, Adam's steps, spike statistics, tokens seen
    };
    expect(state(stormy.outDir)).toEqual(state(calm.outDir));
    expect(filesOf(stormy.outDir)).toEqual(filesOf(calm.outDir));
    const checkpoints = (outDir: string) => readdirSync(runPaths(outDir).checkpoints).sort();
    // Those that SIGUSR2 asked for stay besides.
    const more = checkpoints(stormy.outDir).filter((name) => !checkpoints(calm.outDir).includes(name));
    expect(more.length).toBeLessThanOrEqual(injected.get('SIGUSR1 and SIGUSR2') ?? 0);
    expect(checkpoints(stormy.outDir)).toEqual(expect.arrayContaining(checkpoints(calm.outDir)));
  }, 3_600_000);
});
