/** The output of the commands on a terminal: nothing is wider than 80 columns, colour and progress only where wanted. */
import { execFile } from 'node:child_process';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { stringify } from 'yaml';
import { stylesFor } from '../src/cli/shared/io.js';
import { verifyReport } from '../src/cli/verify.js';
import { trefoil, trefoilMain } from '../src/testing/cli.js';
import { cpuSeconds, isSleeping, procAbsence } from '../src/testing/cpu-time.js';
import { cpu } from '../src/testing/devices.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';
import { checksFor, summarize } from '../src/verify/verify.js';

let folder: { path: string; remove: () => void };
let configFile: string;
const at = (...names: string[]) => join(folder.path, ...names);

beforeAll(async () => {
  folder = temporaryFolder();
  configFile = at('config.yaml');
  // Six digits of steps and a long name: the columns are as wide as those of a long run.
  const train = { steps: 12, eval_every: 6, save_every: 6, out_dir: at('run_with_a_long_name_s2048_adaptive') };
  writeFileSync(configFile, stringify(tinyConfig(folder.path, { train })));
  const { code, stderr } = await trefoil(['train', '--config', configFile]);
  expect(code, stderr).toBe(0);
  mkdirSync(at('documents'));
  const lines = Array.from({ length: 80 }, (_, i) => JSON.stringify({ text: `document ${i}: ${'word '.repeat(i)}` }));
  writeFileSync(at('documents', 'a.jsonl'), `${lines.join('\n')}\n`);
  writeFileSync(at('text.txt'), 'line 1 of a text to look at. '.repeat(20));
});
afterAll(() => folder.remove());

const run = () => at('run_with_a_long_name_s2048_adaptive');
const tooWide = (text: string) => text.split('\n').filter((line) => line.length > 80);

const TABLES: Readonly<Record<string, () => string[]>> = {
  configs: () => ['configs'],
  'print-config': () => ['train', '--config', 'base', '--local-path', at('documents'), '--print-config'],
  doctor: () => ['doctor', '--config', '125m_80g'],
  plan: () => ['plan', '--min-efficiency', '0.99', '--gpu-memory', '20'],
  'plan (config)': () => ['plan', '--config', '125m_2xa100_production', '--link', '2'],
  status: () => ['status', '--dir', run()],
  'watch --once': () => ['watch', '--once', '--dir', run()],
  health: () => ['health', '--dir', run(), '--gate-max', '0', '--fetch-p95', '0'],
  check: () => ['check', '--dir', run(), '--min-steps', '60', '--min-tps', '1e9'],
  'eval needle': () => ['eval', 'needle', '--model', run(), '--lengths', '64,128', '--trials', '2', '--records', '2'],
  'eval selection': () => ['eval', 'selection', '--model', run(), '--text-file', at('text.txt')],
  'bench attention': () => ['bench', 'attention', '--heads', '2', '--groups', '1', '--lengths', '64', '--quick'],
  'bench train': () => ['bench', 'train', '--config', 'small_smoke', '--seq-len', '64', '--batch-size', '1', '--quick'],
  'bench decode': () => ['bench', 'decode', '--config', configFile, '--lengths', '64', '--quick'],
  'bench prefill': () => ['bench', 'prefill', '--config', configFile, '--lengths', '64', '--quick'],
  'bench data': () => ['bench', 'data', '--quick', '--tokenizer', 'byte'],
  'data inspect': () => ['data', 'inspect', '--dataset', 'files', '--local-path', at('documents')],
};

describe('tables', () => {
  it.each(Object.keys(TABLES))('%s fits 80 columns, without colour and progress in a pipe', async (name) => {
    const { code, stdout, stderr } = await trefoil(TABLES[name](), { env: { FORCE_COLOR: '0' } });
    expect([0, 1], stderr).toContain(code);
    expect(stdout).not.toBe('');
    expect(tooWide(stdout)).toEqual([]);
    expect(stdout + stderr).not.toContain('\x1b');
  });

  it('verify fits 80 columns with every case', () => {
    const rows = checksFor(cpu(), true).map(({ invariant, case: name, limit }, i) => ({
      device: 'cpu',
      invariant,
      case: name,
      error: 1.5e-7,
      limit,
      ...(i % 2
        ? { ok: true, reason: null }
        : { ok: false, reason: 'gradients of q differ from the reference in row 12' }),
    }));
    expect(tooWide(verifyReport(summarize(rows), 1, { style: stylesFor({}, {}), width: 80 }))).toEqual([]);
  });
});

it('health explains what is wrong in words', async () => {
  const { stdout } = await trefoil(['health', '--dir', run(), '--gate-max', '0']);
  expect(stdout).toMatch(/^gate_max: The largest gate is close to 1 on average/m);
});

describe('Ctrl-C', () => {
  /** Sends it when `isReady`, and waits for the end. */
  const interrupted = async (args: string[], isReady: (stderr: string, pid: number) => boolean) => {
    const child = execFile(process.execPath, [trefoilMain(), ...args]);
    let stderr = '';
    child.stderr!.on('data', (chunk) => {
      stderr += chunk;
    });
    const end = new Promise((resolve) => child.once('close', (code, name) => resolve(name ?? code)));
    await expect.poll(() => isReady(stderr, child.pid!)).toBe(true);
    child.kill('SIGINT');
    return { signal: await end, stderr };
  };

  it('ends watch with its result and says that the run goes on', async () => {
    const { signal, stderr } = await interrupted(['watch', '--dir', at('nowhere')], (text) => text.includes('waiting'));
    expect(stderr).toMatch(/^watching .*nowhere every 30 s/);
    expect(stderr).toContain('stopped watching; the run is not affected');
    expect(signal).toBe(0);
  });

  it('ends a command that waits, in one line, as an interrupted process', async ({ skip }) => {
    if (procAbsence) return skip(procAbsence);
    // It says nothing while it waits for a prompt on stdin: it has started when it sleeps for a second.
    let sleeping = 0;
    const isWaiting = (_: string, pid: number) => {
      sleeping = cpuSeconds(pid) > 0.1 && isSleeping(pid) ? sleeping + 1 : 0;
      return sleeping >= 50;
    };
    const { signal, stderr } = await interrupted(['generate', '--model', run()], isWaiting);
    expect({ signal, stderr }).toEqual({ signal: 'SIGINT', stderr: 'trefoil: interrupted\n' });
  });

  it('ends verify between two checks', async ({ skip }) => {
    if (procAbsence) return skip(procAbsence);
    const { signal, stderr } = await interrupted(['verify', '--device', 'cpu'], (_, pid) => cpuSeconds(pid) > 1);
    // A slow machine shows progress before.
    expect({ signal, stderr: stderr.replace(/^(compiling kernels|cpu \d+\/\d+).*\n/gm, '') }).toEqual({
      signal: 'SIGINT',
      stderr: 'trefoil: interrupted\n',
    });
  });
});
