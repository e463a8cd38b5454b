/** `trefoil start`: the first model. Trains the quickstart config and shows what the model learned. */
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { type Command, Option } from 'commander';
import { loadConfig, readConfig } from '../config/load.js';
import type { Config } from '../config/schema.js';
import { serveTab } from '../dashboard/tab-server.js';
import { PLACES } from '../data/synthetic/stories/words.js';
import { UsageError } from '../errors.js';
import {
  answerRecalls,
  inspectRecall,
  modelPredictor,
  type RecallAnswer,
  type RecallRow,
  recallRows,
  recallStory,
} from '../evaluate/recall.js';
import { withoutBranch } from '../evaluate/without-branch.js';
import { writeFileAtomic } from '../files.js';
import { generate } from '../infer/generate.js';
import { type LoadedModel, loadModel } from '../infer/load.js';
import { listCheckpoints } from '../run/checkpoint/read.js';
import { toJson } from '../run/json.js';
import { readCsv, TRAINING_CSV } from '../run/logs/csv.js';
import { runPaths } from '../run/paths.js';
import { shellQuote, wrapText } from '../text.js';
import { EXIT_CODES } from '../train/options.js';
import { blockPicture } from './shared/block-picture.js';
import { withDashboard } from './shared/dashboard-process.js';
import { openDevice } from './shared/device.js';
import type { Io } from './shared/io.js';
import { wholeNumber } from './shared/options.js';
import { plot } from './shared/plot.js';
import { DEFAULT_WIDTH, formatTable, right } from './shared/table.js';
import { addTrainFlags, type TrainCommandLine } from './shared/train-flags.js';
import { deviceOptions, printConfig, runTraining } from './train.js';

const PROMPT = 'Once upon a time';
const SAMPLE_TOKENS = 480;
const SAMPLING = { temperature: 0.7, topK: 40, topP: 1, seed: 7 };

/** Stories of the recall table, their scenes (one more each, then again from none), and the borders of its rows in tokens. */
const RECALL_STORIES = 120;
const MAX_SCENES = 12;
const RECALL_SEED = 7;
const DISTANCES = [32, 64, 128, 256, 512];

const DESCRIPTION = `Trains a small model on the CPU in two minutes and shows what it learned.
Takes the flags of train, except --json without --print-config. The defaults
shown are those of quickstart, the default config. With --browser nothing is
trained here: a page does it in the browser, and the other flags are ignored.`;

const DEFAULT_TAB_PORT = 7080;

export function configure(command: Command, io: Io): void {
  const read = addTrainFlags(command.description(DESCRIPTION), readConfig('quickstart'));
  const meaning = 'serve the page that trains in a tab on this port; 0 = any free port';
  command.addOption(
    new Option('--browser [port]', meaning).preset(DEFAULT_TAB_PORT).argParser(wholeNumber(0)).helpGroup('Output:'),
  );
  command.action(async () => {
    const { browser } = command.opts<{ browser?: number }>();
    io.exitCode = browser === undefined ? await run(read(), io) : await runInTab(browser, io);
  });
}

/** Serves the page until a signal ends it. */
async function runInTab(port: number, io: Io): Promise<number> {
  const server = await serveTab({ host: '127.0.0.1', port });
  io.out(`listening on ${server.url}`);
  io.out('Open it in a browser: the model is trained there, and nothing leaves the page. Ctrl-C ends this server.');
  await new Promise<void>((end) => {
    for (const signal of ['SIGINT', 'SIGTERM'] as const) process.once(signal, () => end());
  });
  await server.close();
  return 0;
}

async function run(line: TrainCommandLine, io: Io): Promise<number> {
  const resolved = loadConfig({ env: io.env, flags: line.layer, config: line.config ?? 'quickstart' });
  for (const warning of resolved.warnings) io.warn(warning);
  for (const guess of resolved.guesses) io.out(guess);
  if (line.printConfig) {
    printConfig(resolved, line.json, io);
    return 0;
  }
  if (line.json) throw new UsageError('start: --json is not supported; use trefoil train --config quickstart --json');
  const config = inFreeFolder(resolved.config);
  const { out_dir: outDir, steps } = config.train;
  io.out(`Trefoil: ${steps} steps of a small model with Native Sparse Attention, on this machine's CPU.`);
  const again = io.env['npm_lifecycle_event'] === 'start' ? 'npm start' : 'npx trefoil start';
  io.out(`The whole run takes two minutes on two cores. Stop any time with Ctrl-C;\n${again} goes on from there.\n`);
  const resume = listCheckpoints(runPaths(outDir).checkpoints).length > 0 ? 'auto' : null;
  const request = { resume: line.resume ?? resume, save: line.save, say: io.out };
  return await withDashboard(line.dashboard, outDir, io.out, io, async () => {
    const result = await runTraining(config, request, io);
    if (result.status === 'done') await showResult(config, result.valLoss, io);
    return EXIT_CODES[result.status];
  });
}

/** The folder of the config, or the next number when a finished run lies there. */
function inFreeFolder(config: Config): Config {
  const base = config.train.out_dir;
  for (let i = 1; ; i++) {
    const folder = i === 1 ? base : `${base}-${i}`;
    if (!existsSync(runPaths(folder).model)) return { ...config, train: { ...config.train, out_dir: folder } };
  }
}

