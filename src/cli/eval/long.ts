/** `trefoil eval long`: questions over a long text whose answers are known, for a model or a server. */
import { join } from 'node:path';
import { InvalidArgumentError } from 'commander';
import { heatMap, percent } from '../../dashboard/report/heat-map.js';
import { createTokenizer } from '../../data/tokenizer.js';
import { UsageError } from '../../errors.js';
import { Haystack } from '../../evaluate/long/cases.js';
import { evaluateLong, type LongCell, type LongGrid, type Reader } from '../../evaluate/long/evaluate.js';
import { modelReader } from '../../evaluate/long/model-reader.js';
import { serverReader } from '../../evaluate/long/server-reader.js';
import { TASKS, type Task } from '../../evaluate/long/tasks.js';
import { ensureFolder, readGivenText, writeFileAtomic } from '../../files.js';
import { withEnvironment } from '../../infer/environment.js';
import { loadModel } from '../../infer/load.js';
import { kernelOptions } from '../../model/kernels.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine, printJson, yieldToSignals } from '../shared/io.js';
import {
  adapterOption,
  configured,
  flag,
  jsonOption,
  MODEL_PATH,
  modelFlag,
  type OptionValues,
  parsed,
  percentages,
  required,
  threadsOption,
  wholeNumber,
  wholeNumbers,
} from '../shared/options.js';
import { formatTable, right } from '../shared/table.js';

