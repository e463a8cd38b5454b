// Sparse against dense attention on the same text, the same steps, several seeds: validation losses side by side.
//
//   node bench/nsa-vs-dense.mjs [--seeds 3] [--steps 200] [--seq-len 1024] [--out bench/results/nsa-vs-dense.json]
//
// Both models have the quickstart's width and four layers; only model.attention differs. Needs `npm run build`.
import { spawnSync } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { cpus, tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const { values } = parseArgs({
  options: {
    seeds: { type: 'string', default: '3' },
    steps: { type: 'string', default: '200' },
    'seq-len': { type: 'string', default: '1024' },
    'batch-size': { type: 'string', default: '4' },
    out: { type: 'string' },
  },
});

const folder = mkdtempSync(join(tmpdir(), 'trefoil-compare-'));
const rows = [];
for (let seed = 1; seed <= Number(values.seeds); seed++)
  for (const attention of ['nsa', 'dense']) {
    const out = join(folder, `${attention}-${seed}`);
    const settings = {
      'model.attention': attention,
      'train.seed': seed,
      'train.eval_every': values.steps,
      'train.eval_batches': 16,
    };
    const sets = Object.entries(settings).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
    const shape = ['--steps', values.steps, '--seq-len', values['seq-len'], '--batch-size', values['batch-size']];
    const args = ['train', '--config', 'quickstart', '--json', '--out-dir', out, ...shape, ...sets];
    const started = performance.now();
    const run = spawnSync(process.execPath, [join(root, 'dist', 'cli', 'main.js'), ...args], { encoding: 'utf8' });
    if (run.status !== 0) throw new Error(run.stderr);
    const { valLoss, lastLoss } = JSON.parse(run.stdout);
    rows.push({
      attention,
      seed,
      val_loss: valLoss,
      last_loss: lastLoss,
      seconds: (performance.now() - started) / 1000,
    });
    console.error(`${attention} seed ${seed}: val ${valLoss.toFixed(4)}`);
  }
rmSync(folder, { recursive: true });

const mean = (attention) => {
  const losses = rows.filter((row) => row.attention === attention).map((row) => row.val_loss);
  return losses.reduce((sum, loss) => sum + loss, 0) / losses.length;
};
console.log('seed  nsa      dense    nsa/dense');
for (let seed = 1; seed <= Number(values.seeds); seed++) {
  const [nsa, dense] = ['nsa', 'dense'].map(
    (kind) => rows.find((row) => row.seed === seed && row.attention === kind).val_loss,
  );
  console.log(`${String(seed).padEnd(5)} ${nsa.toFixed(4)}   ${dense.toFixed(4)}   ${(nsa / dense).toFixed(4)}`);
}
console.log(
  `mean  ${mean('nsa').toFixed(4)}   ${mean('dense').toFixed(4)}   ${(mean('nsa') / mean('dense')).toFixed(4)}`,
);
if (values.out) {
  mkdirSync(dirname(values.out), { recursive: true });
  const settings = {
    steps: Number(values.steps),
    seq_len: Number(values['seq-len']),
    batch_size: Number(values['batch-size']),
  };
  writeFileSync(values.out, `${JSON.stringify({ machine: cpus()[0].model, ...settings, rows }, null, 2)}\n`);
}
