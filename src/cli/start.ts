/** `trefoil start`: the first model. Trains the quickstart config on text that is already here and shows the result. */
import { existsSync } from 'node:fs';
import { parseTrainFlags } from '../config/flags.js';
import { loadConfig } from '../config/load.js';
import type { Config } from '../config/schema.js';
import { generate } from '../infer/generate.js';
import { loadModel } from '../infer/load-model.js';
import { listCheckpoints } from '../run/checkpoint/manifest.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { runPaths } from '../run/paths.js';
import { EXIT_CODES } from '../train/train.js';
import { openDevice } from './shared/device.js';
import type { Io } from './shared/io.js';
import { plot } from './shared/plot.js';
import { deviceOptions, runTraining, trainFlagHelp } from './train.js';

const PROMPT = 'The ';
const SAMPLE_TOKENS = 240;

export async function run(argv: readonly string[], io: Io): Promise<number> {
  const line = parseTrainFlags(argv);
  if (line.help) {
    io.out(
      `Usage: trefoil start [options]\n\nTrains a small model on the CPU and shows what it learned. Takes the\nflags of train.\n\n${trainFlagHelp()}`,
    );
    return 0;
  }
  const { config: loaded, warnings } = loadConfig({
    env: io.env,
    flags: line.layer,
    config: line.config ?? 'quickstart',
  });
  for (const warning of warnings) io.warn(warning);
  const config = inFreeFolder(loaded);
  const { out_dir: outDir, steps } = config.train;
  io.out(`Trefoil: ${steps} steps of a small byte-level model with Native Sparse Attention, on this machine's CPU.`);
  io.out(`Stop any time with Ctrl-C; npm start goes on from there.\n`);
  const resume = listCheckpoints(runPaths(outDir).checkpoints).length > 0 ? 'auto' : null;
  const result = await runTraining(config, { resume: line.resume ?? resume, save: line.save, say: io.out }, io);
  if (result.status !== 'done') return EXIT_CODES[result.status];
  const { rows } = readCsv(runPaths(result.outDir).training, TRAINING_CSV);
  io.out(
    `\n${plot(
      rows.map(({ step, loss }) => ({ x: step, y: loss })),
      { title: 'training loss (nats per byte) by step' },
    )}\n`,
  );
  if (result.valLoss !== null)
    io.out(
      `validation loss ${result.valLoss.toFixed(3)} nats per byte (${(result.valLoss / Math.LN2).toFixed(2)} bits), on documents it never saw`,
    );
  await showSample(config, io);
  io.out(
    `\nFiles: ${result.outDir} (training.csv, val.csv, heartbeat, TensorBoard events, checkpoints, model.safetensors)`,
  );
  io.out('Next:');
  io.out(`  npx trefoil generate --model ${outDir} --prompt "export function "`);
  io.out(
    '  npx trefoil train --config quickstart --dataset text --local-path YOUR_FOLDER --steps 1000 --out-dir artifacts/mine',
  );
  io.out('  npx trefoil train --help');
  return 0;
}

/** The folder of the config, or the next number when a finished run lies there. */
function inFreeFolder(config: Config): Config {
  const base = config.train.out_dir;
  for (let i = 1; ; i++) {
    const folder = i === 1 ? base : `${base}-${i}`;
    if (!existsSync(runPaths(folder).model)) return { ...config, train: { ...config.train, out_dir: folder } };
  }
}

async function showSample(config: Config, io: Io): Promise<void> {
  const device = openDevice(deviceOptions(config));
  const loaded = loadModel(device, config.train.out_dir);
  try {
    io.out(`\nA sample after ${JSON.stringify(PROMPT)}:\n`);
    const sampling = { temperature: 0.7, topK: 40, topP: 1, seed: 7 };
    io.stdout.write(PROMPT);
    for await (const piece of generate(loaded, PROMPT, { maxNewTokens: SAMPLE_TOKENS, sampling }))
      io.stdout.write(piece);
    io.out('');
  } finally {
    loaded.model.free();
  }
}
