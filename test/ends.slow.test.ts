/** Every end of a run by every reader, as docs/runbooks/ends.md says: the test reads its table. */
import { spawnSync } from 'node:child_process';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { stringify } from 'yaml';
import { runCli } from '../src/cli/testing/run.js';
import { collectRun } from '../src/dashboard/report/collect.js';
import { Runs } from '../src/dashboard/runs.js';
import { NumberedLoader } from '../src/data/pipeline/numbered-loader.js';
import { DATASET, numberedDocuments } from '../src/data/testing/corpora.js';
import { parquetFile } from '../src/data/testing/parquet.js';
import { TrefoilError } from '../src/errors.js';
import { startHub } from '../src/hub/testing/hub-server.js';
import { processState } from '../src/process-identity.js';
import { tailHeartbeats } from '../src/run/logs/heartbeat.js';
import { runPaths, writeHalt } from '../src/run/paths.js';
import { ended, root, startTrefoil, trefoilMain } from '../src/testing/cli.js';
import { mpirunAbsence, startMpirun } from '../src/testing/ranks.js';
import { type RunOptions, runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../src/testing/run.js';
import { EXIT_CODES } from '../src/train/options.js';
import { resolveThresholds } from '../src/watch/thresholds.js';
import { Watchdog } from '../src/watch/watchdog.js';

const AT = 14;
let folder: ReturnType<typeof temporaryFolder>;
let suspended: ReturnType<typeof startTrefoil>;
beforeAll(() => {
  folder = temporaryFolder();
});
afterAll(() => {
  suspended?.kill('SIGKILL');
  vi.restoreAllMocks();
  vi.unstubAllEnvs();
  folder.remove();
});

interface Ended {
  readonly outDir: string;
  readonly code: number | null;
}

const fail = (where: string) => {
  throw new TypeError(`in ${where}`);
};
const atStep = (action: () => void) => ({ onStep: ({ step }: { step: number }) => step === AT && action() });

function configOf(name: string, overrides: TinyOverrides = {}) {
  const place = join(folder.path, name.replaceAll(/\W+/g, '-'));
  mkdirSync(place, { recursive: true });
  const train = { steps: 20, eval_every: 15, save_every: 15, ...overrides.train };
  return tinyConfig(place, { ...overrides, train });
}

/** Trains in this process; the code of an error is that of the program. */
async function run(name: string, options: RunOptions = {}, overrides: TinyOverrides = {}): Promise<Ended> {
  const config = configOf(name, overrides);
  const outDir = config.train.out_dir;
  try {
    const { result } = await runTraining(config, options);
    return { outDir, code: EXIT_CODES[result.status] };
  } catch (error) {
    return { outDir, code: error instanceof TrefoilError ? error.exitCode : 1 };
  }
}

function fileOf(name: string, train: object) {
  const config = configOf(name, { train: { steps: 100_000, eval_every: 0, save_every: 0, ...train } });
  const file = join(config.train.out_dir, '..', 'config.yaml');
  writeFileSync(file, stringify(config));
  return { file, outDir: config.train.out_dir };
}

const steps = async (outDir: string, count: number) =>
  await expect.poll(() => tailHeartbeats(runPaths(outDir).heartbeat(0), 1)[0]?.step ?? 0).toBeGreaterThan(count);

let outDirOfProcess = '';
const ENDS: Record<string, () => Promise<Ended | string>> = {
  'all steps done': () => run('done'),
  SIGTERM: () => run('sigterm', { onLine: (line, signals) => line.startsWith('step 0014') && signals.emit('SIGTERM') }),
  '`.HALT`': () =>
    run(
      'halt',
      atStep(() => writeHalt(join(folder.path, 'halt', 'run'), 'lunch')),
    ),
  "a watchdog's halt": () => {
    const dir = join(folder.path, 'watched', 'run');
    const thresholds = resolveThresholds({}, { gateEntropyMin: 2, gateCollapseN: 1 });
    const watchdog = new Watchdog({ dir, thresholds, halt: true });
    return run('watched', { onLine: (line) => line.startsWith('step 0014') && void watchdog.tick() });
  },
  NaN: () => run('nan', {}, { train: { lr: 1e30, grad_clip: 0, warmup_steps: 0 } }),
  'source gone': async () => {
    const files = [['data/0.parquet', parquetFile({ documents: numberedDocuments(300, 'd-') })] as const];
    const hub = await startHub({ dataset: DATASET, files: new Map(files) });
    vi.stubEnv('HF_ENDPOINT', hub.endpoint);
    const data = { source: 'hub', path: null, hub_dataset: DATASET, cache_gb: 0, prefetch: false, workers: 1 };
    const die = atStep(() => {
      hub.dead = true;
    });
    try {
      return await run('gone', die, {
        data: { ...data, val_fraction: 0, loader_timeout: 3 },
        train: { steps: 2000, eval_every: 0, save_every: 0 },
      });
    } finally {
      await hub.close();
    }
  },
  'source gone before a resume': async () => {
    const { file, outDir } = fileOf('reopened', { steps: 20, save_every: 5 });
    const { code } = await runCli(['train', '--config', file, '--steps', '10']);
    expect(code).toBe(0);
    const [config, nothing] = [readFileSync(file, 'utf8'), join(folder.path, 'nothing-here')];
    writeFileSync(file, config.replace(/path: .*/, `path: ${nothing}`));
    return { outDir, code: (await runCli(['train', '--config', file, '--resume', 'auto'])).code };
  },
  'exception in a fetch': async () => {
    const next = NumberedLoader.prototype.next;
    let calls = 0;
    const spy = vi.spyOn(NumberedLoader.prototype, 'next').mockImplementation(function (this: NumberedLoader) {
      return ++calls > AT ? fail('a fetch') : next.call(this);
    });
    try {
      return await run('fetch');
    } finally {
      spy.mockRestore();
    }
  },
  'exception in a step': () =>
    run(
      'step',
      atStep(() => fail('a step')),
    ),
  'exception in an evaluation': () => run('evaluation', { onEvaluation: () => fail('an evaluation') }),
  'exception in a save': () => run('save', { onCheckpoint: () => fail('a save') }),
  'out of memory on the host': () =>
    run(
      'memory',
      {},
      {
        // The first tensor alone has 15 TiB, which the system refuses at once.
        model: { dim: 4096, n_layers: 1, n_heads: 64, n_kv_groups: 2, d_k: 64, d_v: 64 },
        data: { source: 'synthetic', vocab_size: 1_000_000_000 },
      },
    ),
  SIGSTOP: async () => {
    const { file, outDir } = fileOf('process', {});
    outDirOfProcess = outDir;
    suspended = startTrefoil(['train', '--config', file]);
    for (const stream of [suspended.stdout, suspended.stderr]) stream!.resume();
    await steps(outDir, 40);
    suspended.kill('SIGSTOP');
    await expect.poll(() => processState(suspended.pid!)).toBe('stopped');
    return { outDir, code: null };
  },
  'kill -9': async () => {
    const end = ended(suspended);
    suspended.kill('SIGKILL');
    await end;
    return { outDir: outDirOfProcess, code: null };
  },
  'lost rank': async () => {
    const absence = mpirunAbsence();
    if (absence) return absence;
    const { file, outDir } = fileOf('ranks', { batch_size: 1 });
    const ranks = startMpirun(2, [process.execPath, trefoilMain(), 'train', '--config', file]);
    await steps(outDir, 20);
    process.kill(tailHeartbeats(runPaths(outDir).heartbeat(1), 1)[0].pid, 'SIGKILL');
    await ranks.ended;
    return { outDir, code: 1 };
  },
  'full disk': async () => {
    const disk = join(folder.path, 'disk');
    mkdirSync(disk);
    const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=600k', 'tmpfs', disk], { encoding: 'utf8' });
    if (mount.status !== 0) return `cannot mount a tmpfs: ${mount.stderr}`;
    const { file, outDir } = fileOf('full', { steps: 300, out_dir: join(disk, 'run') });
    const child = startTrefoil(['train', '--config', file]);
    for (const stream of [child.stdout, child.stderr]) stream!.resume(); // a full pipe would stop it
    await steps(join(disk, 'run'), 5);
    spawnSync('sh', ['-c', `cat /dev/zero > ${join(disk, 'filler')}`]);
    const { code } = await ended(child);
    return { outDir: outDir.startsWith(disk) ? outDir : join(disk, 'run'), code };
  },
};
afterAll(() => void spawnSync('umount', ['-l', join(folder.path, 'disk')]));

const TABLE = readFileSync(join(root, 'docs', 'runbooks', 'ends.md'), 'utf8')
  .split('\n')
  .filter((line) => line.startsWith('| '))
  .slice(1)
  .map((row) => {
    const [end, train, line, health, watch, check] = row.slice(2, -2).split(' | ');
    return { end, train, line, health, watch, check };
  });

/** The former end as a resume tells it, before it is refused because there is no such checkpoint. */
async function saidByResume(outDir: string): Promise<string[]> {
  const { code, stdout } = await runCli(['train', '--config', runPaths(outDir).config, '--resume', '/nowhere']);
  expect(code).not.toBe(0);
  return stdout.split('\n').filter((line) => line.startsWith('before: '));
}

it('the page has a row for every end', () => {
  expect(TABLE.map(({ end }) => end)).toEqual(Object.keys(ENDS));
});

it.for(TABLE)('$end', async ({ end, train, line, health, watch, check }, { skip }) => {
  const made = await ENDS[end]();
  if (typeof made === 'string') return skip(made);
  const { outDir, code } = made;
  const look = async (...words: string[]) => await runCli([...words, '--dir', outDir]);
  const parts = line.slice(1, -1).split('…');
  const pattern = new RegExp(`^${parts.map((part) => part.replaceAll(/[.*+?^${}()|[\]\\]/g, '\\$&')).join('.*')}$`);
  const byHealth = await look('health');
  expect(byHealth.stdout.split('\n')[0]).toMatch(pattern);
  const json = JSON.parse((await look('health', '--json')).stdout);
  const words = json.state === 'done' ? 'done' : `${json.state}: ${json.reason}`;
  expect((await look('status')).stdout).toMatch(new RegExp(`run +${json.state} `));
  const byWatch = await look('watch', '--once');
  expect(byWatch.stderr.split('\n')[0]).toBe(words);
  const byCheck = await look('check', '--min-steps', '1');
  if (end !== 'out of memory on the host') expect(byCheck.stdout.split('\n')[0]).toBe(words); // no step to check
  expect(collectRun(outDir).state).toBe(words);
  const [row] = await new Runs(outDir, resolveThresholds({})).rows();
  expect([row.status, row.reason]).toEqual([json.state, json.reason]);
  expect(await saidByResume(outDir)).toEqual(['done', 'suspended'].includes(json.state) ? [] : [`before: ${words}`]);
  expect(JSON.parse((await look('health', '--json')).stdout).state).toBe(json.state); // a refused resume changes nothing
  const codes = [code ?? '-', byHealth.code, byWatch.code, Math.min(1, byCheck.code)];
  expect(codes.map(String), byCheck.stdout).toEqual([train, health, watch, check]);
  const allowed = ['done', 'SIGTERM', '`.HALT`'].some((one) => end.includes(one));
  expect((await look('health', '--allow', 'stopped')).code).toBe(allowed ? 0 : 1);
});
