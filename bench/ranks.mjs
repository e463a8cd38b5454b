// Data parallel on CPUs: N ranks with one thread each against one rank with N threads, the same global batch.
//
//   node bench/ranks.mjs [--ranks 2] [--rounds 5] [--steps 40] [--out bench/results/ranks-cpu.json]
//
// The model is the small GPT of bench/peers (dense, dim 256, 4 layers, 4 heads, S 256, batch 4, vocabulary 1024, fp32).
// Rounds alternate between the two, so that a neighbour on the machine slows both; a round gives the median step and the
// one that a tenth of the steps beat: a neighbour only ever slows, so that one says more on a busy machine. Needs `npm run build` and Open MPI.
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const { values } = parseArgs({
  options: {
    ranks: { type: 'string', default: '2' },
    rounds: { type: 'string', default: '5' },
    steps: { type: 'string', default: '40' },
    set: { type: 'string', multiple: true, default: [] },
    out: { type: 'string' },
  },
});
const [ranks, rounds, steps] = [values.ranks, values.rounds, values.steps].map(Number);
const main = join(dirname(fileURLToPath(import.meta.url)), '..', 'dist', 'cli', 'main.js');
const folder = mkdtempSync(join(tmpdir(), 'trefoil-ranks-'));
const SKIPPED = 5; // steps in which kernels are loaded and memory is taken
const GLOBAL_BATCH = 4;
const LENGTH = 256;

const config = join(folder, 'small-gpt.json');
writeFileSync(
  config,
  JSON.stringify({
    model: {
      attention: 'dense',
      dim: 256,
      n_layers: 4,
      n_heads: 4,
      n_kv_groups: 4,
      d_k: 64,
      d_v: 64,
      vocab_size: 1024,
    },
    data: { source: 'synthetic', vocab_size: 1024, val_fraction: 0 },
    runtime: { device: 'cpu', tensorboard: false, csv_logs: false },
    train: { steps, seq_len: LENGTH, log_every: 1000000, save_every: 0, warmup_steps: 0, hash_every: 0 },
  }),
);

/** Milliseconds of the median step, and of the step that a tenth of them beat. */
function measure(name, count, threads) {
  const out = join(folder, name);
  const settings = [`runtime.threads=${threads}`, ...values.set].flatMap((text) => ['--set', text]);
  const batch = ['--batch-size', String(GLOBAL_BATCH / count), '--out-dir', out];
  const words = ['train', '--config', config, ...batch, ...settings];
  const command = count > 1 ? ['launch', '-n', String(count), '--', ...words] : words;
  const run = spawnSync(process.execPath, [main, ...command], { encoding: 'utf8' });
  if (run.status !== 0) throw new Error(`${name} failed:\n${run.stdout}${run.stderr}`);
  const lines = readFileSync(join(out, 'heartbeat_rank0.jsonl'), 'utf8').trim().split('\n');
  const rates = lines
    .map((line) => JSON.parse(line))
    .flatMap((beat) => (beat.msg === 'progress' ? [beat.toks_per_s] : []));
  const times = rates.slice(SKIPPED).map((rate) => (1000 * GLOBAL_BATCH * LENGTH) / rate);
  return { median: share(times, 0.5), fast: share(times, 0.1) };
}

/** The number that this share of them stays below. */
function share(numbers, part) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length * part)];
}

const rows = [];
for (let round = 0; round < rounds; round++) {
  const one = measure(`one-${round}`, 1, ranks);
  const many = measure(`many-${round}`, ranks, 1);
  rows.push({ one_rank_ms: one, ranks_ms: many });
  const text = ({ median, fast }) => `${median.toFixed(1)} ms (fast ${fast.toFixed(1)})`;
  const percent = (kind) => `${((100 * one[kind]) / many[kind]).toFixed(0)} %`;
  console.log(
    `round ${round + 1}: 1 rank, ${ranks} threads ${text(one)}; ${ranks} ranks, 1 thread ${text(many)}; ` +
      `${percent('median')} (fast ${percent('fast')})`,
  );
}
rmSync(folder, { recursive: true, force: true });
const shares = (kind) => rows.map((row) => row.one_rank_ms[kind] / row.ranks_ms[kind]);
const best = (name) => Math.min(...rows.map((row) => row[name].fast));
const summary = {
  machine: cpus()[0].model,
  ranks,
  steps,
  rows,
  share_median: share(shares('median'), 0.5),
  share_fast: share(shares('fast'), 0.5),
  share_best: best('one_rank_ms') / best('ranks_ms'),
};
const [median, fast, most] = [summary.share_median, summary.share_fast, summary.share_best].map(
  (part) => `${(100 * part).toFixed(0)} %`,
);
console.log(
  `throughput of ${ranks} ranks against one: median ${median}, fast steps ${fast}, best of all rounds ${most}`,
);
if (values.out) writeFileSync(values.out, `${JSON.stringify(summary, null, 2)}\n`);
