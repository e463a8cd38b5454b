import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { Writable } from 'node:stream';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { LiveLine } from '../live-line.js';
import type { RunMetrics } from '../run/metrics.js';
import { runPaths } from '../run/paths.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../testing/run.js';
import { duration, progressText, stepLine } from './report.js';

const metrics = {
  loss: 5.43214,
  lr: 3e-4,
  toks_per_s: 51234.4,
  mfu: 0.412,
  grad_norm: 0.871,
  dt_fetch_s: 0.0032,
  fetch_p50_ms: 2,
  fetch_p95_ms: 9,
};
const lineOf = (changed: RunMetrics) => stepLine({ step: 20, metrics: { ...metrics, ...changed } });

// Programs and people read these files. New fields and tags may come between, new columns at the end; no name and no
// order of these may change.
describe('the files of a run', () => {
  const STEP =
    'ts iso pid rank world step msg loss toks_per_s dt_fetch_s fetch_p50_ms fetch_p95_ms grad_norm gate_entropy_mean ' +
    'gate_entropy_min gate_max_gate gate_max_gate_mean gate_collapse_frac gate_branch_shares sel_k_mean sel_k_max ' +
    'sel_pct_at_max n_sel gate_released fb_save_failed fb_spike fb_update_skipped gpu_mem_alloc gpu_mem_peak gpu_mem_reserved mfu data';
  const TAGS =
    'gate/collapse_frac gate/entropy_mean gate/entropy_min gate/max_gate gate/max_gate_mean gate/released gate/share_cmp ' +
    'gate/share_sel gate/share_win mem/allocated_mib mem/peak_mib mem/reserved_mib sel/k_max sel/k_mean sel/n_sel sel/pct_at_max ' +
    'train/grad_norm train/loss train/lr train/toks_per_s val/loss val/ppl';
  /** The known names among those that were found. */
  const known = (names: readonly string[], list: string) => names.filter((name) => list.split(' ').includes(name));
  const OF_ATTENTION = /^(gate|sel|n_sel)/;
  let folder: ReturnType<typeof temporaryFolder>;
  beforeEach(() => {
    folder = temporaryFolder();
  });
  afterEach(() => folder.remove());

  async function filesOf(overrides: TinyOverrides) {
    const train = { steps: 3, eval_every: 3, save_every: 0, ...overrides.train };
    const config = tinyConfig(folder.path, { ...overrides, train });
    await runTraining(config, { peakFlops: 1e15 });
    const paths = runPaths(config.train.out_dir);
    const lines = readFileSync(paths.heartbeat(0), 'utf8').trimEnd().split('\n');
    const [events] = readdirSync(paths.tensorboard);
    const content = readFileSync(join(paths.tensorboard, events), 'latin1');
    return {
      beats: lines.map((line) => JSON.parse(line) as Record<string, unknown>),
      tags: [...new Set(content.match(/\b(?:gate|mem|sel|train|val)\/[a-z_0-9]+/g))].sort(),
      csv: (name: 'training' | 'val' | 'kStats' | 'fallbackCounters') =>
        readFileSync(paths[name], 'utf8').trimEnd().split('\n'),
    };
  }

  it('have the fields, columns and tags that programs read', async () => {
    // Gates and selection, and the schedule from dense to sparse attention.
    const { beats, tags, csv } = await filesOf({
      train: { n_sel_from: 8, n_sel_steps: 10, seq_len: 512, batch_size: 8 },
    });
    const steps = beats.filter(({ msg }) => msg === 'progress');
    for (const step of steps) expect(known(Object.keys(step), STEP)).toEqual(STEP.split(' '));
    for (const { gpu_mem_alloc: now, gpu_mem_peak: peak } of steps) expect(Number(now)).toBeLessThan(Number(peak));
    expect(Object.keys(beats.find(({ msg }) => msg === 'eval')!)).toEqual(
      'ts iso pid rank world step msg val_loss ppl'.split(' '),
    );
    expect(known(tags, TAGS)).toEqual(TAGS.split(' '));
    expect(csv('training')[0]).toMatch(/^step,loss,lr,toks_per_s(,|$)/);
    expect(csv('val')[0]).toMatch(/^step,val_loss,ppl(,|$)/);
    expect(csv('kStats')[0]).toMatch(/^step,sel_k_mean,sel_k_max,sel_pct_at_max(,|$)/);
    expect(csv('fallbackCounters').slice(0, 4)).toEqual([
      'step,counter,count',
      '1,save_failed,0',
      '1,spike,0',
      '1,update_skipped,0',
    ]);
    // Rows of steps, and a row of the evaluation.
    expect([csv('training').length, csv('kStats').length, csv('val').length]).toEqual([4, 4, 2]);
    expect(Number(csv('training')[1].split(',')[1])).toBeCloseTo(steps[0]['loss'] as number, 6);
  });

  it('have nothing of gates and selection with dense attention', async () => {
    const { beats, tags, csv } = await filesOf({ model: { attention: 'dense' } });
    const step = beats.find(({ msg }) => msg === 'progress')!;
    expect(known(Object.keys(step), STEP)).toEqual(STEP.split(' ').filter((name) => !OF_ATTENTION.test(name)));
    expect(known(tags, TAGS)).toEqual(TAGS.split(' ').filter((tag) => !OF_ATTENTION.test(tag)));
    expect(csv('kStats')).toHaveLength(1);
  });
});

describe('progress', () => {
  it('prints the step line of the runbooks', () => {
    expect(lineOf({})).toBe(
      'step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | mfu 41.2% | grad_norm 0.87 | fetch 3ms | fetch_p50 2ms | fetch_p95 9ms',
    );
    const { mfu: _, ...withoutMfu } = metrics;
    expect(stepLine({ step: 1, metrics: { ...withoutMfu, lr: 1e-10 } })).toContain(
      'lr 1.00e-10 | toks/s 51234 | grad_norm',
    );
    expect(lineOf({ n_sel: 32, gate_released: 0.125 })).toMatch(/fetch_p95 9ms \| n_sel 32 \| gate_released 12\.5%$/);
    expect(lineOf({ counters: { spike: 3, log_dropped: 7 } })).toMatch(/fetch_p95 9ms \| log_dropped 7$/);
  });

  it('prints durations', () => {
    expect(duration(9)).toBe('0:09');
    expect(duration(3725)).toBe('1:02:05');
    expect(duration(Number.POSITIVE_INFINITY)).toBe('?');
  });

  it('writes a live line to a terminal only', () => {
    const written: string[] = [];
    const stream = new Writable({
      write(chunk, _, done) {
        written.push(String(chunk));
        done();
      },
    });
    new LiveLine(stream).show('nothing');
    expect(written).toEqual([]);
    const live = new LiveLine(Object.assign(stream, { isTTY: true }));
    live.show(progressText({ step: 1, loss: 3, tokensPerSecond: 400 }, 2, 65));
    expect(written.join('')).toContain('1/2  loss 3.000  400 tok/s  1:05 left');
    live.clear();
    live.clear();
    expect(written).toHaveLength(2);
  });
});
