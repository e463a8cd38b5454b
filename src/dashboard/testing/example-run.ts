/** Writes the files of a made-up run, with the trainer's own writers, for tests, screenshots and the benchmark. */
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseConfig } from '../../config/parse.js';
import { toYaml } from '../../config/print.js';
import { OWN_METRICS_CSV, SOURCE_METRICS_CSV, TRAINING_CSV, VAL_CSV } from '../../run/logs/csv.js';
import type { HeartbeatFields } from '../../run/logs/heartbeat.js';
import { openCsv, openHeartbeats } from '../../run/logs/log.js';
import { runPaths } from '../../run/paths.js';

export interface ExampleOptions {
  readonly steps: number;
  /** Steps of the config; more than `steps` is a run that is not finished. Default: `steps`. */
  readonly planned?: number;
  readonly layers?: number;
  readonly seed?: number;
  readonly ranks?: number;
  readonly learningRate?: number;
  /** Seconds since 1970 of the last step. Default: now. */
  readonly end?: number;
  /** A step with a loss far above the others. */
  readonly spikeAt?: number;
  /** Steps after which the run was stopped and resumed from 100 steps before. */
  readonly restartAt?: number;
}

const SECONDS_PER_STEP = 0.42;

/** A small generator of uniform numbers: examples must look the same everywhere. */
function uniform(seed: number): () => number {
  let state = seed * 2654435761 + 1;
  return () => {
    state = (Math.imul(state ^ (state >>> 15), 0x2c1b3c6d) + 0x9e3779b9) | 0;
    return ((state ^ (state >>> 13)) >>> 0) / 2 ** 32;
  };
}

export function writeExampleRun(dir: string, options: ExampleOptions): void {
  const { steps, planned = steps, layers = 6, seed = 1, ranks = 1, learningRate = 6e-4 } = options;
  mkdirSync(join(dir, 'checkpoints'), { recursive: true });
  const paths = runPaths(dir);
  const random = uniform(seed);
  const started = (options.end ?? Date.now() / 1000) - steps * SECONDS_PER_STEP;
  let now = started;
  const config = parseConfig({
    model: { dim: 384, n_layers: layers, n_heads: 6, n_kv_groups: 2 },
    train: { steps: planned, seq_len: 2048, batch_size: 8, lr: learningRate, seed, out_dir: 'artifacts/example' },
  });
  writeFileSync(paths.config, toYaml(config));
  const machine = { host: 'node-1', cpu: 'Example CPU', cores: 32, memory_mib: 262144 };
  writeFileSync(paths.env, JSON.stringify({ machine, versions: { trefoil: '0.1.0', node: '20.19.0' } }));
  const clock = () => now * 1000;
  const beats = Array.from({ length: ranks }, (_, rank) => {
    return openHeartbeats(paths.heartbeat(rank), rank, { clock, world: ranks });
  });
  const write = (fields: HeartbeatFields) => {
    for (const writer of beats) writer.write(fields);
  };
  const training = openCsv(paths.training, TRAINING_CSV);
  const val = openCsv(paths.val, VAL_CSV);
  const own = openCsv(paths.ownMetrics, OWN_METRICS_CSV);
  const sources = openCsv(paths.sourceMetrics, SOURCE_METRICS_CSV);
  const attention: string[] = [];
  const samples: string[] = [];
  write({ step: 0, msg: 'boot', detail: 'new run' });
  write({ step: 0, msg: 'loader_ready', data: 'hub' });
  const gaussian = () => random() + random() + random() - 1.5;
  const one = (step: number) => {
    now += SECONDS_PER_STEP * (0.97 + 0.06 * random());
    const share = step / planned;
    const warm = Math.min(1, step / (0.04 * planned));
    const lr = learningRate * warm * (0.1 + 0.45 * (1 + Math.cos(Math.PI * share)));
    const smooth = 2.55 + 7.4 * Math.exp(-9 * share ** 0.55) + 0.25 * (1 - share);
    const loss = step === options.spikeAt ? smooth + 4.2 : smooth + 0.05 * gaussian();
    const sel = 0.2 + 0.22 * (1 - Math.exp(-6 * share));
    const win = 0.46 - 0.1 * (1 - Math.exp(-4 * share));
    write({
      step,
      msg: 'progress',
      loss,
      toks_per_s: 39_000 * (0.985 + 0.02 * random()),
      data: 'hub',
      dt_fetch_s: 0.002 + 0.002 * random(),
      fetch_p50_ms: 2.1 + 0.3 * random(),
      fetch_p95_ms: 5 + 2 * random(),
      grad_norm: (step === options.spikeAt ? 9 : 0.45) + 2.2 * Math.exp(-14 * share) + 0.08 * random(),
      gate_entropy_mean: 1.05 - 0.16 * (1 - Math.exp(-5 * share)) + 0.01 * gaussian(),
      gate_entropy_min: 0.62 - 0.2 * (1 - Math.exp(-5 * share)) + 0.02 * gaussian(),
      gate_max_gate: 0.95,
      gate_max_gate_mean: 0.5 + 0.1 * share,
      gate_collapse_frac: 0.004 + 0.012 * share,
      gate_branch_shares: [1 - sel - win, sel, win],
      sel_k_mean: 14.6,
      sel_k_max: 16,
      sel_pct_at_max: 88,
      gpu_mem_alloc: 9_800,
      gpu_mem_peak: 21_800,
      gpu_mem_reserved: 24_100,
      mfu: 0.41 + 0.01 * random(),
      fb_save_failed: 0,
      fb_spike: options.spikeAt !== undefined && step >= options.spikeAt ? 1 : 0,
    });
    if (step === 1 || step % 20 === 0) {
      training.write({ step, loss, lr, toks_per_s: 39_000 });
      own.write({ step, metric: 'recall', value: share });
      for (const [source, above] of [
        ['code', -0.4],
        ['web', 0.2],
      ] as const)
        sources.write({ step, metric: `source_val_loss/${source}`, value: smooth + above });
      attention.push(JSON.stringify(attentionRecord(step, share, layers, random)));
    }
    if (step % Math.ceil(planned / 10) === 0) {
      val.write({ step, val_loss: smooth + 0.06, ppl: Math.exp(smooth + 0.06) });
      write({ step, msg: 'checkpoint', detail: `checkpoints/step-${step}` });
      write({ step, msg: 'eval', val_loss: smooth + 0.06 });
      samples.push(JSON.stringify({ step, ts: now, text: SAMPLES[Math.min(SAMPLES.length - 1, samples.length)] }));
    }
  };
  for (let step = 1; step <= steps; step++) {
    one(step);
    if (step !== options.restartAt) continue;
    write({ step, msg: 'stop', detail: 'SIGTERM' });
    now += 60;
    const from = Math.max(0, step - 100);
    write({ step: from, msg: 'boot', detail: `resumed from checkpoints/step-${from}` });
    for (let again = from + 1; again <= step; again++) one(again);
  }
  if (planned === steps) {
    write({ step: steps, msg: 'stop', detail: 'done' });
    writeFileSync(
      paths.metrics,
      JSON.stringify({ status: 'done', step: steps, device: 'cuda', parameters: 30_146_304 }),
    );
  }
  writeFileSync(join(dir, 'attention.jsonl'), `${attention.join('\n')}\n`);
  writeFileSync(join(dir, 'samples.jsonl'), samples.map((line) => `${line}\n`).join(''));
  for (const writer of [...beats, training, val, own, sources]) writer.close();
}

