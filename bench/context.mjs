// Which changes make a sparse model use its context: trains each variant with several seeds and measures what it finds.
//
//   node bench/context.mjs [--only VARIANT,...] [--seeds 1,2] [--until HH:MM] [--threads 1] [--jobs 1] [--device cpu]
//                          [--work artifacts/context] [--out bench/results/context.json] [--build NAME] [--list]
//                          [--code FOLDER]
//
// Runs follow the order of PLAN, --jobs of them at a time. One that is in --out already is left out, so a race that was
// stopped continues with the same command. Each run adds one row when it ends; one that fails adds its error, and is made
// again. --until stops at a time of day, also in the middle of a run, which then starts again with the next call. The
// models stay in --work. --device cuda takes the variants that need a GPU. Those of code train on the Python code in
// --code, by default that of python3's packages. Needs `npm run build`. context-page.mjs writes the page.
import { execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { cpus } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { PLAN, VARIANTS } from './context-variants.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const { values } = parseArgs({
  options: {
    only: { type: 'string' },
    seeds: { type: 'string' },
    until: { type: 'string' },
    threads: { type: 'string', default: '1' },
    jobs: { type: 'string', default: '1' },
    device: { type: 'string', default: 'cpu' },
    work: { type: 'string', default: join(root, 'artifacts', 'context') },
    out: { type: 'string', default: join(root, 'bench/results/context.json') },
    build: { type: 'string' },
    code: { type: 'string' },
    list: { type: 'boolean', default: false },
  },
});

const result = existsSync(values.out)
  ? JSON.parse(readFileSync(values.out, 'utf8'))
  : { machine: cpus()[0].model, runs: [] };
const rowOf = (variant, seed) => result.runs.findIndex((run) => run.variant === variant && run.seed === seed);
const isDone = ([variant, seed]) =>
  result.runs.some((run) => run.variant === variant && run.seed === seed && !run.error);
const asked = ([variant, seed]) =>
  (VARIANTS[variant].device ?? 'cpu') === values.device &&
  (!values.only || values.only.split(',').includes(variant)) &&
  (!values.seeds || values.seeds.split(',').map(Number).includes(seed));
const open = PLAN.filter((run) => asked(run) && !isDone(run));
if (values.list) {
  for (const [variant, seed] of PLAN) console.log(`${isDone([variant, seed]) ? 'done' : 'open'}  ${variant}  ${seed}`);
  process.exit(0);
}

const children = new Set();
let codeFolder = null;
if (values.until) {
  const [hours, minutes] = values.until.split(':').map(Number);
  const end = new Date();
  end.setHours(hours, minutes, 0, 0);
  if (end < new Date()) end.setDate(end.getDate() + 1);
  setTimeout(() => stop(`stopped at ${values.until}`), end - Date.now()).unref();
}
for (const signal of ['SIGINT', 'SIGTERM']) process.on(signal, () => stop(signal));
function stop(reason) {
  for (const child of children) process.kill(-child.pid, 'SIGKILL');
  console.error(`${reason}; the same command continues`);
  process.exit(1);
}

const machine = cpus()[0].model;
const queue = [...open];
await Promise.all(
  Array.from({ length: Number(values.jobs) }, async () => {
    while (queue.length > 0) await race(...queue.shift());
  }),
);

async function race(variant, seed) {
  const started = performance.now();
  const row = {
    variant,
    seed,
    ...VARIANTS[variant],
    date: new Date().toISOString().slice(0, 10),
    build: values.build ?? null,
    ...(machine !== result.machine && { machine }),
  };
  try {
    Object.assign(row, await measure(variant, seed));
  } catch (error) {
    row.error = error.message;
  }
  row.seconds = (performance.now() - started) / 1000;
  const at = rowOf(variant, seed);
  if (at < 0) result.runs.push(row);
  else result.runs[at] = row;
  save();
  console.error(`${variant} seed ${seed}: ${row.error ?? JSON.stringify(row.summary)}`);
}

function save() {
  mkdirSync(dirname(values.out), { recursive: true });
  writeFileSync(`${values.out}.part`, `${JSON.stringify(result, null, 1)}\n`);
  renameSync(`${values.out}.part`, values.out);
}

function percents(shares) {
  return shares.map((share) => (100 * share).toFixed(1)).join(' / ');
}

