/** Operating a run as a person does: the real commands on real runs. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, symlinkSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { runCli } from '../src/cli/testing/run.js';
import { tailHeartbeats } from '../src/run/logs/heartbeat.js';
import { runPaths } from '../src/run/paths.js';
import { type CliResult, ended, startTrefoil, trefoil } from '../src/testing/cli.js';
import { type TinyOverrides, temporaryFolder, tinyConfig } from '../src/testing/run.js';

let folder: { path: string; remove: () => void };
const children: ReturnType<typeof startTrefoil>[] = [];
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(async () => {
  for (const child of children.splice(0)) {
    if (child.exitCode === null && child.signalCode === null) {
      const end = ended(child);
      child.kill('SIGKILL');
      await end;
    }
  }
  folder.remove();
});

function start(args: readonly string[], env: Record<string, string> = {}) {
  const child = startTrefoil(args, env);
  children.push(child);
  let [printed, errors] = ['', ''];
  child.stdout!.on('data', (chunk) => {
    printed += chunk;
  });
  child.stderr!.on('data', (chunk) => {
    errors += chunk;
  });
  return { child, printed: () => printed, errors: () => errors, output: () => printed + errors, end: ended(child) };
}

/**
 * A command that looks at files and ends, run in this process: starting one costs more than the command. That the program
 * does the same is shown for every command by test/commands.slow.test.ts.
 */
function look(args: readonly string[], env: Record<string, string> = {}): Promise<CliResult> {
  const variables = Object.entries({ ...process.env, ...env }).filter((pair) => pair[1] !== undefined);
  return runCli(args, { env: Object.fromEntries(variables) as Record<string, string> });
}

function prepare(overrides: TinyOverrides = {}, where = folder.path) {
  const config = tinyConfig(where, overrides);
  const file = join(where, 'config.yaml');
  writeFileSync(file, stringify(config));
  return { file, outDir: config.train.out_dir };
}

/** Longer than a healthy step of a busy machine takes. */
const DEADLINE_S = 8;
const DEADLINES = ['fetch', 'step', 'save', 'eval'];

const endless = { train: { steps: 100_000, eval_every: 0, save_every: 50 } };

