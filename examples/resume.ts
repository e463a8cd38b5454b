// Stops a run from outside, resumes it from its checkpoint, and shows that the losses are those of an undisturbed run.
import { openDevice, readConfig, train } from 'trefoil';
import { findCheckpoint, readCsv, runPaths, TRAINING_CSV } from 'trefoil/run';

const device = openDevice('cpu');
const configFor = (outDir: string) =>
  readConfig('base', {
    model: { dim: 32, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 16, d_v: 16 },
    nsa: { l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16 },
    data: { source: 'synthetic', tokenizer: 'byte' },
    train: { steps: 12, seq_len: 64, batch_size: 1, log_every: 1, save_every: 4, out_dir: outDir },
  });
const folder = `artifacts/resume-${Date.now()}`;
const config = configFor(`${folder}/stopped`);

const controller = new AbortController();
const stopped = await train({
  config,
  device,
  signal: controller.signal,
  onStep: ({ step }) => {
    if (step === 6) controller.abort();
  },
  onCheckpoint: ({ step }) => console.log(`checkpoint at step ${step}`),
});
console.log(`${stopped.status} at step ${stopped.step}; newest: ${findCheckpoint(stopped.outDir, 'auto')?.path}`);

const resumed = await train({ config, device, resume: 'auto' });
const straight = await train({ config: configFor(`${folder}/straight`), device });
const losses = (outDir: string) => readCsv(runPaths(outDir).training, TRAINING_CSV).rows.map(({ loss }) => loss);
const same = losses(resumed.outDir).join() === losses(straight.outDir).join();
console.log(`${resumed.status} at step ${resumed.step}; the same losses as an undisturbed run: ${same}`);
