// From dense to sparse: convert a dense model, continue its training, and compare loss by position and decode speed.
//
//   node bench/convert-recipe.mjs --dense MODEL --data PATH [--seq-len 4096] [--steps 100] [--n-sel 8] [--out FILE]
//
// Losses are measured on --val-data; without it on a share of PATH (--val-fraction) that these steps do not train on.
// MODEL is anything that `trefoil --model` takes. A control continues the dense model for the same steps on the same data.
// Every stage is a command of `trefoil`, printed before it runs. Needs `npm run build`.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, writeFileSync } from 'node:fs';
import { cpus } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const text = (value) => ({ type: 'string', default: value });
const { values } = parseArgs({
  options: {
    dense: { type: 'string' },
    data: { type: 'string' },
    work: text('artifacts/convert-recipe'),
    'seq-len': text('4096'),
    'batch-size': text('1'),
    steps: text('100'),
    lr: text('5e-4'),
    l: text('32'),
    d: text('16'),
    'l-sel': text('64'),
    'n-sel': text('16'),
    w: text('512'),
    'gate-steps': { type: 'string' },
    'n-sel-from': { type: 'string' },
    'n-sel-steps': { type: 'string' },
    'val-data': { type: 'string' },
    'val-fraction': text('0.05'),
    'eval-batches': text('64'),
    lengths: { type: 'string' },
    device: text('auto'),
    precision: text('fp32'),
    out: { type: 'string' },
  },
});
if (!values.dense || !values.data) {
  console.error('usage: node bench/convert-recipe.mjs --dense MODEL --data PATH (more flags at the top of the file)');
  process.exit(2);
}

/** Runs a command of trefoil; returns what it prints with --json, and its seconds. */
function trefoil(...words) {
  console.error(`trefoil ${words.join(' ')}`);
  const started = performance.now();
  const main = join(root, 'dist', 'cli', 'main.js');
  const run = spawnSync(process.execPath, [main, ...words, '--json'], {
    stdio: ['ignore', 'pipe', 'inherit'],
    encoding: 'utf8',
    maxBuffer: 1 << 28,
  });
  if (run.status !== 0) process.exit(run.status ?? 1);
  return { ...JSON.parse(run.stdout), seconds: (performance.now() - started) / 1000 };
}
const sets = (settings) => Object.entries(settings).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
const at = (name) => join(values.work, name);
const twoThirds = (count) => String(Math.max(1, Math.round((2 * Number(count)) / 3)));

const sizes = { 'nsa.l': values.l, 'nsa.d': values.d, 'nsa.l_sel': values['l-sel'], 'nsa.w': values.w };
const convert = (name, ...words) =>
  existsSync(at(name))
    ? null
    : trefoil('convert', '--sparse', values.dense, '--out', at(name), ...sets(sizes), ...words);
// The same weights twice: with all blocks of a sequence, and with the number that the model will have in the end.
const exact = convert('exact', '--context', values['seq-len']);
convert('sparse', '--set', `nsa.n_sel=${values['n-sel']}`);

const training = {
  'train.lr': values.lr,
  'train.warmup_steps': Math.min(10, Number(values.steps)),
  'train.eval_every': values.steps,
  'train.save_every': 0,
  'train.log_every': Math.max(1, Math.round(Number(values.steps) / 10)),
  ...(values['val-data'] ? { 'data.val_path': values['val-data'] } : { 'data.val_fraction': values['val-fraction'] }),
  'runtime.device': values.device,
  'runtime.precision': values.precision,
};
const shape = ['--seq-len', values['seq-len'], '--batch-size', values['batch-size'], '--steps', values.steps];
const data = ['--local-path', values.data];
const resumable = (name) => (existsSync(at(name)) ? ['--resume', 'auto'] : []);
const trained = (name, settings) =>
  trefoil(
    ...['train', '--config', join(at('sparse'), 'train.yaml'), '--out-dir', at(name), ...resumable(name)],
    ...[...shape, ...data, ...sets({ ...training, ...settings })],
  );
const continued = trained('continued', {
  'train.gate_release_steps': values['gate-steps'] ?? twoThirds(values.steps),
  'train.n_sel_from': values['n-sel-from'] ?? Math.ceil(Number(values['seq-len']) / Number(values['l-sel'])),
  'train.n_sel_steps': values['n-sel-steps'] ?? twoThirds(values.steps),
});
const control = trained('control', { 'model.attention': 'dense', 'train.init_from': values.dense });

const models = { dense: values.dense, sparse: at('sparse'), continued: at('continued'), control: at('control') };
const [first, ...others] = Object.values(models);
const losses = trefoil(
  ...['eval', 'loss', '--model', first, '--compare', ...others, '--by-position', '--device', values.device],
  ...['--seq-len', values['seq-len'], '--batches', values['eval-batches']],
  ...(values['val-data']
    ? ['--local-path', values['val-data']]
    : [...data, ...sets({ 'data.val_fraction': values['val-fraction'] })]),
);
const lengths = values.lengths ?? `${Number(values['seq-len']) / 4},${values['seq-len']}`;
const decode = trefoil(
  ...['bench', 'decode', '--config', join(at('sparse'), 'train.yaml'), '--lengths', lengths],
  ...['--device', values.device],
);

const result = {
  machine: cpus()[0].model,
  settings: values,
  exact_tokens: exact?.exact_tokens ?? null,
  train: { continued: continued.seconds, control: control.seconds },
  losses: Object.fromEntries(Object.keys(models).map((name, i) => [name, losses.models[i]])),
  decode: decode.rows,
};
if (values.out) {
  mkdirSync(dirname(values.out), { recursive: true });
  writeFileSync(values.out, `${JSON.stringify(result, null, 2)}\n`);
}
const rows = result.losses.dense.by_position.map(({ from, to }, i) => ({
  context: from === to ? String(to) : `${from}-${to}`,
  ...Object.fromEntries(Object.entries(result.losses).map(([name, { by_position: by }]) => [name, by[i].loss])),
}));
console.table(rows);
console.table(decode.rows.map(({ S, ms_total, ms_dense }) => ({ S, ms_sparse: ms_total, ms_dense })));