/** Trains one run and measures it. */
async function measure(variant, seed) {
  const { config, set } = VARIANTS[variant];
  const out = join(values.work, `${variant}-${seed}`);
  // A model whose measurement was interrupted is not trained again.
  const finished = join(out, 'cpu-seconds.json');
  if (!existsSync(finished)) rmSync(out, { recursive: true, force: true });
  const isNeedle = config === 'needle_cpu';
  const common = { 'train.seed': seed, 'train.keep_last': 1000, ...(isNeedle && { 'train.save_every': 100 }) };
  let cpuSeconds = existsSync(finished) ? JSON.parse(readFileSync(finished, 'utf8')) : 0;
  if (!existsSync(finished)) {
    const words = [config === 'quickstart' ? 'start' : 'train', '--config', config, '--out-dir', out];
    const data = config === 'text_cpu' ? await trainingCode() : [];
    const sets = Object.entries({ ...common, ...set }).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
    ({ cpuSeconds } = await trefoil([...words, ...data, ...sets]));
  }
  writeFileSync(finished, JSON.stringify(cpuSeconds));
  const training = trainingOf(out);
  const measured = await measuresOf(config)(out);
  rmSync(join(out, 'checkpoints'), { recursive: true, force: true });
  const { summary, ...rest } = measured;
  return {
    cpu_seconds: cpuSeconds,
    ...training,
    ...rest,
    summary: { ...summary, cpu: Math.round(cpuSeconds), loss: training.loss },
  };
}

/** The measurement for models of a config. */
function measuresOf(config) {
  if (config === 'needle_cpu') return async (out) => ({ ...(await needles(out)), coverage: await coverage(out) });
  return config === 'quickstart' ? recall : farContext;
}

/**
 * The gain from far context, and of a sparse model the questions that `trefoil start` asked: answered by the distance
 * between fact and question, in all and beyond 128 tokens.
 */
async function recall(out) {
  const validation = await lossOf(out, ['--dataset', 'stories', '--seq-len', '512', '--batches', '64']);
  const { gain, error } = validation.far;
  const file = join(out, 'recall.json');
  if (!existsSync(file)) return { validation, summary: { gain, error } };
  const { rows } = JSON.parse(readFileSync(file, 'utf8'));
  const share = (some) => sum(some, ({ correct }) => correct) / sum(some, ({ cases }) => cases);
  const kept = rows.map(({ from, to, cases, correct }) => ({ from, to, cases, correct }));
  const [all, far] = [share(rows), share(rows.filter(({ from }) => from >= 128))];
  return { recall: kept, validation, summary: { recall: percents([all]), far: percents([far]), gain, error } };
}

function sum(list, of) {
  return list.reduce((total, one) => total + of(one), 0);
}

/** The last losses and the gates at the end. */
function trainingOf(out) {
  const last = trainingRows(out).slice(-3);
  const attention = join(out, 'attention.jsonl');
  const telemetry = existsSync(attention) ? JSON.parse(readFileSync(attention, 'utf8').trim().split('\n').at(-1)) : {};
  const { entropy, collapse, cmp, sel, win, scorer_loss } = telemetry;
  return {
    loss: last.reduce((sum, row) => sum + row[1], 0) / last.length,
    gates: { entropy, collapse, cmp, sel, win },
    scorer_loss,
  };
}

/** Step, loss, learning rate and tokens per second. */
function trainingRows(out) {
  const lines = readFileSync(join(out, 'training.csv'), 'utf8').trim().split('\n').slice(1);
  return lines.map((line) => line.split(',').map(Number));
}

/** Needles found at three lengths, worst depth, and the first checkpoint that finds 95 % at 1,024 tokens. */
async function needles(out) {
  const grid = (model, lengths, trials) =>
    trefoil([
      ...['eval', 'needle', '--model', model, '--lengths', lengths, '--trials', trials],
      ...['--records', '3', '--facts', '2', '--json'],
    ]);
  const rows = (await grid(out, '256,1024,4096', '20')).json.rows;
  const lengths = [256, 1024, 4096].map((length) => {
    const cells = rows.filter((row) => row.length === length);
    const mean = (of) => cells.reduce((sum, cell) => sum + of(cell), 0) / cells.length;
    const found = mean((cell) => cell.accuracy);
    return {
      length,
      found,
      worst_depth: Math.min(...cells.map((cell) => cell.accuracy)),
      block_selected: mean((cell) => cell.recall.any),
    };
  });
  let reached = null;
  // A model that ends far below has not been there before: its checkpoints need not be measured.
  for (const step of lengths[1].found < 0.9 ? [] : checkpoints(out)) {
    const cells = (await grid(join(out, 'checkpoints', `step-${step}`), '1024', '5')).json.rows;
    if (cells.reduce((sum, cell) => sum + cell.accuracy, 0) / cells.length >= 0.95) {
      reached = step;
      break;
    }
  }
  const column = (key) => percents(lengths.map((row) => row[key]));
  return {
    lengths,
    steps_to_95: reached,
    summary: { found: column('found'), worst: column('worst_depth'), steps_to_95: reached },
  };
}

/** The share of its attention that the choice covers on a case of 1,024 tokens, whose tokens are written as bytes. */
async function coverage(out) {
  const { caseTokens } = await import(join(root, 'dist/evaluate/needle.js'));
  const task = { vocabSize: 128, records: 3, facts: 2, questions: 8, absent: 2 };
  const file = join(out, 'case.txt');
  writeFileSync(file, Buffer.from(caseTokens(task, 1024, 0.5, 1, 0)));
  return coverageOf(out, file);
}

