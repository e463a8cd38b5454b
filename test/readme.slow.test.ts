/** The README's commands, word by word, in a copy of the project; and `npm start` with a Ctrl-C in the middle. */
import { type ChildProcess, spawn } from 'node:child_process';
import { cpSync, existsSync, mkdtempSync, readFileSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { findCheckpoint } from '../src/run/checkpoint/read.js';
import { readCsv, TRAINING_CSV } from '../src/run/logs/csv.js';
import { runPaths } from '../src/run/paths.js';

const root = join(import.meta.dirname, '..');

/** Commands that are not run, and why. */
const REASONS: Readonly<Record<string, string>> = {
  'npm ci': 'installs the very packages this test runs with',
  'npm test': 'is the run that this test is part of',
  'npm run build': 'is a step of npm test',
};

/** Words added to a command that would take minutes; later flags win over earlier ones. */
const SMALLER: Readonly<Record<string, readonly string[]>> = {
  'npm start': ['--', '--steps', '3'],
  'npx trefoil train --config text_cpu --local-path docs --out-dir artifacts/mine': ['--steps', '3'],
  'npx trefoil train --config artifacts/mine/config.yaml --resume auto': ['--steps', '5'],
};

/** The lines of the shell blocks, without comments, cut at `&&`. */
function commands(): string[] {
  const blocks = [...readFileSync(join(root, 'README.md'), 'utf8').matchAll(/^```(?:sh|bash)?\n([\s\S]*?)^```/gm)];
  const lines = blocks.flatMap(([, block]) => block.split('\n')).map((line) => line.replace(/\s+#.*$/, '').trim());
  const all = lines.flatMap((line) => line.split(' && ')).filter((line) => /^(npm|npx|node|echo) /.test(line));
  return [...new Set(all)];
}

let project: string;

beforeAll(() => {
  // A copy without dist/, like a clone: `npm start` builds, and a build must not touch what other tests are running.
  project = mkdtempSync(join(tmpdir(), 'trefoil-readme-'));
  const left = new Set(['node_modules', '.git', 'artifacts', 'test', '.gpu', 'coverage', 'dist']);
  cpSync(root, project, {
    recursive: true,
    preserveTimestamps: true,
    filter: (path) => path === root || !left.has(basename(path)),
  });
  symlinkSync(join(root, 'node_modules'), join(project, 'node_modules'));
});
afterAll(() => rmSync(project, { recursive: true, force: true }));

interface Ended {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly output: string;
}

/** Starts a command line in a process group of its own, as a terminal does. */
function start(line: string, onOutput: (text: string, child: ChildProcess) => void = () => {}): Promise<Ended> {
  // Settings of the outer npm (its prefix, its package) must not reach the inner one.
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !/^npm_(?!config_)/.test(name)));
  const child = spawn('sh', ['-c', line], { cwd: project, env, detached: true, stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  for (const stream of [child.stdout, child.stderr])
    stream.on('data', (chunk) => {
      output += chunk;
      onOutput(output, child);
    });
  return new Promise((resolve, reject) => {
    child.once('error', reject);
    child.once('close', (code, signal) => resolve({ code, signal, output }));
  });
}

/** Ctrl-C at the third step: a SIGINT to npm, to its shell and to the program, as a terminal sends it. */
function interrupted(line: string): Promise<Ended> {
  let isSent = false;
  return start(line, (text, child) => {
    if (isSent || !text.includes('\nstep 0003')) return;
    isSent = true;
    process.kill(-child.pid!, 'SIGINT');
  });
}

const quoted = (words: readonly string[]) => words.map((word) => ` ${word}`).join('');

describe('README.md', () => {
  it('has the commands this test knows of', () => {
    const all = commands();
    for (const known of [...Object.keys(REASONS), ...Object.keys(SMALLER)]) expect(all).toContain(known);
    expect(all.length).toBeGreaterThanOrEqual(7);
  });

  it.each(commands())('%s', async (command) => {
    if (command in REASONS) {
      console.log(`not run: ${command}: it ${REASONS[command]}`);
      return;
    }
    const { code, output } = await start(command + quoted(SMALLER[command] ?? []));
    expect(code, output).toBe(0);
  });

  it('gives one duration of the quickstart, wherever it is named', () => {
    const places = ['README.md', 'docs/guide/first-model.md', 'configs/quickstart.yaml', 'src/cli/start.ts'];
    for (const place of places) expect(readFileSync(join(root, place), 'utf8'), place).toContain('in two minutes');
  });

  it('left what the commands promise', () => {
    expect(existsSync(runPaths(join(project, 'artifacts/quickstart')).model)).toBe(true);
    const { rows } = readCsv(runPaths(join(project, 'artifacts/mine')).training, TRAINING_CSV);
    expect(rows.at(-1)!.step).toBe(5);
  });
});

describe('npm start', () => {
  const line = 'npm start -- --set train.log_every=1 --out-dir artifacts/interrupted';

  it('ends after the few steps it is asked for', async () => {
    const { code, output } = await start('npm start -- --steps 20 --out-dir "artifacts/twenty steps"');
    expect(code, output).toBe(0);
    expect(output).toMatch(/^step 0020 \| loss \d\.\d{4} /m);
    expect(output).toContain('training loss (nats per token) by step');
    expect(output).toMatch(/^validation loss \d\.\d{3} nats per token/m);
    expect(output).toContain('A story it wrote');
    expect(output).toMatch(/^ +256 to 511 +\d+ /m);
    expect(output).toContain('Which blocks did it read?');
    expect(output).toContain('npm start goes on from there');
    expect(output).toMatch(/^ {2}npx trefoil generate --model 'artifacts\/twenty steps' --prompt /m);
    // The last of the commands it ends with works as printed, with a folder of text.
    const own = output.trimEnd().split('\n').at(-1)!.trim().replace('YOUR_FOLDER', 'docs');
    expect(own).toMatch(/^npx trefoil train --config /);
    const trained = await start(`${own} --steps 2`);
    expect(trained.code, trained.output).toBe(0);
    expect(trained.output).toMatch(/^use it: npx trefoil generate --model \S+artifacts\/text$/m);
    const lines = output.split('\n');
    const [first, last] = ['Does it remember?', 'Files: '].map((start) =>
      lines.findIndex((line) => line.startsWith(start)),
    );
    expect(last - first).toBeGreaterThan(15);
    for (const line of lines.slice(first, last)) expect(line.length, line).toBeLessThanOrEqual(80);
    const folder = join(project, 'artifacts/twenty steps');
    expect(readFileSync(join(folder, 'sample.txt'), 'utf8')).toMatch(/^Once upon a time/);
    const { rows: recalled, example } = JSON.parse(readFileSync(join(folder, 'recall.json'), 'utf8'));
    expect(recalled).toHaveLength(4);
    expect(example.text).toContain(`The ${example.thing}${example.answer}.`);
    // The whole quickstart has more steps; this run did no more than it was asked for.
    const { rows } = readCsv(runPaths(join(project, 'artifacts/twenty steps')).training, TRAINING_CSV);
    expect(rows.at(-1)!.step).toBe(20);
  });

  it('leaves a checkpoint on Ctrl-C, says how to go on, and does', async () => {
    const stopped = await interrupted(`${line} --steps 300`);
    expect(stopped.code === 0, stopped.output).toBe(false);
    expect(stopped.output).toMatch(/^stopped after step \d+ by SIGINT$/m);
    const outDir = join(project, 'artifacts/interrupted');
    const { step } = findCheckpoint(outDir, 'auto')!;
    expect(step).toBeGreaterThanOrEqual(3);
    expect(step).toBeLessThan(300);
    const [, command] = /^continue with: (npx trefoil train .* --resume auto)$/m.exec(stopped.output)!;
    const resumed = await start(`${command} --steps ${step + 1}`);
    expect(resumed.code, resumed.output).toBe(0);
    expect(resumed.output).toContain(`at step ${step}\n`);
  });

  it('goes on by itself where it was stopped', async () => {
    const elsewhere = line.replace('interrupted', 'again');
    const stopped = await interrupted(`${elsewhere} --steps 300`);
    const { step } = findCheckpoint(join(project, 'artifacts/again'), 'auto')!;
    expect(stopped.output).toContain(`stopped after step ${step} by SIGINT`);
    const resumed = await start(`${elsewhere} --steps ${step + 2}`);
    expect(resumed.code, resumed.output).toBe(0);
    expect(resumed.output).toContain(`at step ${step}\n`);
    const { rows } = readCsv(runPaths(join(project, 'artifacts/again')).training, TRAINING_CSV);
    expect(rows.map((row) => row.step)).toEqual(Array.from({ length: step + 2 }, (_, i) => i + 1));
  });
});
