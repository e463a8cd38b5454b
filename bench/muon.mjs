// Muon against AdamW on the same text: validation losses, and the tokens that Muon needs for AdamW's last loss.
//
//   node bench/muon.mjs [--device cpu|cuda] [--data FOLDER --val FOLDER] [--steps 200] [--seeds 3]
//     [--adamw 1e-3,2e-3,4e-3] [--muon 4e-3,8e-3,1.6e-2] [--set KEY=VALUE]... [--out FILE]
//
// Each optimizer first trains with every learning rate of its list at seed 1; the best one by validation loss then trains
// the other seeds. Without --data the text is this repository's documentation, in bytes; --data takes a folder of token
// shards (`data prepare`), with --val the validation shards. `cpu` is a model of 0.5M parameters and takes some minutes;
// `cuda` is the 125m shape in bf16 with sequences of 8,192 tokens. Needs `npm run build`.
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const { values } = parseArgs({
  options: {
    device: { type: 'string', default: 'cpu' },
    data: { type: 'string' },
    val: { type: 'string' },
    steps: { type: 'string', default: '200' },
    seeds: { type: 'string', default: '3' },
    adamw: { type: 'string' },
    muon: { type: 'string' },
    set: { type: 'string', multiple: true, default: [] },
    out: { type: 'string' },
  },
});
const steps = Number(values.steps);
const isCuda = values.device === 'cuda';
const DEFAULTS = isCuda
  ? { adamw: '5e-4,1e-3,2e-3', muon: '5e-4,1e-3,2e-3' }
  : { adamw: '1e-3,2e-3,4e-3', muon: '4e-3,8e-3,1.6e-2' };
const rates = {
  adamw: (values.adamw ?? DEFAULTS.adamw).split(',').map(Number),
  muon: (values.muon ?? DEFAULTS.muon).split(',').map(Number),
};

const SHAPE = isCuda
  ? {
      ...{ 'model.dim': 768, 'model.n_layers': 12, 'model.n_heads': 12, 'model.n_kv_groups': 2 },
      ...{ 'model.d_k': 64, 'model.d_v': 64, 'data.tokenizer': 'gpt2' },
      ...{ 'runtime.precision': 'bf16', 'train.seq_len': 8192, 'train.batch_size': 4 },
    }
  : {
      ...{ 'model.dim': 128, 'model.n_layers': 2, 'model.n_heads': 4, 'model.n_kv_groups': 2 },
      ...{ 'model.d_k': 32, 'model.d_v': 32, 'model.mlp_ratio': 4, 'data.tokenizer': 'byte' },
      ...{ 'nsa.l': 16, 'nsa.d': 8, 'nsa.l_sel': 32, 'nsa.n_sel': 4, 'nsa.w': 64 },
      ...{ 'train.seq_len': 256, 'train.batch_size': 8 },
    };
const DATA = values.data
  ? { 'data.source': 'tokens', 'data.path': values.data, ...(values.val && { 'data.val_path': values.val }) }
  : { 'data.source': 'text', 'data.path': join(root, 'docs'), 'data.val_fraction': 0.1 };
const SETTINGS = {
  ...SHAPE,
  ...DATA,
  ...{ 'runtime.device': values.device, 'model.qk_norm': true },
  ...{ 'train.steps': steps, 'train.warmup_steps': Math.ceil(steps / 20), 'train.weight_decay': 0.1 },
  ...{ 'train.eval_every': Math.max(1, Math.floor(steps / 20)), 'train.eval_batches': 8, 'train.save_every': 0 },
};

/** Runs so far; written after each, so that an interrupted comparison leaves what it has. */
const runs = [];
const folder = mkdtempSync(join(tmpdir(), 'trefoil-muon-'));

function train(optimizer, rate, seed) {
  const out = join(folder, String(runs.length));
  const settings = { ...SETTINGS, 'train.optimizer': optimizer, 'train.lr': rate, 'train.seed': seed };
  const own = [...Object.entries(settings).map(([key, value]) => `${key}=${value}`), ...values.set];
  const args = ['train', '--config', 'base', '--json', '--out-dir', out, ...own.flatMap((set) => ['--set', set])];
  const started = performance.now();
  const run = spawnSync(process.execPath, [join(root, 'dist', 'cli', 'main.js'), ...args], { encoding: 'utf8' });
  if (run.status !== 0) throw new Error(run.stderr);
  const rows = (file) => readFileSync(join(out, file), 'utf8').trim().split('\n').slice(1);
  const curve = rows('val.csv').map((row) => row.split(',').slice(0, 2).map(Number));
  const speeds = rows('training.csv').map((row) => Number(row.split(',')[3]));
  const result = {
    ...{ optimizer, rate, seed, loss: curve.at(-1)[1], curve },
    tokens_per_s: speeds.toSorted((a, b) => a - b)[Math.floor(speeds.length / 2)],
    seconds: (performance.now() - started) / 1000,
  };
  runs.push(result);
  console.error(`${optimizer} lr ${rate} seed ${seed}: val ${result.loss.toFixed(4)}, ${result.seconds.toFixed(0)} s`);
  save({});
  return result;
}

function save(summary) {
  if (!values.out) return;
  mkdirSync(dirname(values.out), { recursive: true });
  const settings = Object.fromEntries(Object.entries(SETTINGS).filter(([key]) => !key.endsWith('path')));
  const whole = { machine: cpus()[0].model, device: values.device, set: values.set, settings, ...summary, runs };
  writeFileSync(values.out, `${JSON.stringify(whole, null, 2)}\n`);
}

/** The step at which a curve first reaches `loss`, interpolated; null if it never does. */
function stepsTo(loss, curve) {
  const at = curve.findIndex(([, value]) => value <= loss);
  if (at <= 0) return at === 0 ? curve[0][0] : null;
  const [[s0, l0], [s1, l1]] = [curve[at - 1], curve[at]];
  return s0 + ((l0 - loss) / (l0 - l1)) * (s1 - s0);
}

try {
  const best = {};
  for (const optimizer of ['adamw', 'muon']) {
    const first = rates[optimizer].map((rate) => train(optimizer, rate, 1));
    best[optimizer] = first.toSorted((a, b) => a.loss - b.loss)[0];
  }
  const rows = [];
  console.log('seed  adamw    muon     steps of muon to the last loss of adamw');
  for (let seed = 1; seed <= Number(values.seeds); seed++) {
    const [adamw, muon] = ['adamw', 'muon'].map((name) =>
      seed === 1 ? best[name] : train(name, best[name].rate, seed),
    );
    const reached = stepsTo(adamw.loss, muon.curve);
    rows.push({ seed, adamw: adamw.loss, muon: muon.loss, steps_to_same_loss: reached });
    const share =
      reached === null ? 'not reached' : `${reached.toFixed(0)} of ${steps}: ${(steps / reached).toFixed(2)}x`;
    console.log(`${String(seed).padEnd(5)} ${adamw.loss.toFixed(4)}   ${muon.loss.toFixed(4)}   ${share}`);
  }
  const speed = ({ optimizer }) => runs.filter((run) => run.optimizer === optimizer).map((run) => run.tokens_per_s);
  const lines = Object.values(best).map((run) => `${run.optimizer}: lr ${run.rate}, ${Math.max(...speed(run))} tok/s`);
  console.log(lines.join('\n'));
  save({ best: { adamw: best.adamw.rate, muon: best.muon.rate }, rows });
} finally {
  rmSync(folder, { recursive: true, force: true });
}
