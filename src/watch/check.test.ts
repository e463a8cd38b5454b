import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { HeartbeatFields } from '../run/logs/heartbeat.js';
import { runPaths } from '../run/paths.js';
import { temporaryFolder } from '../testing/run.js';
import { type CheckOptions, checkRun, compareBaseline, loadBaseline, saveBaseline } from './check.js';
import { RecordedRun } from './testing/recorded-run.js';
import { resolveThresholds } from './thresholds.js';

let folder: { path: string; remove: () => void };
beforeEach(() => {
  folder = temporaryFolder();
});
afterEach(() => folder.remove());

const OPTIONS: CheckOptions = { minSteps: 10, minTps: 500, thresholds: resolveThresholds({}), mustLearn: true };

/** A run of 100 steps with a row for each; `losses` and heartbeats may be changed. */
function recorded(
  change: (step: number) => Partial<HeartbeatFields> = () => ({}),
  loss = (step: number) => 5 - step / 50,
) {
  const run = new RecordedRun(folder.path);
  run.steps(1, 100, 1, change);
  run.close();
  const paths = runPaths(folder.path);
  const rows = Array.from({ length: 100 }, (_, i) => `${i + 1},${loss(i + 1)},0.001,1000\n`);
  writeFileSync(paths.training, `step,loss,lr,toks_per_s\n${rows.join('')}`);
  return { csv: paths.training, heartbeat: paths.heartbeat(0) };
}

const bad = (rows: readonly { rule: string; level: string }[]) =>
  rows.filter(({ level }) => level !== 'green').map(({ rule, level }) => `${level} ${rule}`);

describe('checkRun', () => {
  it('passes a healthy run and measures it', () => {
    const { rows, measured } = checkRun(recorded(), OPTIONS);
    expect(bad(rows)).toEqual([]);
    expect(measured.steps).toBe(100);
    expect(measured.last_loss).toBeCloseTo(5 - 95.5 / 50, 5);
    expect(measured.toks_per_s).toBeGreaterThan(900);
    expect(measured.gpu_mem_reserved).toBe(1000);
  });

  it.each<[string, () => Parameters<typeof checkRun>[0], string[]]>([
    ['NaN', () => recorded(undefined, (step) => (step === 50 ? Number.NaN : 5 - step / 50)), ['red loss_finite']],
    ['a loss that rises', () => recorded(undefined, (step) => 5 + step / 50), ['red loss_falls']],
    ['a loss that stays', () => recorded(undefined, () => 5), ['red loss_falls']],
    ['slow steps', () => recorded(() => ({ toks_per_s: 499 })), ['red throughput']],
    ['a single zero gradient', () => recorded((step) => (step === 7 ? { grad_norm: 0 } : {})), []],
    ['zero gradients', () => recorded((step) => (step % 40 === 0 ? { grad_norm: 0 } : {})), ['red gradients']],
    ['slow first fetches', () => recorded((step) => (step <= 8 ? { dt_fetch_s: 0.9 } : {})), []],
    ['a spike', () => recorded((step) => ({ fb_spike: Number(step > 50) })), []],
    ['many spikes', () => recorded((step) => ({ fb_spike: Math.floor(step / 30) })), ['yellow spikes']],
    ['a fallback', () => recorded(() => ({ fb_save_failed: 1 })), []],
    ['slow fetches', () => recorded(() => ({ dt_fetch_s: 2.1 })), ['red fetch', 'yellow fetch_p95']],
    ['some slow fetches', () => recorded((step) => (step % 10 === 0 ? { dt_fetch_s: 0.2 } : {})), ['yellow fetch_p95']],
    ['collapsed gates', () => recorded(() => ({ gate_entropy_mean: 0.1 })), ['red gate_entropy']],
    ['many collapsed gates', () => recorded(() => ({ gate_collapse_frac: 0.6 })), ['red gate_collapse']],
    ['a few collapsed gates', () => recorded(() => ({ gate_collapse_frac: 0.2 })), ['yellow gate_collapse']],
    ['nothing selected', () => recorded(() => ({ sel_k_mean: 0 })), ['red selection']],
    ['fallbacks', () => recorded(() => ({ fb_save_failed: 2 })), ['yellow fallbacks']],
    ['no fallback in kernels that served', () => recorded((step) => ({ fb_attention_union: step })), []],
  ])('sees %s', (_, make, expected) => {
    const input = make();
    expect(bad(checkRun(input, OPTIONS).rows)).toEqual(expected);
  });

  it('sees too few steps, damaged rows and missing heartbeats', () => {
    const input = recorded();
    expect(bad(checkRun(input, { ...OPTIONS, minSteps: 101 }).rows)).toEqual(['red steps']);
    writeFileSync(input.csv, 'step,loss,lr,toks_per_s\n1,5,1,1000\nwhat\n2,4,1,1000\n');
    expect(bad(checkRun(input, OPTIONS).rows)).toEqual(['yellow csv']);
    const none = { ...input, heartbeat: join(folder.path, 'none.jsonl') };
    expect(bad(checkRun(none, { ...OPTIONS, minSteps: 1 }).rows)).toEqual(['yellow csv', 'red heartbeats']);
    expect(() => checkRun({ csv: 'no.csv', heartbeat: 'no.jsonl' }, OPTIONS)).toThrow('contains no steps');
  });

  it('does not ask random tokens to be learned', () => {
    const input = recorded(undefined, (step) => 5.55 + 0.01 * Math.sin(step));
    expect(bad(checkRun(input, { ...OPTIONS, mustLearn: false }).rows)).toEqual([]);
  });
});

describe('baselines', () => {
  const baseline = { steps: 100, last_loss: 3, toks_per_s: 1000, fetch_p95_ms: 5, gpu_mem_reserved: 100 };

  it.each([
    [{ toks_per_s: 800 }, []],
    [{ toks_per_s: 799 }, ['red baseline_toks_per_s']],
    [{ last_loss: 3.59 }, []],
    [{ last_loss: 3.61 }, ['red baseline_loss']],
    [{ last_loss: Number.NaN }, ['red baseline_loss']],
    [{ gpu_mem_reserved: 120 }, []],
    [{ gpu_mem_reserved: 121 }, ['red baseline_memory']],
  ])('%j against 20 %% tolerance', (change, expected) =>
    expect(bad(compareBaseline({ ...baseline, ...change }, baseline, 0.2))).toEqual(expected),
  );

  it('are kept in a file, and refused when they are something else', () => {
    const path = join(folder.path, 'baseline.json');
    saveBaseline(path, baseline);
    expect(loadBaseline(path)).toEqual(baseline);
    writeFileSync(path, '{"steps": 3}');
    expect(() => loadBaseline(path)).toThrow('has no number last_loss');
    writeFileSync(path, 'x');
    expect(() => loadBaseline(path)).toThrow('is not JSON');
  });
});