async function coverageOf(out, file) {
  const words = ['eval', 'selection', '--model', out, '--text-file', file, '--coverage', '--max-tokens', '2048'];
  const { json } = await trefoil([...words, '--json']);
  return json.coverage.layers.map(({ forced, random, chosen, best }) => ({ forced, random, chosen, best }));
}

/** Loss, and what context beyond 64 tokens is worth. */
async function lossOf(out, data) {
  const words = ['eval', 'loss', '--model', out, ...data, '--by-position', '--near', '64', '--json'];
  const { loss, bits_per_byte, targets, by_position, far } = (await trefoil(words)).json;
  return { loss, bits_per_byte, targets, by_position, far };
}

/** Validation loss, what far context is worth, training speed, and coverage by layer: the mean of four documents. */
async function farContext(out) {
  const { folder } = await code();
  const validation = await lossOf(out, ['--local-path', join(folder, 'val'), '--seq-len', '2048', '--batches', '96']);
  const measured = [];
  for (const [i, text] of (await code()).documents.entries()) {
    const file = join(out, `document-${i}.txt`);
    writeFileSync(file, text);
    measured.push(await coverageOf(out, file));
  }
  const mean = (layer, key) => sum(measured, (one) => one[layer][key]) / measured.length;
  const coverage = measured[0].map((shares, layer) =>
    Object.fromEntries(Object.keys(shares).map((key) => [key, mean(layer, key)])),
  );
  const rates = trainingRows(out).map(([, , , rate]) => rate);
  const tokens_per_second = rates.sort((a, b) => a - b)[rates.length >> 1];
  const { loss, far } = validation;
  return { validation, coverage, tokens_per_second, summary: { validation: loss, gain: far.gain, error: far.error } };
}

function checkpoints(out) {
  const steps = readdirSync(join(out, 'checkpoints')).filter((name) => /^step-\d+$/.test(name));
  return steps.map((name) => Number(name.slice(5))).sort((a, b) => a - b);
}

/** Token shards of the Python code in --code, their tokenizer, and the start of the longest validation documents. */
function code() {
  codeFolder ??= prepareCode(join(values.work, 'code'));
  return codeFolder;
}

async function prepareCode(folder) {
  if (!existsSync(join(folder, 'val'))) {
    const script = 'import sysconfig; print(sysconfig.get_paths()["purelib"])';
    const from = values.code ?? execFileSync('python3', ['-c', script]).toString().trim();
    const collect = [join(root, 'examples/code-model/collect.mjs'), '--from', from, '--language', 'python'];
    await processOf([...collect, '--max-mb', '120', '--out', folder]);
    const text = (name) => ['--local-path', join(folder, name)];
    await trefoil([
      'data',
      'tokenizer',
      ...text('train.jsonl'),
      '--vocab-size',
      '2048',
      '--out',
      join(folder, 'words'),
    ]);
    for (const part of ['train', 'val']) {
      const words = [...text(`${part}.jsonl`), '--tokenizer', join(folder, 'words'), '--out', join(folder, part)];
      await trefoil(['data', 'prepare', ...words]);
    }
  }
  const lines = readFileSync(join(folder, 'val.jsonl'), 'utf8').trim().split('\n');
  const longest = lines.map((line) => JSON.parse(line).text).sort((a, b) => b.length - a.length);
  return { folder, documents: longest.slice(0, 4).map((text) => text.slice(0, 20_000)) };
}

async function trainingCode() {
  const { folder } = await code();
  const sets = { 'data.val_path': join(folder, 'val'), 'data.tokenizer': join(folder, 'words') };
  const words = Object.entries(sets).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
  return ['--local-path', join(folder, 'train'), ...words];
}

/** Runs a command of trefoil; returns what it prints with --json and its processor time. */
async function trefoil(words) {
  const where = words[0] === 'data' ? [] : ['--threads', values.threads, '--device', values.device];
  const { text, cpuSeconds } = await processOf([join(root, 'dist/cli/main.js'), ...words, ...where]);
  return { cpuSeconds, json: words.includes('--json') ? JSON.parse(text) : null };
}

function processOf(words) {
  // The shell's `times` prints the processor time of its children, which Node does not report.
  const command = ['"$@"; code=$?; times >&2; exit $code', 'sh', process.execPath, ...words];
  const child = spawn('sh', ['-c', ...command], { detached: true });
  children.add(child);
  const [out, err] = [[], []];
  child.stdout.on('data', (data) => out.push(data));
  child.stderr.on('data', (data) => err.push(data));
  return new Promise((resolve, reject) =>
    child.on('close', (code) => {
      children.delete(child);
      const errors = Buffer.concat(err).toString();
      if (code !== 0) return reject(new Error(`exit code ${code}: ${errors.slice(-600)}`));
      const last = errors.trim().split('\n').at(-1);
      const cpuSeconds = [...last.matchAll(/(\d+)m([\d.]+)s/g)].reduce(
        (sum, [, m, s]) => sum + 60 * Number(m) + Number(s),
        0,
      );
      resolve({ cpuSeconds, text: Buffer.concat(out).toString() });
    }),
  );
}
