/** For each alert rule a recorded run that triggers it, and one just below that does not; an hour of health raises none. */
import { appendFileSync, closeSync, existsSync, openSync, readFileSync } from 'node:fs';
import { basename } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { HeartbeatFields } from '../run/logs/heartbeat.js';
import { readAnomaly, readHalt, runPaths, writeAnomaly, writeHalt } from '../run/paths.js';
import { cpuMs } from '../testing/cpu-time.js';
import { temporaryFolder } from '../testing/run.js';
import { SteadyAges } from './ages.js';
import type { Level } from './row.js';
import { checkHealth } from './rules.js';
import { RecordedRun } from './testing/recorded-run.js';
import { resolveThresholds } from './thresholds.js';
import { Watchdog } from './watchdog.js';

const LIMITS = resolveThresholds({});
const INTERVAL = 30;

let folder: { path: string; remove: () => void };
let run: RecordedRun;
beforeEach(() => {
  folder = temporaryFolder();
  run = new RecordedRun(folder.path);
});
afterEach(() => {
  run.close();
  folder.remove();
});

/** A watchdog whose clocks are the recording's. */
function watchdogOf(recorded: RecordedRun, halt = false) {
  const clock = () => recorded.now;
  return new Watchdog({
    dir: recorded.dir,
    thresholds: LIMITS,
    halt,
    ages: new SteadyAges(clock, clock),
    signal: () => {},
  });
}

const levelOf = (rule: string): Level | undefined =>
  checkHealth(folder.path, LIMITS, { now: run.now }).rows.find((row) => row.rule === rule)?.level;

const every = (fields: Partial<HeartbeatFields>) => () => fields;
/** The last `n` of 100 steps. */
const last = (n: number, fields: Partial<HeartbeatFields>) => (step: number) => (step > 100 - n ? fields : {});

/** A usual norm of 1, and the last. */
const spike = (norm: number) => (step: number) => ({ grad_norm: step === 100 ? norm : 1 });

type Change = (step: number) => Partial<HeartbeatFields>;
const CASES: [rule: string, level: Level, triggers: Change, justBelow: Change][] = [
  ['loss', 'red', last(1, { loss: Number.NaN }), last(1, { loss: 1e30 })],
  ['loss', 'red', last(1, { loss: Number.POSITIVE_INFINITY }), every({})],
  ['loss', 'red', last(1, { grad_norm: Number.NaN }), last(1, { grad_norm: 3 })],
  ['gate_entropy', 'red', last(3, { gate_entropy_mean: 0.19 }), last(3, { gate_entropy_mean: 0.51 })],
  ['gate_collapse', 'red', last(1, { gate_collapse_frac: 0.51 }), last(1, { gate_collapse_frac: 0.1 })],
  ['gate_collapse', 'yellow', last(1, { gate_collapse_frac: 0.11 }), last(1, { gate_collapse_frac: 0.1 })],
  ['gate_max', 'yellow', last(1, { gate_max_gate_mean: 0.9 }), last(1, { gate_max_gate_mean: 0.89 })],
  ['grad_zero', 'red', last(1, { grad_norm: 0 }), last(1, { grad_norm: 1e-12 })],
  ['grad_spike', 'yellow', spike(10.01), spike(10)],
  ['fetch', 'yellow', last(3, { dt_fetch_s: 2.01 }), last(3, { dt_fetch_s: 1.99 })],
  ['fetch_stall', 'yellow', last(3, { dt_fetch_s: 1.01 }), last(2, { dt_fetch_s: 1.9 })],
  ['fetch_p95', 'yellow', last(1, { fetch_p95_ms: 100 }), last(1, { fetch_p95_ms: 99 })],
  ['flatline', 'red', last(5, { toks_per_s: 0 }), last(4, { toks_per_s: 0 })],
  ['fallbacks', 'yellow', last(1, { fb_save_failed: 1 }), every({ fb_save_failed: 7 })],
  [
    'fallbacks',
    'yellow',
    last(1, { fb_attention_portable: 1 }),
    last(1, { fb_attention_outer: 1, fb_attention_gather: 1 }),
  ],
];