async function until(what: string, condition: () => boolean, seconds = 300): Promise<void> {
  const deadline = performance.now() + seconds * 1000;
  while (!condition()) {
    if (performance.now() > deadline) throw new Error(`waited ${seconds} s for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

const stepOf = (outDir: string) => tailHeartbeats(runPaths(outDir).heartbeat(0), 1)[0]?.step ?? 0;

type Rows = { ok: boolean; rows: { rule: string; level: string; value: unknown; limit: unknown }[] };
function rowsOf(result: CliResult): Rows {
  expect(result.stdout, result.stderr).toMatch(/^\{/);
  const parsed = JSON.parse(result.stdout) as Rows;
  for (const row of parsed.rows) expect(Object.keys(row)).toEqual(['rule', 'level', 'value', 'limit']);
  return parsed;
}

describe('a run that is over', () => {
  let own: { path: string; remove: () => void };
  let outDir: string;
  beforeAll(async () => {
    own = temporaryFolder();
    const prepared = prepare({ train: { steps: 60, eval_every: 20, save_every: 20 } }, own.path);
    outDir = prepared.outDir;
    const run = await trefoil(['train', '--config', prepared.file]);
    expect(run.code, run.stderr).toBe(0);
  });
  afterAll(() => own.remove());

  it('status shows it, by its folder and by the folder that holds it', async () => {
    for (const dir of [outDir, own.path]) {
      const { runs } = JSON.parse((await look(['status', '--dir', dir, '--json'])).stdout);
      expect(runs).toHaveLength(1);
      expect(runs[0]).toMatchObject({
        run: 'run',
        state: 'ended',
        detail: 'stop: done',
        step: 60,
        steps: 60,
        checkpoint: 60,
        halt: null,
        anomaly: null,
        problems: [],
      });
      expect(runs[0].loss).toBeGreaterThan(0);
      expect(runs[0].val_loss).toBeGreaterThan(0);
    }
    expect((await look(['status', '--dir', outDir])).stdout).toMatch(/run +done +60\/60/);
  });

  it('health and watch --once agree that it is well', async () => {
    for (const command of [['health'], ['watch', '--once']]) {
      const result = await look([...command, '--dir', outDir, '--json']);
      expect(result.code).toBe(0);
      const { ok, rows } = rowsOf(result);
      expect(ok).toBe(true);
      expect(rows.find(({ rule }) => rule === 'process')).toMatchObject({ level: 'green', value: 'done' });
    }
  });

  it('check passes, saves a baseline and compares with one', async () => {
    const baseline = join(folder.path, 'baseline.json');
    const saved = await look(['check', '--dir', outDir, '--min-steps', '50', '--save-baseline', baseline, '--json']);
    expect(saved.code, saved.stdout).toBe(0);
    expect(rowsOf(saved).rows.map(({ rule }) => rule)).toEqual([
      ...['steps', 'loss_finite', 'loss_falls', 'throughput', 'csv', 'gradients', 'fetch', 'fetch_p95'],
      ...['gate_entropy', 'gate_collapse', 'selection', 'spikes', 'fallbacks', 'process', 'out_of_memory', 'data'],
    ]);
    const compare = async (tolerance: string) =>
      await look([
        'check',
        '--dir',
        outDir,
        '--compare-baseline',
        baseline,
        '--baseline-tolerance',
        tolerance,
        '--json',
      ]);
    expect((await compare('0')).code).toBe(0); // the run is as good as itself
    const better = JSON.parse(readFileSync(baseline, 'utf8'));
    writeFileSync(baseline, JSON.stringify({ ...better, toks_per_s: better.toks_per_s * 2 }));
    expect(rowsOf(await compare('0.51')).ok).toBe(true);
    const worse = await compare('0.49');
    expect(worse.code).toBe(1);
    expect(
      rowsOf(worse)
        .rows.filter(({ level }) => level === 'red')
        .map(({ rule }) => rule),
    ).toEqual(['baseline_toks_per_s']);
  });

  it('check takes files by name, and fails for too few steps and too slow a run', async () => {
    const { training, heartbeat } = runPaths(outDir);
    const files = ['check', '--csv', training, '--heartbeat', heartbeat(0)];
    expect((await look([...files, '--min-steps', '60'])).code).toBe(0);
    const short = await look([...files, '--min-steps', '61']);
    expect(short.code).toBe(1);
    expect(short.stdout).toMatch(/FAIL +steps +60 +at least 61/);
    const slow = await look([...files, '--min-tps', '1e9', '--save-baseline', join(folder.path, 'no.json')]);
    expect(slow.code).toBe(1);
    expect(slow.stderr).toContain('no baseline written');
    expect(existsSync(join(folder.path, 'no.json'))).toBe(false);
  });

  it('report writes Markdown, plots and JSON of several runs', async () => {
    const dense = prepare({ model: { attention: 'dense' }, train: { steps: 8, seq_len: 32, eval_every: 0 } });
    expect((await trefoil(['train', '--config', dense.file])).code).toBe(0);
    const out = join(folder.path, 'report');
    const result = await look(['report', '--dir', outDir, dense.outDir, '--out', out, '--title', 'Two runs', '--json']);
    expect(result.code, result.stderr).toBe(0);
    const report = JSON.parse(result.stdout);
    expect(JSON.parse(readFileSync(join(out, 'report.json'), 'utf8'))).toEqual(report);
    expect(report.matrix.map(({ S, mode }: { S: number; mode: string }) => [S, mode])).toEqual([
      [32, 'dense'],
      [64, 'adaptive'],
    ]);
    expect(report.deviations).toEqual([]);
    expect(report.runs[0]).toMatchObject({ step: 60, steps: 60, state: 'done', S: 64, batch: 2 });
    expect(report.runs[0].ms_step * report.runs[0].tokens_per_s).toBeCloseTo(64 * 2 * 1000, 3);
    expect(report.runs[0].series.loss).toHaveLength(60);
    const text = readFileSync(join(out, 'report.md'), 'utf8');
    expect(text).toContain('# Two runs');
    expect(text).toMatch(/\| S \| dense: .* \| adaptive: /);
    expect(text).toMatch(/\| commit \| (-|[0-9a-f]{40}) \|/);
    const images = [...text.matchAll(/!\[[^\]]*\]\(([^)]+)\)/g)].map((match) => match[1]);
    expect(images).toEqual([
      ...[
        'loss.svg',
        'throughput.svg',
        'gate_entropy.svg',
        'gate_shares_1.svg',
        'gate_shares_2.svg',
        'fetch.svg',
        'memory.svg',
      ],
    ]);
    for (const image of images) expect(readFileSync(join(out, image), 'utf8')).toMatch(/^<svg [\s\S]*<\/svg>\n$/);
    expect(readFileSync(join(out, 'report.html'), 'utf8')).toContain('<h1>Two runs</h1>');
    const links = [...text.matchAll(/(?<!!)\[[^\]]*\]\(([^)]+)\)/g)].map((match) => match[1]);
    for (const link of links) expect(existsSync(join(out, link)), link).toBe(true);
  });

  it('doctor judges a config by the rules for long runs, with the remedy', async () => {
    const rows = async (args: string[], env: Record<string, string> = {}) => {
      const result = await look(['doctor', ...args, '--json'], env);
      const parsed = JSON.parse(result.stdout) as { ok: boolean; rows: Record<string, string>[] };
      for (const row of parsed.rows) expect(Object.keys(row)).toEqual(['check', 'level', 'found', 'remedy']);
      expect(result.code).toBe(parsed.ok ? 0 : 1);
      return { ok: parsed.ok, of: (check: string) => parsed.rows.filter((row) => row['check'] === check) };
    };
    const machine = await rows([], { PYTORCH_CUDA_ALLOC_CONF: 'x', NSA_USE_FA: '1' });
    expect(machine.ok).toBe(true);
    for (const check of ['node', 'system', 'processor', 'compiler', 'kernels', 'cache'])
      expect(machine.of(check)[0], check).toMatchObject({ level: 'green' });
    const environment = machine
      .of('environment')
      .map(({ found }) => found)
      .join('\n');
    expect(environment).toContain('PYTORCH_CUDA_ALLOC_CONF has no effect');
    expect(environment).toContain('did you mean NSA_USE_FA2');
    const short = prepare({ train: { steps: 60, save_every: 0 } });
    expect((await rows(['--config', short.file])).of('checkpoints')[0]).toMatchObject({ level: 'yellow' });
    const long = await rows(['--config', short.file, '--set', 'train.steps=50000']);
    expect(long.ok).toBe(false);
    expect(long.of('checkpoints')[0]).toMatchObject({
      level: 'red',
      remedy: expect.stringContaining('train.save_every'),
    });
    const gpu = await rows(['--config', '125m_1xa100_production', '--set', 'runtime.precision=fp32']);
    expect(gpu.of('precision')[0]).toMatchObject({ level: 'red', remedy: expect.stringContaining('bf16') });
    expect((await rows(['--config', '125m_1xa100_production'])).of('precision')[0]).toMatchObject({
      level: 'green',
    });
    expect(
      (await rows(['--config', '125m_1xa100_production', '--set', 'train.batch_size=4000'])).of('memory estimate')[0],
    ).toMatchObject({
      level: 'red',
    });
    expect((await rows(['--config', 'no-such-config'])).of('config')[0]).toMatchObject({ level: 'red' });
    const used = await rows(['--config', runPaths(outDir).config]);
    expect(used.of('out_dir')[0]).toMatchObject({ level: 'yellow', remedy: expect.stringContaining('--resume auto') });
  });

  it('doctor estimates the memory that training then uses, within 10 %', async () => {
    const big = prepare({
      model: { dim: 128, n_layers: 4, n_heads: 8, d_k: 16, d_v: 16 },
      train: { steps: 3, seq_len: 1024, eval_every: 0, save_every: 0 },
    });
    const { rows } = JSON.parse((await look(['doctor', '--config', big.file, '--json'])).stdout);
    const found = rows.find(({ check }: { check: string }) => check === 'memory estimate').found as string;
    const estimate = Number(/about (\d+) MiB/.exec(found)![1]);
    expect((await trefoil(['train', '--config', big.file])).code).toBe(0);
    const used = tailHeartbeats(runPaths(big.outDir).heartbeat(0), 2)[0].gpu_mem_peak!;
    expect(estimate / used).toBeGreaterThan(0.9);
    expect(estimate / used).toBeLessThan(1.1);
  });

  it('halt says that it is over already, and writes no mark', async () => {
    const result = await look(['halt', '--dir', outDir, '--json']);
    expect(result.code).toBe(0);
    expect(JSON.parse(result.stdout)).toMatchObject({ status: 'ended', step: 60, checkpoint: 60 });
    expect((await look(['halt', '--dir', outDir])).stdout).toBe('done; step 60; newest checkpoint: step 60\n');
    expect(existsSync(runPaths(outDir).halt)).toBe(false);
  });
});

describe('a run that is going on', () => {
  it('is halted gracefully: halt waits for the checkpoint, train ends with code 3', async () => {
    const { file, outDir } = prepare(endless);
    const run = start(['train', '--config', file]);
    await until('steps', () => stepOf(outDir) >= 5);
    const status = JSON.parse((await look(['status', '--dir', outDir, '--json'])).stdout).runs[0];
    expect(status).toMatchObject({ state: 'running', detail: `pid ${run.child.pid}`, steps: 100_000 });
    expect(status.seconds_left).toBeGreaterThan(0);
    const result = await look(['halt', '--dir', outDir, '--reason', 'lunch break', '--timeout', '300', '--json']);
    expect(result.code, result.stderr).toBe(0);
    const halted = JSON.parse(result.stdout);
    expect(halted).toMatchObject({
      status: 'ended',
      state: 'halted: .HALT: lunch break',
      detail: 'halt: .HALT: lunch break',
    });
    expect(halted.checkpoint).toBe(halted.step);
    expect(await run.end).toEqual({ code: 3, signal: null });
    expect(
      rowsOf(await look(['health', '--dir', outDir, '--json'])).rows.find(({ rule }) => rule === 'halt'),
    ).toMatchObject({
      level: 'yellow',
      value: 'lunch break',
    });
  });

  it('hangs: watch names rank and section, dumps, tells, halts', async () => {
    const { file, outDir } = prepare(endless);
    const run = start(['train', '--config', file]);
    await until('steps', () => stepOf(outDir) >= 5);
    const received: Record<string, unknown>[] = [];
    const server = createServer((request, response) => {
      let body = '';
      request.on('data', (chunk) => {
        body += chunk;
      });
      request.on('end', () => {
        received.push(JSON.parse(body));
        response.end();
      });
    });
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
    const alert = join(folder.path, 'alert.json');
    const watch = start([
      ...['watch', '--dir', outDir, '--halt', '1', '--interval', '0.25', '--command', `cat >> ${alert}`],
      ...['--webhook', `http://127.0.0.1:${(server.address() as AddressInfo).port}/alerts`],
      ...DEADLINES.flatMap((section) => [`--deadline-${section}`, String(DEADLINE_S)]),
    ]);
    await new Promise((resolve) => setTimeout(resolve, 1500)); // it looks a few times and sees health
    expect(watch.output()).not.toContain('CRITICAL');
    run.child.kill('SIGSTOP'); // a hang as real as any: no line of the trainer runs any more
    await until('the alert', () => watch.output().includes('CRITICAL'));
    const [, seconds] = /CRITICAL run: section: rank 0 in (?:fetch|step|save|between) for (\d+) s at step \d+/.exec(
      watch.output(),
    )!;
    // A busy machine may keep the watchdog waiting; that it needs two intervals is shown in src/watch/rules.test.ts.
    expect(Number(seconds)).toBeGreaterThanOrEqual(DEADLINE_S);
    await until('.HALT', () => existsSync(runPaths(outDir).halt));
    expect(readFileSync(runPaths(outDir).anomalyType, 'utf8')).toBe('section_stall\n');
    await until('the dump', () => readdirSync(outDir).some((name) => /^stackdump_.*_rank0_watch\.txt$/.test(name)));
    const dump = readdirSync(outDir).find((name) => name.endsWith('_watch.txt'))!;
    expect(readFileSync(join(outDir, dump), 'utf8')).toMatch(/State:\s+T \(stopped\)/);
    const written = () => (existsSync(alert) ? readFileSync(alert, 'utf8').trim().split('\n') : []);
    const isStall = ({ rule }: Record<string, unknown>) => rule === 'section';
    await until('the webhook', () => received.some(isStall));
    expect(received.find(isStall)).toMatchObject({ run: 'run', rank: 0, level: 'red' });
    await until('the command', () => written().length >= received.length);
    expect(written().map((line) => JSON.parse(line))).toContainEqual(received.find(isStall));
    run.child.kill('SIGCONT');
    expect(await run.end).toEqual({ code: 3, signal: null }); // it saw the halt, saved and ended
    expect((await watch.end).code).toBe(1);
    expect(watch.output()).toContain('the run has ended (halted');
    server.close();
  });

  it('collapses: watch writes the details of gates that are stuck in one branch', async () => {
    // A real collapse: the gate is forced to one branch, so its entropy is 0.
    const { file, outDir } = prepare({ ...endless, nsa: { force_branch: 'win' } });
    start(['train', '--config', file]);
    await until('steps', () => stepOf(outDir) >= 5);
    const watch = await look(['watch', '--dir', outDir, '--once', '--halt', '1', '--json']);
    expect(watch.code).toBe(1);
    expect(
      rowsOf(watch)
        .rows.filter(({ level }) => level === 'red')
        .map(({ rule }) => rule),
    ).toContain('gate_entropy');
    const details = JSON.parse(readFileSync(runPaths(outDir).gateCollapseDetails, 'utf8'));
    expect(details.recent.at(-1).gate_branch_shares).toEqual([0, 0, 1]);
    expect(watch.stderr).toContain('.HALT');
  });

  it('is killed: health says so at once, in its first line, and fails', async () => {
    const { file, outDir } = prepare(endless);
    const run = start(['train', '--config', file]);
    await until('steps', () => stepOf(outDir) >= 3);
    run.child.kill('SIGKILL');
    await run.end;
    const health = await look(['health', '--dir', outDir]);
    expect([health.code, health.stdout.split('\n')[0]]).toEqual([
      1,
      expect.stringMatching(/^died: process \d+ is gone and wrote no end; .* --resume auto$/),
    ]);
    expect((await look(['halt', '--dir', outDir])).stderr).toContain('no active run');
  });

  it('is backed up while it goes, and the archive resumes', async () => {
    const { file, outDir } = prepare({ train: { ...endless.train, save_every: 5 } });
    const run = start(['train', '--config', file]);
    await until('checkpoints', () => stepOf(outDir) >= 12);
    const archive = join(folder.path, 'backup.tar.gz');
    const result = await look(['backup', '--dir', outDir, '--out', archive, '--json']);
    expect(result.code, result.stderr).toBe(0);
    const { checkpoints, files } = JSON.parse(result.stdout);
    expect(checkpoints).toHaveLength(1);
    expect((await look(['backup', '--dir', outDir, '--out', archive])).stderr).toContain('already exists');
    run.child.kill('SIGKILL');
    await run.end;
    const restored = join(folder.path, 'restored');
    mkdirSync(restored);
    const listed = spawnSync('tar', ['-xvzf', archive, '-C', restored], { encoding: 'utf8' });
    expect(listed.status, listed.stderr).toBe(0);
    expect(listed.stdout.trim().split('\n')).toHaveLength(files);
    const moved = join(restored, 'run');
    expect(readFileSync(runPaths(moved).heartbeat(0), 'utf8')).toMatch(/\}\n$/);
    const steps = String(checkpoints[0] + 3);
    const resumed = await trefoil([
      'train',
      '--config',
      file,
      '--out-dir',
      moved,
      '--resume',
      'auto',
      '--steps',
      steps,
    ]);
    expect(resumed.code, resumed.stderr).toBe(0);
    expect(resumed.stdout).toContain(`at step ${checkpoints[0]}`);
  });

  it('watch waits for a run that has not begun, and ends with it', async () => {
    const { file, outDir } = prepare({ train: { steps: 40, eval_every: 0 } });
    const watch = start(['watch', '--dir', outDir, '--interval', '0.1']);
    await until('watch', () => watch.output().includes('waiting: '));
    expect((await trefoil(['train', '--config', file])).code).toBe(0);
    expect((await watch.end).code, watch.output()).toBe(0);
    expect(watch.output()).toContain('the run has ended (done)');
  });

  it('watch ends at once when asked to', async () => {
    const { file, outDir } = prepare(endless);
    start(['train', '--config', file]);
    await until('steps', () => stepOf(outDir) >= 2);
    // Any gate is a warning with this limit: its line says that the first look is over.
    const watch = start(['watch', '--dir', outDir, '--interval', '600', '--gate-max', '0.1', '--json']);
    await until('the first look', () => watch.errors().includes('gate'));
    watch.child.kill('SIGTERM');
    expect(await watch.end).toEqual({ code: 0, signal: null });
    expect(JSON.parse(watch.printed())).toMatchObject({ ok: true });
  });
});