const OPTIONS = {
  model: modelFlag('--model <path>', MODEL_PATH),
  adapter: adapterOption(),
  url: flag('--url <address>', 'a server that speaks the OpenAI API, in place of --model'),
  servedModel: flag('--served-model <name>', 'with --url: name of the model (default: the first it lists)'),
  tokenizer: flag('--tokenizer <name|file>', 'with --url: counts the tokens of --lengths (default: gpt2)'),
  textFile: required('--text-file <file>', 'text in which the facts are hidden; a short one is repeated'),
  tasks: parsed('--tasks <list>', `some of ${TASKS.join(',')}`, taskNames, [...TASKS], 'all'),
  lengths: parsed('--lengths <list>', 'lengths in tokens', wholeNumbers(1), [1024, 4096]),
  depths: parsed('--depths <list>', 'places of the fact, in percent of the text', percentages, [0, 25, 50, 75, 100]),
  trials: parsed('--trials <n>', 'cases per task, length and depth', wholeNumber(1), 4),
  window: parsed(
    '--window <n>',
    'tokens of the window-only column (default: nsa.w of the model, or 512)',
    wholeNumber(1),
  ),
  generate: flag('--generate', 'also let it write the answer, for models that follow the pattern'),
  seed: parsed('--seed <n>', 'seed of the cases', wholeNumber(0), 1),
  outDir: flag('--out-dir <folder>', 'write long.json and long.svg'),
  device: deviceOption('where to compute'),
  threads: threadsOption(),
  json: jsonOption(
    '{model, step, seed, window_tokens, seconds, rows: [{task, length, depth, trials, correct, found, oracle, window, chance, margin, selected, generated}]}',
  ),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Facts are hidden in your text and asked for at its end. Eight candidates for
the answer are compared by log-probability, so that base models can be
measured; guessing finds 12.5 %. Every cell stands between two others: "oracle"
reads the facts and the question alone, "window" only the last tokens.
single: one fact. many: one of eight. keys: three of eight at once. values: the
three values of one key, in order. variables: what is the same as something
else. counting: the word noted most often. two-facts: a fact that leads to
another, half the text away. "selected": share of the cases in which the blocks
of all facts were selected by some group of some layer at the last token.
With --url the same cases go to /v1/completions (echo, logprobs); the variable
OPENAI_API_KEY is sent if it is set.
`;

export const configure = configured(OPTIONS, run, HELP);

function taskNames(text: string): Task[] {
  return text.split(',').map((name) => {
    const task = TASKS.find((one) => one === name.trim());
    if (!task) throw new InvalidArgumentError(`Allowed are ${TASKS.join(', ')}.`);
    return task;
  });
}

async function run(options: Options, io: Io): Promise<void> {
  const { model: path, url } = options;
  if ((path === undefined) === (url === undefined)) throw new UsageError('give a --model or the --url of a server');
  for (const [name, value] of Object.entries({
    '--served-model': options.servedModel,
    '--tokenizer': options.tokenizer,
  }))
    if (value !== undefined && url === undefined) throw new UsageError(`${name}: only with --url`);
  const text = readGivenText(options.textFile);
  if (url !== undefined) {
    const tokenizer = createTokenizer(options.tokenizer ?? 'gpt2');
    const reader = await serverReader({ url, model: options.servedModel, key: io.env['OPENAI_API_KEY'] });
    const haystack = new Haystack(text, tokenizer, options.textFile);
    return report(reader, haystack, { model: reader.model, step: null, window: options.window ?? 512 }, options, io);
  }
  const loaded = loadModel(openDevice(options), path!, 'f32', { adapter: options.adapter });
  try {
    for (const warning of loaded.warnings) io.warn(warning);
    const { shape } = loaded.model;
    const reader = modelReader(loaded, kernelOptions(withEnvironment(loaded.config, io.env)));
    const haystack = new Haystack(text, loaded.tokenizer, options.textFile);
    const window = options.window ?? (shape.attention === 'nsa' ? shape.nsa.w : 512);
    await report(reader, haystack, { model: loaded.path, step: loaded.step, window }, options, io);
  } finally {
    loaded.free();
  }
}

interface Measured {
  readonly model: string;
  readonly step: number | null;
  readonly window: number;
}

async function report(reader: Reader, haystack: Haystack, measured: Measured, options: Options, io: Io): Promise<void> {
  const { tasks, lengths, depths, trials, seed, generate = false } = options;
  const { model, step, window } = measured;
  const grid: LongGrid = { tasks, lengths, depths, trials, seed, window, generate };
  const progress = new ProgressLine(io);
  const started = performance.now();
  const yielding: Reader = {
    score: async (...given) => {
      await yieldToSignals();
      return reader.score(...given);
    },
    generate: (prompt) => reader.generate(prompt),
  };
  let rows: LongCell[];
  try {
    rows = await evaluateLong(yielding, haystack, grid, (done, all) => progress.show(`${done} of ${all} cases`));
  } finally {
    progress.clear();
  }
  const seconds = (performance.now() - started) / 1000;
  const result = { model, step, seed, window_tokens: window, seconds, rows };
  if (options.outDir !== undefined) {
    ensureFolder(options.outDir);
    writeFileAtomic(join(options.outDir, 'long.json'), `${JSON.stringify(result)}\n`);
    writeFileAtomic(join(options.outDir, 'long.svg'), `${picture(grid, rows)}\n`);
  }
  if (options.json) printJson(io, result);
  else io.out(table(grid, rows));
}

/** One line for each task and length, means over the depths. */
function table({ tasks, lengths, window, generate }: LongGrid, rows: readonly LongCell[]): string {
  const hasSelected = rows.some(({ selected }) => selected !== null);
  const titles = ['found', 'worst depth', 'oracle', `window ${window}`, 'chance'];
  const lines = tasks.flatMap((task) =>
    lengths.map((length) => {
      const cells = rows.filter((row) => row.task === task && row.length === length);
      const mean = (of: (cell: LongCell) => number | null) =>
        cells.reduce((sum, cell) => sum + (of(cell) ?? 0), 0) / cells.length;
      return [
        ...[
          task,
          String(length),
          percent(mean(({ found }) => found)),
          percent(Math.min(...cells.map(({ found }) => found))),
        ],
        ...[percent(mean(({ oracle }) => oracle)), percent(mean((cell) => cell.window)), percent(cells[0].chance)],
        ...(hasSelected ? [percent(mean(({ selected }) => selected))] : []),
        ...(generate ? [percent(mean(({ generated }) => generated))] : []),
      ];
    }),
  );
  return formatTable(
    right('task', 'tokens', ...titles, ...(hasSelected ? ['selected'] : []), ...(generate ? ['written'] : [])),
    lines,
  ).trimEnd();
}

function picture({ tasks, lengths, depths }: LongGrid, rows: readonly LongCell[]): string {
  return heatMap({
    title: 'Answers found in a long text',
    x: 'tokens',
    y: 'depth',
    columns: lengths.map(String),
    rows: depths.map((depth) => `${depth} %`),
    tables: tasks.map((task) => ({
      title: task,
      values: depths.map((depth) =>
        lengths.map(
          (length) => rows.find((row) => row.task === task && row.length === length && row.depth === depth)!.found,
        ),
      ),
    })),
  });
}