describe.each(CASES)('rule %s (%s)', (rule, level, triggers, justBelow) => {
  it('is raised within two intervals by what triggers it', () => {
    const watchdog = watchdogOf(run);
    run.steps(1, 95, 10);
    expect(watchdog.tick().alerts).toEqual([]);
    run.steps(96, 100, 2, triggers);
    // Looks come every 30 s, the run goes on for two more steps at most: the alert may need the second.
    const raised = [watchdog.tick(), watchdog.tick()].flatMap(({ alerts }) => alerts);
    expect(raised.map((alert) => [alert.rule, alert.level])).toContainEqual([rule, level]);
  });

  it('is seen by a single look', () => {
    run.steps(1, 100, 10, triggers);
    expect(levelOf(rule)).toBe(level);
  });

  it('is not raised just below', () => {
    run.steps(1, 100, 10, justBelow);
    expect(levelOf(rule)).toBe('green');
  });
});

describe('rules of time', () => {
  it('accepts gates that a schedule has closed, until it is over', () => {
    const closed = { gate_entropy_mean: 0, gate_collapse_frac: 1, gate_max_gate_mean: 1 };
    run.steps(1, 100, 10, every({ ...closed, gate_released: 0.01 }));
    for (const rule of ['gate_entropy', 'gate_collapse', 'gate_max']) expect(levelOf(rule), rule).toBeUndefined();
    run.steps(101, 103, 10, every(closed));
    expect(levelOf('gate_entropy')).toBe('red');
    expect(levelOf('gate_collapse')).toBe('red');
  });

  it('entropy: low in two heartbeats is a warning, in three an alarm', () => {
    run.steps(1, 100, 10, last(2, { gate_entropy_mean: 0.1 }));
    expect(levelOf('gate_entropy')).toBe('yellow');
    run.steps(101, 101, 10, every({ gate_entropy_mean: 0.1 }));
    expect(levelOf('gate_entropy')).toBe('red');
  });

  it('entropy: at the limit is no alarm', () => {
    run.steps(1, 100, 10, last(9, { gate_entropy_mean: 0.2 }));
    expect(levelOf('gate_entropy')).toBe('yellow');
  });

  it('collapse: half of the gates is a warning, more an alarm', () => {
    run.steps(1, 100, 10, last(1, { gate_collapse_frac: 0.5 }));
    expect(levelOf('gate_collapse')).toBe('yellow');
    run.steps(101, 101, 10, every({ gate_collapse_frac: 0.501 }));
    expect(levelOf('gate_collapse')).toBe('red');
  });

  it('heartbeat: 180 s is fine, more is a stall', () => {
    run.lock('alive');
    run.steps(1, 5, 1);
    run.now += 180;
    expect(levelOf('heartbeat')).toBe('green');
    run.now += 1;
    expect(levelOf('heartbeat')).toBe('red');
  });

  it('heartbeat: an evaluation within its time keeps it quiet, one beyond does not', () => {
    run.lock('alive');
    run.steps(1, 5, 1);
    run.section('eval', 5);
    run.now += LIMITS.deadlineEval;
    expect(levelOf('heartbeat')).toBe('green');
    expect(levelOf('section')).toBe('green');
    run.now += 1;
    expect(levelOf('heartbeat')).toBe('red');
    expect(levelOf('section')).toBe('red');
  });

  it.each([
    ['fetch', LIMITS.deadlineFetch],
    ['step', LIMITS.deadlineStep],
    ['save', LIMITS.deadlineSave],
    ['eval', LIMITS.deadlineEval],
  ] as const)('section %s: has a deadline, and the row names rank and section', (section, deadline) => {
    run.lock('alive');
    run.steps(1, 5, 1);
    run.section(section, 6);
    run.now += deadline;
    expect(levelOf('section')).toBe('green');
    run.now += 1;
    const row = checkHealth(folder.path, LIMITS, { now: run.now }).rows.find(({ rule }) => rule === 'section')!;
    expect(row.level).toBe('red');
    expect(row.value).toBe(`rank 0 in ${section} for ${deadline + 1} s at step 6`);
  });

  it('process: gone without an end is an alarm at once', () => {
    run.steps(1, 5, 1);
    run.lock('dead');
    expect(levelOf('process')).toBe('red');
  });

  it('process: without a lock it may go on elsewhere, but not without heartbeats', () => {
    run.steps(1, 5, 1);
    expect(levelOf('process')).toBe('green');
    run.now += 301;
    expect([levelOf('process'), levelOf('heartbeat')]).toEqual(['red', 'red']);
  });

  it('process: one that said goodbye is not gone', () => {
    run.steps(1, 5, 1);
    run.write({ step: 5, msg: 'stop', detail: 'done' });
    run.now += 10_000;
    expect(levelOf('process')).toBe('green');
    expect(checkHealth(folder.path, LIMITS, { now: run.now }).ok).toBe(true);
  });

  it('throughput: down by more than half for ten minutes is a warning; by half, or for nine minutes, is not', () => {
    const slow = (share: number) => (step: number) => ({ toks_per_s: step > 360 ? 1000 * share : 1000 });
    run.steps(1, 360 + 54, 10, slow(0.49)); // nine minutes
    expect(levelOf('throughput')).toBe('green');
    run.steps(415, 421, 10, slow(0.49));
    expect(levelOf('throughput')).toBe('yellow');
  });

  it('throughput: half of it is not more than half', () => {
    run.steps(1, 440, 10, (step) => ({ toks_per_s: step > 360 ? 500 : 1000 }));
    expect(levelOf('throughput')).toBe('green');
  });

  it('throughput: a fresh start after a pause is given its time', () => {
    run.steps(1, 360, 10, every({ toks_per_s: 1000 }));
    run.now += 3600;
    run.steps(361, 380, 10, every({ toks_per_s: 100 }));
    expect(levelOf('throughput')).toBe('green');
  });

  it('memory: growth of more than a tenth over the life of the process is a warning', () => {
    const grow = (mib: number) => (step: number) => ({ gpu_mem_reserved: 1000 + (mib * step) / 100 });
    run.steps(1, 100, 10, grow(90));
    expect(levelOf('memory')).toBe('green');
    run.steps(101, 200, 10, grow(90));
    expect(levelOf('memory')).toBe('yellow');
  });

  it('memory: what the first evaluation and the first checkpoint add once is no leak', () => {
    const grow = (step: number) => ({ gpu_mem_reserved: step < 100 ? 1000 : step < 150 ? 1500 : 1800 });
    run.steps(1, 200, 10, grow);
    expect(levelOf('memory')).toBe('green');
  });

  it('marks: .HALT is a warning, .anomaly_type an alarm', () => {
    run.steps(1, 5, 1);
    expect([levelOf('halt'), levelOf('anomaly')]).toEqual(['green', 'green']);
    writeHalt(folder.path, 'lunch');
    expect([levelOf('halt'), levelOf('anomaly')]).toEqual(['yellow', 'green']);
    writeAnomaly(folder.path, 'gate_collapse');
    expect([levelOf('halt'), levelOf('anomaly')]).toEqual(['yellow', 'red']);
  });

  it('spikes: one now and then is usual, a rate above the limit over the window is a warning', () => {
    const rowsOf = (path: string) =>
      checkHealth(path, LIMITS, { now: run.now }).rows.filter(({ level }) => level !== 'green');
    const spikes = (count: number) => (step: number) => ({ fb_spike: Math.max(0, count - (250 - step)) });
    run.steps(1, 250, 1, spikes(4)); // 2 % of 200 steps
    expect(rowsOf(folder.path)).toEqual([]);
    run.steps(251, 251, 1, every({ fb_spike: 5 }));
    expect(rowsOf(folder.path)).toMatchObject([{ rule: 'spikes', level: 'yellow', value: '5 in 200 steps' }]);
  });

  it('spikes: a run of fewer steps than the window is not judged', () => {
    run.steps(1, 100, 1, (step) => ({ fb_spike: step }));
    expect(levelOf('spikes')).toBe('green');
  });

  it('fetch_p95: the first fetches of a process are not judged', () => {
    run.steps(1, 31, 1, every({ fetch_p95_ms: 500 }));
    expect(levelOf('fetch_p95')).toBe('green');
    run.steps(32, 32, 1, every({ fetch_p95_ms: 500 }));
    expect(levelOf('fetch_p95')).toBe('yellow');
    run.write({ step: 32, msg: 'boot', detail: 'resumed' });
    run.steps(33, 34, 1, every({ fetch_p95_ms: 500 }));
    expect(levelOf('fetch_p95')).toBe('green');
  });

  it.each([
    ['falls', 'green', (step: number) => 3 - step / 20_000],
    ['stands still', 'yellow', () => 3],
    ['rises', 'yellow', (step: number) => 3 + step / 20_000],
  ] as const)('loss_trend: a loss that %s over the window', (trend, level, loss) => {
    const noise = (step: number) => 0.1 * Math.sin(step * step);
    run.steps(1, 2500, 1, (step) => ({ loss: loss(step) + noise(step) }));
    expect(levelOf('loss_trend')).toBeUndefined(); // fewer steps than the window
    const rows = (lossWindow: number) => checkHealth(folder.path, { ...LIMITS, lossWindow }, { now: run.now }).rows;
    expect(rows(2000).find(({ rule }) => rule === 'loss_trend')).toMatchObject({
      level,
      value: expect.stringMatching(new RegExp(`^${trend}: [\\d.]+, then [\\d.]+ in 2000 steps$`)),
    });
    expect(rows(0).some(({ rule }) => rule === 'loss_trend')).toBe(false);
    run.steps(2501, 2501, 1, every({ data: 'synthetic' })); // random tokens cannot be learned
    expect(rows(2000).some(({ rule }) => rule === 'loss_trend')).toBe(false);
  });

  it('loss_flatline: only when asked for', () => {
    run.steps(1, 50, 1);
    run.steps(51, 70, 1, every({ loss: 2 }));
    expect(levelOf('loss_flatline')).toBeUndefined();
    const rows = (n: number) => checkHealth(folder.path, { ...LIMITS, lossFlatlineN: n }, { now: run.now }).rows;
    expect(rows(20).find(({ rule }) => rule === 'loss_flatline')!.level).toBe('yellow');
    expect(rows(21).find(({ rule }) => rule === 'loss_flatline')!.level).toBe('green');
  });
});

