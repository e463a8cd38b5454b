import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  utimesSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { UsageError } from '../errors.js';
import { collectEnvironment } from './environment.js';
import { RunFolder } from './folder.js';
import { clearMarks, readAnomaly, readHalt, runPaths, writeAnomaly, writeHalt } from './paths.js';

let folder: string;
let run: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-run-'));
  run = join(folder, 'a', 'run');
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

function readJson(path: string): Record<string, unknown> {
  return JSON.parse(readFileSync(path, 'utf8')) as Record<string, unknown>;
}

test('the names are those of the contract', () => {
  const paths = runPaths('/out');
  expect(paths.heartbeat(2)).toBe('/out/heartbeat_rank2.jsonl');
  expect(paths.stackdump('rank0')).toBe('/out/stackdump_rank0.txt');
  expect(Object.values(paths).filter((path) => typeof path === 'string')).toEqual([
    '/out/training.csv',
    '/out/val.csv',
    '/out/k_stats.csv',
    '/out/fallback_counters.csv',
    '/out/own_metrics.csv',
    '/out/source_metrics.csv',
    '/out/attention.jsonl',
    '/out/samples.jsonl',
    '/out/run.log',
    '/out/metrics.json',
    '/out/env.json',
    '/out/config.yaml',
    '/out/checkpoints',
    '/out/checkpoints/latest',
    '/out/model.safetensors',
    '/out/config.json',
    '/out/tb',
    '/out/.HALT',
    '/out/.anomaly_type',
    '/out/gate_collapse_details.json',
    '/out/.lock',
  ]);
});

test('the folder is created and locked by the first rank only', () => {
  const first = new RunFolder(run);
  expect(() => new RunFolder(run)).toThrow(`in use by process ${process.pid}`);
  new RunFolder(run, 1).close();
  expect(existsSync(first.paths.lock)).toBe(true);
  writeFileSync(join(run, 'file'), '');
  first.close();
  expect(readdirSync(run)).toEqual(['file']);
});

test('a folder that was created for a run that never began is removed again, with its parents', () => {
  const run = join(folder, 'new', 'run');
  new RunFolder(run).close();
  expect(existsSync(join(folder, 'new'))).toBe(false);
  expect(existsSync(folder)).toBe(true);
});

test('files that a killed process had begun are removed, not those that somebody may be writing', () => {
  mkdirSync(run, { recursive: true });
  const dead = 2 ** 22 + 1; // Above the highest pid of Linux.
  const old = [`.model.safetensors.tmp-${dead}`, `.metrics.json.tmp-${process.ppid}`, 'notes.tmp-1'];
  const fresh = [`.env.json.tmp-${dead}`, `.config.yaml.tmp-${dead}`, `..HALT.tmp-${dead}`];
  for (const name of [...old, ...fresh]) writeFileSync(join(run, name), 'half');
  for (const name of old) utimesSync(join(run, name), 1, 1);
  new RunFolder(run, 1).close();
  expect(readdirSync(run)).toHaveLength(6);
  new RunFolder(run).close();
  // Another machine may be writing .HALT, but only the owner of the lock writes the others.
  expect(readdirSync(run).sort()).toEqual([`..HALT.tmp-${dead}`, `.metrics.json.tmp-${process.ppid}`, 'notes.tmp-1']);
});

test('an out_dir that is a file, or inside one, is refused by name', () => {
  writeFileSync(join(folder, 'file'), '');
  expect(() => new RunFolder(join(folder, 'file'))).toThrow(`${join(folder, 'file')}: is not a folder`);
  expect(() => new RunFolder(join(folder, 'file', 'run'))).toThrow(UsageError);
});

test('environment and config are whole files that read back', () => {
  const runFolder = new RunFolder(run);
  runFolder.writeConfig('model:\n  dim: 768\n');
  const environment = collectEnvironment({ NSA_LR: '1', NSA_TOKEN: 'secret' }, folder);
  runFolder.writeEnvironment({ device: 'cpu' }, environment);
  runFolder.close();
  expect(readFileSync(runFolder.paths.config, 'utf8')).toBe('model:\n  dim: 768\n');
  expect(readJson(runFolder.paths.env)).toMatchObject({ device: 'cpu', environment: { NSA_LR: '1' } });
  expect(readFileSync(runFolder.paths.env, 'utf8')).not.toContain('secret');
});

test('a halt is seen however it was written', () => {
  mkdirSync(run, { recursive: true });
  expect(readHalt(run)).toBeUndefined();
  writeHalt(run, 'gate\ncollapse');
  expect(readFileSync(join(run, '.HALT'), 'utf8')).toBe('halt: gate collapse\n');
  expect(readHalt(run)).toBe('gate collapse');
  for (const [content, reason] of [
    ['', 'no reason given'],
    ['manual stop\n', 'manual stop'],
    ['halt: manual_stop', 'manual_stop'],
  ]) {
    writeFileSync(join(run, '.HALT'), content);
    expect(readHalt(run)).toBe(reason);
  }
  rmSync(join(run, '.HALT'));
  mkdirSync(join(run, '.HALT'));
  expect(readHalt(run)).toContain('.HALT cannot be read');
});

test('the type of an anomaly is kept until a new start clears it', () => {
  mkdirSync(run, { recursive: true });
  expect(readAnomaly(run)).toBeUndefined();
  writeAnomaly(run, 'non_finite_loss');
  writeHalt(run, 'x');
  expect(readAnomaly(run)).toBe('non_finite_loss');
  clearMarks(run);
  clearMarks(run);
  expect([readAnomaly(run), readHalt(run)]).toEqual([undefined, undefined]);
});