async function showResult(config: Config, validationLoss: number | null, io: Io): Promise<void> {
  const { out_dir: outDir } = config.train;
  const { rows } = readCsv(runPaths(outDir).training, TRAINING_CSV);
  const points = rows.map(({ step, loss }) => ({ x: step, y: loss }));
  io.out(`\n${plot(points, { title: 'training loss (nats per token) by step' })}\n`);
  if (validationLoss !== null)
    io.out(`validation loss ${validationLoss.toFixed(3)} nats per token, on text it never saw`);
  const loaded = loadModel(openDevice(deviceOptions(config)), outDir);
  try {
    await writeSample(loaded, outDir, io);
    // Recall is a question about stories: a model of other text has not learned it.
    if (config.data.source === 'stories' && config.model.attention === 'nsa') showRecall(loaded, outDir, io);
  } finally {
    loaded.model.free();
  }
  const files = ['sample.txt', 'recall.json', 'training.csv', 'val.csv', 'model.safetensors'];
  io.out(`\nFiles: ${outDir} (${files.filter((name) => existsSync(join(outDir, name))).join(', ')})`);
  io.out('Next:');
  const [model, sample] = [shellQuote(outDir), shellQuote(join(outDir, 'sample.txt'))];
  io.out(`  npx trefoil generate --model ${model} --prompt "One windy morning"`);
  io.out(`  npx trefoil eval selection --model ${model} --text-file ${sample}`);
  io.out('  npx trefoil train --config text_cpu --local-path YOUR_FOLDER');
}

async function writeSample(loaded: LoadedModel, outDir: string, io: Io): Promise<void> {
  let text = PROMPT;
  for await (const piece of generate(loaded, PROMPT, { maxNewTokens: SAMPLE_TOKENS, sampling: SAMPLING }))
    text += piece;
  writeFileAtomic(join(outDir, 'sample.txt'), `${text}\n`);
  io.out(`\n${io.style.bold('A story it wrote')} (it was given the first four words)\n`);
  for (const line of text.split('\n').flatMap((paragraph) => wrapText(paragraph, widthOf(io) - 2))) io.out(`  ${line}`);
}

function showRecall({ model, tokenizer }: LoadedModel, outDir: string, io: Io): void {
  const stories = Array.from({ length: RECALL_STORIES }, (_, number) =>
    recallStory(tokenizer, RECALL_SEED, number, number % (MAX_SCENES + 1)),
  );
  const predict = modelPredictor(model);
  const answers = answerRecalls(stories, predict);
  const all = recallRows(answers, DISTANCES);
  const without = recallRows(
    withoutBranch(model, 'sel', () => answerRecalls(stories, predict)),
    DISTANCES,
  );
  io.out(
    `\n${io.style.bold('Does it remember?')} Questions in ${RECALL_STORIES} stories it never saw, by the distance between`,
  );
  io.out(
    `fact and question. The window has ${model.shape.nsa.w} tokens; ${(100 / PLACES.length).toFixed(0)} % is a guess.\n`,
  );
  io.out(recallTable(all, without));
  const example = farthest(answers);
  const { asked, story } = example;
  const { lSel: size, w, nSel } = model.shape.nsa;
  const position = asked.at - 1;
  const { read, predicted } = inspectRecall(model, story.tokens.subarray(0, asked.at), position);
  const blockOf = (token: number) => Math.floor(token / size);
  const picture = {
    read,
    current: blockOf(position),
    wanted: blockOf(asked.factAt),
    window: blockOf(Math.max(0, position - w + 1)),
  };
  const said = tokenizer.decode([predicted]);
  const choice = example.isCorrect ? 'Its farthest right answer' : 'Its farthest answer';
  io.out(`${io.style.bold('Which blocks did it read?')} ${choice}: ${nSel} blocks of ${size} per group\n`);
  io.out(`  fact      … the ${asked.recall.thing} ${asked.recall.place} …  (token ${asked.factAt})`);
  io.out(`  question  … The ${asked.recall.thing}  (token ${position}, ${example.distance} tokens later)`);
  io.out(`  it says   …${said}  (${example.isCorrect ? 'right' : 'wrong'})\n`);
  io.out(blockPicture(picture, io.style, widthOf(io)));
  io.out(`\n  █ chosen by score   ▒ always read: first, previous and own block   · not read`);
  writeFileAtomic(
    join(outDir, 'recall.json'),
    `${toJson({
      stories: RECALL_STORIES,
      window: w,
      rows: all.map((row, i) => ({ ...row, accuracy_without_selected: without[i].accuracy })),
      example: {
        text: story.story.text,
        thing: asked.recall.thing,
        answer: asked.recall.answer,
        predicted: said,
        fact_token: asked.factAt,
        question_token: position,
        block_size: size,
        blocks_read: read,
      },
    })}\n`,
  );
}

/** Prose and pictures are no wider on a wide terminal. */
function widthOf({ width }: Io): number {
  return Math.min(width, DEFAULT_WIDTH);
}

function recallTable(all: readonly RecallRow[], without: readonly RecallRow[]): string {
  const percent = ({ accuracy, cases }: RecallRow) => (cases === 0 ? '-' : `${(100 * accuracy).toFixed(1)} %`);
  return formatTable(
    right('distance in tokens', 'questions', 'all branches', 'without the selected branch'),
    all.map((row, i) => [`${row.from} to ${row.to - 1}`, String(row.cases), percent(row), percent(without[i])]),
  );
}

/** The answer farthest from its fact, a right one if there is one. */
function farthest(answers: readonly RecallAnswer[]): RecallAnswer {
  const right = answers.filter(({ isCorrect, distance }) => isCorrect && distance < DISTANCES[DISTANCES.length - 1]);
  return (right.length > 0 ? right : answers).reduce((best, answer) =>
    answer.distance > best.distance ? answer : best,
  );
}