describe('an hour of health', () => {
  it('raises nothing, looked at every interval', () => {
    const watchdog = watchdogOf(run, true);
    run.lock('alive');
    const alerts: string[] = [];
    // Two steps a second, an evaluation of four minutes in the middle, a save every ten minutes.
    for (let step = 1; step <= 7200; step++) {
      run.section('step', step);
      run.steps(step, step, 0.5);
      if (step % 1200 === 0) {
        run.section('save', step);
        run.now += 20;
        run.write({ step, msg: 'checkpoint', detail: 'x' });
      }
      if (step === 3600) {
        run.section('eval', step);
        for (let i = 0; i < 8; i++) {
          run.now += INTERVAL;
          alerts.push(...watchdog.tick().alerts.map(({ line }) => line));
        }
        run.write({ step, msg: 'eval', val_loss: 2.5 });
      }
      if (step % (2 * INTERVAL) === 0) alerts.push(...watchdog.tick().alerts.map(({ line }) => line));
    }
    expect(alerts).toEqual([]);
    expect(readHalt(folder.path)).toBeUndefined();
  });
});

describe('a damaged or forged heartbeat', () => {
  it.each([1e9, 2 ** 53, -1, 1.5, '8', null])('with a world of %j counts as one without it', (world) => {
    run.steps(1, 10, 1);
    const beat = { ts: run.now, iso: 'x', pid: 1, rank: 0, step: 11, msg: 'progress', world };
    appendFileSync(runPaths(folder.path).heartbeat(0), `${JSON.stringify(beat)}\n`);
    expect(cpuMs(() => expect(levelOf('ranks')).toBeUndefined())).toBeLessThan(2000);
  });

  it('may lack thousands of ranks, of which a line names some', () => {
    run.steps(1, 10, 1);
    const beat = { ts: run.now, iso: 'x', pid: 1, rank: 0, step: 11, msg: 'progress', world: 65_536 };
    appendFileSync(runPaths(folder.path).heartbeat(0), `${JSON.stringify(beat)}\n`);
    const { value } = checkHealth(folder.path, LIMITS, { now: run.now }).rows.find(({ rule }) => rule === 'ranks')!;
    expect(value).toMatch(/^no heartbeat of rank 1, 2, .*, 16 and 65519 more$/);
  });
});