describe('usage', () => {
  it('check trains a small run of its own', async () => {
    const result = await look(['check', '--run-synthetic', '--json']);
    expect(result.code, result.stdout + result.stderr).toBe(0);
    expect(rowsOf(result).rows.find(({ rule }) => rule === 'steps')).toMatchObject({ value: 60 });
    const impossible = await look(['check', '--run-synthetic', '--min-tps', '1e12']);
    expect(impossible.code).toBe(1);
  });

  it('bench attention measures a small case', async () => {
    const small = ['--heads', '2', '--groups', '1', '--dim', '16', '--lengths', '64', '--quick', '--threads', '1'];
    const result = await trefoil(['bench', 'attention', ...small, '--json']);
    expect(result.code, result.stderr).toBe(0);
    expect(
      JSON.parse(result.stdout).rows.some(({ what, S }: { what: string; S: number }) => what === 'nsa' && S === 64),
    ).toBe(true);
  });

  it('a file that cannot be read is named, and the rest still judged', async () => {
    const { outDir } = prepare();
    mkdirSync(outDir);
    symlinkSync('training.csv', runPaths(outDir).training); // points to itself
    writeFileSync(runPaths(outDir).config, '');
    const { rows } = rowsOf(await look(['health', '--dir', outDir, '--json']));
    expect(rows.find(({ rule }) => rule === 'files')).toMatchObject({
      level: 'yellow',
      value: expect.stringContaining('training.csv'),
    });
  });

  it.each([
    [['health', '--dir', '/no/such/run'], 'there is no such folder'],
    [['watch', '--dir', '/no/such/run', '--once'], 'there is no such folder'],
    [['halt', '--dir', '/no/such/run'], 'there is no such folder'],
    [['backup', '--dir', '/no/such/run'], 'no such folder'],
    [['report', '--dir', '/no/such/run'], 'there is no such folder'],
    [['status', '--dir', '/no/such/run'], 'there is no such folder; name a run'],
    [['check'], 'give a run with --dir'],
    [['check', '--dir', '/no/such/run'], 'contains no steps'],
    [['check', '--dir', 'x', '--compare-baseline', '/no/such/file'], 'write one with --save-baseline'],
    [['watch'], "required option '--dir <folder>' not specified"],
    [['watch', '--dir', 'x', '--halt', '2'], 'Allowed choices are 0, 1'],
    [['watch', '--dir', 'x', '--webhook', 'file:///etc/passwd'], 'an http or https URL'],
    [['health', '--dir', 'x', '--gate-entropy-min', 'low'], 'It must be a number'],
    [['doctor', '--set', 'train.stepz=3'], 'did you mean'],
    [['plan', '--measured', '/no/such/file'], 'cannot be read'],
    [['plan', '--set', 'model.dimm=3'], 'did you mean'],
  ])('%j: one line, code 2', async (args, message) => {
    const result = await runCli(args);
    expect(result.code).toBe(2);
    expect(result.stderr).toContain(message);
    expect(result.stderr.trim().split('\n')).toHaveLength(1);
    expect(result.stdout).toBe('');
  });

  it('NSA_WATCH_* set thresholds, and bad values are refused by name', async () => {
    const { outDir } = prepare();
    mkdirSync(outDir);
    const result = await look(['health', '--dir', outDir], { NSA_WATCH_GATE_ENTROPY_MIN: 'low' });
    expect(result.code).toBe(2);
    expect(result.stderr).toContain('NSA_WATCH_GATE_ENTROPY_MIN: "low" is not allowed');
  });
});