function attentionRecord(step: number, share: number, layers: number, random: () => number) {
  const learned = 1 - Math.exp(-5 * share);
  const by = (value: (depth: number) => number) =>
    Array.from({ length: layers }, (_, layer) => round(value(layer / Math.max(1, layers - 1)) + 0.01 * random()));
  const sel = by((depth) => 0.2 + learned * (0.05 + 0.35 * depth * (1.2 - depth)));
  const win = by((depth) => 0.45 - learned * 0.25 * depth);
  return {
    step,
    sel,
    win,
    cmp: sel.map((value, i) => round(1 - value - win[i])),
    entropy: by((depth) => 1.06 - learned * (0.1 + 0.45 * Math.abs(depth - 0.35))),
    collapse: by((depth) => learned * 0.12 * depth ** 3),
    forced: by((depth) => 0.42 - 0.18 * learned * depth),
    neighbours: by((depth) => 0.7 + 0.2 * learned * depth),
    scorer_loss: by((depth) => 0.6 - 0.4 * learned * depth),
    coverage: by(() => 0.3 + 0.3 * learned),
    coverage_forced: by(() => 0.15),
    coverage_best: by(() => 0.7),
    layers: by((depth) => 0.35 + 0.25 * learned * depth).slice(1),
    distance: Array.from({ length: layers }, (_, layer) =>
      [620, 590, 380, 300, 340 * (1 + learned * layer * 0.1), 260 * (1 + learned * layer * 0.25)].map(Math.round),
    ),
  };
}

function round(value: number): number {
  return Number(value.toFixed(4));
}

const SAMPLES = [
  'the of and. a to in the was, the ',
  'The first was the most of the people that was a',
  'The river flows through the town and the people who lived there',
  'Photosynthesis is the process by which plants use light to make sugar from carbon dioxide and water.',
];