describe('the watchdog', () => {
  it('names rank and section of a hang, dumps, halts, and says it once', () => {
    const signals: [number, string][] = [];
    const clock = () => run.now;
    const watchdog = new Watchdog({
      dir: folder.path,
      thresholds: LIMITS,
      halt: true,
      ages: new SteadyAges(clock, clock),
      signal: (pid, signal) => void signals.push([pid, signal]),
    });
    run.lock('alive');
    run.steps(1, 10, 1);
    run.section('fetch', 11);
    // The process that gets the signal is the one that writes the heartbeats, not one that a lock names.
    const heartbeats = openSync(runPaths(folder.path).heartbeat(0), 'a');
    expect(watchdog.tick().alerts).toEqual([]);
    let looks = 0;
    let tick = watchdog.tick();
    while (tick.alerts.length === 0 && looks < 20) {
      run.now += INTERVAL;
      looks += 1;
      tick = watchdog.tick();
    }
    expect(looks).toBe(LIMITS.deadlineFetch / INTERVAL + 1);
    closeSync(heartbeats);
    expect(tick.alerts[0].line).toContain('rank 0 in fetch for 150 s at step 11');
    expect(readHalt(folder.path)).toContain('section_stall rank 0: rank 0 in fetch');
    expect(readAnomaly(folder.path)).toBe('section_stall');
    expect(signals).toEqual([[process.pid, 'SIGUSR1']]);
    const dump = tick.actions.find((line) => line.includes('stackdump_'))!.replace('wrote ', '');
    expect(readFileSync(dump, 'utf8')).toContain('in fetch');
    run.now += INTERVAL;
    // The marks it wrote itself are no news, nor is what it has said already; the stale heartbeat is.
    expect(watchdog.tick().alerts.map(({ rule }) => rule)).toEqual([]);
    run.now += INTERVAL;
    expect(watchdog.tick().alerts.map(({ rule }) => rule)).toEqual(['heartbeat']);
  });

  it('writes the files of one collapse once, though two rules see it, and under the first name', () => {
    const watchdog = watchdogOf(run, true);
    run.lock('alive');
    const collapsed = every({ gate_entropy_mean: 0.05, gate_collapse_frac: 0.9 });
    run.steps(1, 50, 1, collapsed);
    const { alerts, actions } = watchdog.tick();
    expect(alerts.map(({ rule }) => rule)).toEqual(['gate_entropy', 'gate_collapse']);
    const { anomalyType, gateCollapseDetails, halt } = runPaths(folder.path);
    expect(actions).toEqual([anomalyType, gateCollapseDetails, halt].map((path) => `wrote ${path}`));
    const reason = readHalt(folder.path);
    run.steps(51, 60, 1, () => ({ ...collapsed(), grad_norm: 0 }));
    expect(watchdog.tick().actions).toEqual([]);
    expect([readAnomaly(folder.path), readHalt(folder.path)]).toEqual(['gate_collapse', reason]);
  });

  it('reports a rule that flaps once, and that it recovered when it has been calm for a while', () => {
    const watchdog = watchdogOf(run);
    run.lock('alive');
    run.steps(1, 100, 1);
    const said: string[] = [];
    const look = (slow: boolean) => {
      run.steps(101, 101, INTERVAL, every({ fetch_p95_ms: slow ? 120 : 20 }));
      const { alerts, recovered } = watchdog.tick();
      said.push(...alerts.map(({ line }) => line), ...recovered.map(({ rule }) => `${rule} recovered`));
    };
    for (let i = 0; i < 30; i++) look(i % 3 === 0);
    for (let i = 0; i < 12; i++) look(false);
    const words = `warning ${basename(folder.path)}: fetch_p95: one fetch in twenty takes 120 ms or more; below 100 ms is allowed. `;
    expect(said).toEqual([expect.stringMatching(new RegExp(`^${words}`)), 'fetch_p95 recovered']);
    look(true);
    expect(said).toHaveLength(3);
  });

  it('writes the details of a gate collapse, and no .HALT unless asked to', () => {
    const watchdog = watchdogOf(run);
    run.lock('alive');
    run.steps(1, 50, 1, (step) => (step > 40 ? { gate_entropy_mean: 0.05, gate_branch_shares: [1, 0, 0] } : {}));
    const { alerts } = watchdog.tick();
    expect(alerts.map(({ rule }) => rule)).toEqual(['gate_entropy']);
    const details = JSON.parse(readFileSync(runPaths(folder.path).gateCollapseDetails, 'utf8'));
    expect(details).toMatchObject({ rank: 0, step: 50, rule: 'gate_entropy', value: 0.05 });
    expect(details.recent.at(-1)).toMatchObject({ step: 50, gate_branch_shares: [1, 0, 0] });
    expect(readAnomaly(folder.path)).toBe('gate_collapse');
    expect(existsSync(runPaths(folder.path).halt)).toBe(false);
  });

  it('names the rank that is ill, and leaves the others alone', () => {
    const other = new RecordedRun(folder.path, { rank: 1, now: run.now });
    run.lock('alive');
    run.steps(1, 30, 1);
    other.steps(1, 30, 1, (step) => (step === 30 ? { loss: Number.NaN } : {}));
    const { alerts } = watchdogOf(run).tick();
    expect(alerts.map(({ rule, rank }) => [rule, rank])).toEqual([['loss rank1', 1]]);
    other.close();
  });

  it('is not deceived by a clock that jumps an hour ahead or back', () => {
    let wall = 0;
    let steady = 0;
    const ages = new SteadyAges(
      () => run.now + wall,
      () => steady,
    );
    const watchdog = new Watchdog({ dir: folder.path, thresholds: LIMITS, halt: true, ages, signal: () => {} });
    run.lock('alive');
    const looks = (jump: number) => {
      wall += jump;
      steady += INTERVAL;
      run.steps(1, 3, INTERVAL / 3);
      return watchdog.tick().alerts.filter(({ rule }) => rule === 'heartbeat');
    };
    expect([looks(0), looks(3600), looks(0), looks(-7200), looks(0)].flat()).toEqual([]);
    // A real stall is still one: steady time passes, nothing new comes.
    steady += 200;
    expect(watchdog.tick().alerts.map(({ rule }) => rule)).toContain('heartbeat');
  });

  it('starts anew with a new process', () => {
    const watchdog = watchdogOf(run, true);
    run.lock('dead');
    run.now += 1;
    run.steps(1, 30, 1, last(71, { loss: Number.NaN }));
    watchdog.tick();
    run.lock('alive');
    run.write({ step: 0, msg: 'boot', detail: 'resumed' });
    run.steps(31, 40, 1);
    expect(watchdog.tick().rows.find(({ rule }) => rule === 'loss')!.level).toBe('green');
  });

  it('does not judge a new process, before it has written anything, by what a killed one left behind', () => {
    const watchdog = watchdogOf(run, true);
    run.lock('dead');
    run.steps(1, 30, 1, last(71, { loss: Number.NaN }));
    run.section('step', 31);
    run.now += LIMITS.deadlineStep + LIMITS.heartbeatStall + 1;
    run.lock('alive', run.now);
    expect(watchdog.tick().alerts).toEqual([]);
    expect(readHalt(folder.path)).toBeUndefined();
    // It has as long as any other to write its first heartbeat.
    run.now += LIMITS.heartbeatStall + 1;
    expect(watchdog.tick().alerts.map(({ rule }) => rule)).toEqual(['heartbeat']);
  });
});
