// Which changes make a sparse model use its context: trains each variant with several seeds and measures what it finds.
//
//   node bench/context.mjs [--only VARIANT,...] [--seeds 1,2] [--until HH:MM] [--threads 1]
//                          [--work artifacts/context] [--out bench/results/context-cpu.json] [--build NAME] [--list] [--table]
//
// Runs follow the order of PLAN. One that is in --out already is left out, so a race that was stopped continues with the
// same command. Each run adds one row when it ends; a run that fails adds its error. --until stops at a time of day, also
// in the middle of a run, which then starts again with the next call. --table prints the rows as Markdown. The models stay in --work. Needs `npm run build`.
import { spawn } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { cpus } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { writeCorpus } from './context-corpus.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const option = (value) => ({ type: 'string', ...(value !== undefined && { default: value }) });
const { values } = parseArgs({
  options: {
    ...{ only: option(), seeds: option(), until: option(), build: option(), threads: option('1') },
    ...{ work: option(join(root, 'artifacts', 'context')), out: option(join(root, 'bench/results/context-cpu.json')) },
    list: { type: 'boolean', default: false },
    table: { type: 'boolean', default: false },
  },
});

const scorer = { 'train.scorer_loss': 0.1 };
const none = { 'train.scorer_loss': 0 };
const muon = { 'train.optimizer': 'muon' };
const twice = { 'train.lr': 8e-3 };
// The curriculum of needle_cpu in half of its samples. 1024 tokens are the longest of the training.
const short = {
  'train.steps': 750,
  'data.needle_curriculum': '64+128:300,128+512:600,64+128+256+512:800,256+1024:1000000',
};
// The same steps with fewer short sequences.
const early = { ...short, 'data.needle_curriculum': '64+128:200,128+512:400,256+1024:1000000' };
// Half of the tokens in the steps of needle_cpu: one sequence of 2,048 tokens a step, and its curriculum in half of the samples.
const small = {
  'train.batch_size': 1,
  'data.needle_curriculum': '64+128:300,128+512:600,256+1024:900,64+128+256+512:1100,256+1024:1000000',
};
// Long sequences from the first step; all lengths from the first step.
const flat = { 'data.needle_curriculum': '256+1024:1000000' };
const mixed = {
  'train.seq_len': 4096,
  'train.batch_size': 1,
  'data.needle_curriculum': '64+128+256+1024:1000000',
};
const rope = { 'model.rope_scale': 1, 'model.n_layers': 2 };
// Waves of more than 64 tokens stand still, so that what is found at one distance is found at any.
const slow = { 'model.rope_type': 'llama3', 'model.rope_factor': 1e6, 'model.rope_original_context': 64 };
// A window of 64 tokens of 2,048; dense attention gets in its feed-forward what it has fewer in its projections.
const language = {
  ...{ 'train.steps': 400, 'train.seq_len': 2048, 'train.batch_size': 1, 'nsa.n_sel': 12 },
  ...muon,
  ...{ 'train.save_every': 0, 'train.sample_every': 0, 'train.eval_every': 0, 'data.val_fraction': 0 },
};

/** Changes to the recipe needle_cpu as it was with AdamW: 1,500 steps. */
const needle = (...changes) => ({
  config: 'needle_cpu',
  set: Object.assign(
    { 'train.steps': 1500, 'train.optimizer': 'adamw' },
    { 'data.needle_curriculum': '64+128:600,128+512:1200,256+1024:1800,64+128+256+512:2200,256+1024:1000000' },
    ...changes,
  ),
});
const forced = { ...none, 'nsa.force_branch': 'cmp', 'train.steps': 900 };
const stories = (...changes) => ({ config: 'quickstart', set: Object.assign({}, ...changes) });
const text = (...changes) => ({ config: 'text_cpu', set: Object.assign({}, language, ...changes) });

/** Changes of each variant to its config; `phases` are the settings of runs that follow each other in one folder. */
const VARIANTS = {
  nsa: needle(none),
  scorer: needle(scorer),
  'two-runs': { config: 'needle_cpu', phases: [needle(forced).set, needle(none).set] },
  'short-nsa': needle(short, none),
  'short-scorer': needle(short, scorer),
  'short-scorer-1': needle(short, { 'train.scorer_loss': 1 }),
  'short-scorer-betas': needle(short, scorer, { 'train.betas': '[0.9,0.99]' }),
  'early-scorer': needle(early, scorer),
  'early-scorer-0.3': needle(early, { 'train.scorer_loss': 0.3 }),
  'small-scorer': needle(small, scorer),
  'rate2-nsa': needle(none, twice),
  'rate2-scorer': needle(scorer, twice),
  'flat-nsa': needle(flat, none),
  'flat-scorer': needle(flat, scorer),
  'mixed-nsa': needle(mixed, none),
  'mixed-scorer': needle(mixed, scorer),
  'rope2-nsa': needle(rope, none),
  'rope2-scorer': needle(rope, scorer),
  'rope2-slow-nsa': needle(rope, slow, none),
  'rope2-slow-scorer': needle(rope, slow, scorer),
  // With Muon, in half of the steps.
  'short-nsa-muon': needle(short, none, muon),
  'short-scorer-muon': needle(short, scorer, muon),
  'mixed-scorer-muon': needle(mixed, scorer, muon, { 'train.steps': 750 }),
  'rope2-scorer-muon': needle(rope, short, scorer, muon),
  'rope2-window-muon': needle(rope, short, scorer, muon, { 'nsa.rope': 'window', 'nsa.cmp_rope': 'none' }),
  'rate2-scorer-muon': needle(short, scorer, muon, twice),
  // AdamW, which trains the gate, makes steps of one size: a temperature of 10 is a tenth of the rate.
  'short-gate-muon': needle(short, scorer, muon, { 'nsa.gate_temp': 10 }),
  'rate2-gate-muon': needle(short, scorer, muon, twice, { 'nsa.gate_temp': 10 }),
  'rate2-inputs-muon': needle(short, scorer, muon, twice, { 'nsa.gate_inputs': 12 }),
  stories: stories(none, { 'train.steps': 2000, 'train.optimizer': 'adamw', 'data.stories_drills': 2400 }),
  'stories-scorer': stories(scorer, { 'train.steps': 2000, 'train.optimizer': 'adamw', 'data.stories_drills': 2400 }),
  'stories-muon': stories(scorer, muon, { 'train.steps': 1000, 'data.stories_drills': 1200 }),
  'language-dense': text({ 'model.attention': 'dense', 'model.mlp_hidden': 345 }),
  'language-nsa': text(none),
  'language-scorer': text(scorer),
};

/** The runs in the order in which they answer most: variants and their seeds. */
const PLAN = [
  ['short-scorer-muon', [1, 2]],
  ['language-dense,language-scorer', [1]],
  ['short-nsa-muon', [1]],
  ['short-scorer-muon', [3]],
  ['short-gate-muon,mixed-scorer-muon,stories-muon', [1]],
  ['short-scorer-muon', [4, 5]],
  ['rate2-scorer-muon', [1]],
  ['language-nsa', [1]],
  ['mixed-scorer-muon', [2, 3]],
  ['rope2-scorer-muon,rate2-gate-muon', [1]],
  ['stories-muon', [2, 3]],
  ['rope2-window-muon,rate2-inputs-muon', [1]],
  ['language-dense,language-scorer,language-nsa', [2, 3]],
  ['stories,stories-scorer', [1, 2, 3]],
  ['short-gate-muon', [2, 3, 4, 5]],
  ['rate2-scorer-muon,rate2-gate-muon,rate2-inputs-muon,rope2-scorer-muon,rope2-window-muon,short-nsa-muon', [2, 3]],
  ['rope2-slow-nsa,rate2-nsa', [1]],
  ['scorer', [1, 2, 3, 4, 5]],
  ['nsa', [1, 2, 3]],
  ['rate2-scorer', [1, 2, 3]],
  ['short-scorer-betas', [1]],
  ['short-scorer,mixed-scorer,rope2-slow-scorer', [1, 2, 3]],
  ['early-scorer,early-scorer-0.3,small-scorer,short-scorer-1,flat-scorer', [1]],
  ['rope2-scorer,two-runs', [1, 2, 3]],
  ['mixed-nsa,short-nsa,rope2-nsa,flat-nsa', [1]],
]
  .flatMap(([names, seeds]) => seeds.flatMap((seed) => names.split(',').map((name) => [name, seed])))
  .filter(([variant, seed], i, all) => all.findIndex((one) => one[0] === variant && one[1] === seed) === i);

const result = existsSync(values.out)
  ? JSON.parse(readFileSync(values.out, 'utf8'))
  : { machine: cpus()[0].model, runs: [] };
const isDone = ([variant, seed]) => result.runs.some((run) => run.variant === variant && run.seed === seed);
const asked = ([variant, seed]) =>
  (!values.only || values.only.split(',').includes(variant)) &&
  (!values.seeds || values.seeds.split(',').map(Number).includes(seed));
const open = PLAN.filter((run) => asked(run) && !isDone(run));
if (values.list) {
  for (const [variant, seed] of PLAN) console.log(`${isDone([variant, seed]) ? 'done' : 'open'}  ${variant}  ${seed}`);
  process.exit(0);
}

if (values.table) {
  for (const table of [needleTable, languageTable, storyTable]) console.log(`${table(result.runs)}\n`);
  process.exit(0);
}

let child = null;
if (values.until) {
  const [hours, minutes] = values.until.split(':').map(Number);
  const end = new Date();
  end.setHours(hours, minutes, 0, 0);
  if (end < new Date()) end.setDate(end.getDate() + 1);
  setTimeout(() => stop(`stopped at ${values.until}`), end - Date.now()).unref();
}
for (const signal of ['SIGINT', 'SIGTERM']) process.on(signal, () => stop(signal));
function stop(reason) {
  if (child) process.kill(-child.pid, 'SIGKILL');
  console.error(`${reason}; the same command continues`);
  process.exit(1);
}

// Rows of builds that had no coverage, as far as their models are there.
for (const run of result.runs.filter((one) => one.lengths && !one.coverage)) {
  const out = join(values.work, `${run.variant}-${run.seed}`);
  if (existsSync(join(out, 'model.safetensors'))) run.coverage = await coverage(out);
}
save();

for (const [variant, seed] of open) {
  const started = performance.now();
  const row = {
    variant,
    seed,
    ...VARIANTS[variant],
    date: new Date().toISOString().slice(0, 10),
    build: values.build ?? null,
  };
  try {
    Object.assign(row, await measure(variant, seed));
  } catch (error) {
    row.error = error.message;
  }
  row.seconds = (performance.now() - started) / 1000;
  result.runs.push(row);
  save();
  console.error(`${variant} seed ${seed}: ${row.error ?? JSON.stringify(row.summary)}`);
}

function markdown(titles, rows) {
  return [titles, titles.map(() => '---'), ...rows].map((cells) => `| ${cells.join(' | ')} |`).join('\n');
}

/** Shares of the attention that could be covered beyond the forced blocks, as percents: of the choice and of a random one. */
function possible({ forced, random, chosen, best }) {
  return percents([chosen, random].map((x) => (x - forced) / (best - forced)));
}

function needleTable(runs) {
  const titles = [
    ...['variant', 'seed', 'found at 256 / 1,024 / 4,096, %', 'worst depth, %', 'block selected, %', '95 % at step'],
    ...['gates, nats', 'covered / random / best, %', 'of possible / random, %', 'CPU s'],
  ];
  const rows = runs.filter(({ config, error }) => config === 'needle_cpu' && !error);
  return markdown(
    titles,
    rows.map(({ variant, seed, summary, lengths, gates, coverage: covered = [], cpu_seconds: cpu }) => [
      ...[variant, seed, summary.found, summary.worst, percents(lengths.map((row) => row.block_selected))],
      ...[summary.steps_to_95 ?? 'never', gates.entropy.join(', ')],
      covered.map(({ chosen, random, best }) => percents([chosen, random, best])).join(', '),
      ...[covered.map(possible).join(', '), Math.round(cpu)],
    ]),
  );
}

function languageTable(runs) {
  const titles = [
    'variant',
    'seed',
    'validation loss',
    'gain from far context, nats',
    'of possible / random, %',
    'CPU s',
  ];
  const rows = runs.filter(({ validation }) => validation);
  return markdown(
    titles,
    rows.map(({ variant, seed, validation: { loss, far }, coverage: covered, cpu_seconds: cpu }) => [
      ...[variant, seed, loss.toFixed(3), `${far.gain.toFixed(4)} ± ${far.error.toFixed(4)}`],
      ...[covered.map((layer) => (layer.chosen === null ? '–' : possible(layer))).join(', '), cpu && Math.round(cpu)],
    ]),
  );
}

function storyTable(runs) {
  const rows = runs.filter(({ recall: found }) => found);
  return markdown(
    ['variant', 'seed', 'recalled, %', 'recalled beyond 128 tokens, %', 'gates, nats', 'CPU s'],
    rows.map(({ variant, seed, summary, gates, cpu_seconds: cpu }) => [
      ...[variant, seed, summary.recall, summary.far, gates.entropy.join(', '), Math.round(cpu)],
    ]),
  );
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
  const { config, set, phases = [set] } = VARIANTS[variant];
  const out = join(values.work, `${variant}-${seed}`);
  // A model whose measurement was interrupted is not trained again.
  const finished = join(out, 'cpu-seconds.json');
  if (!existsSync(finished)) rmSync(out, { recursive: true, force: true });
  const isNeedle = config === 'needle_cpu';
  const common = { 'train.seed': seed, 'train.keep_last': 1000, ...(isNeedle && { 'train.save_every': 100 }) };
  let cpuSeconds = existsSync(finished) ? JSON.parse(readFileSync(finished, 'utf8')) : 0;
  for (const [i, phase] of existsSync(finished) ? [] : phases.entries()) {
    const all = { ...common, ...phase };
    const words = [
      config === 'quickstart' ? 'start' : 'train',
      '--config',
      config,
      '--out-dir',
      out,
      ...(i > 0 ? ['--resume', 'auto'] : []),
    ];
    const data = config === 'text_cpu' ? trainingText() : [];
    const sets = Object.entries(all).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
    cpuSeconds += (await trefoil([...words, ...data, ...sets])).cpuSeconds;
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

/** What a model of a config is measured by. */
function measuresOf(config) {
  if (config === 'needle_cpu') return async (out) => ({ ...(await needles(out)), coverage: await coverage(out) });
  return config === 'quickstart' ? recall : farContext;
}

/** What `trefoil start` found: questions answered by the distance between fact and question, in all and beyond 128 tokens. */
function recall(out) {
  const { rows } = JSON.parse(readFileSync(join(out, 'recall.json'), 'utf8'));
  const share = (some) => sum(some, ({ correct }) => correct) / sum(some, ({ cases }) => cases);
  const kept = rows.map(({ from, to, cases, correct }) => ({ from, to, cases, correct }));
  const [all, far] = [share(rows), share(rows.filter(({ from }) => from >= 128))];
  return { recall: kept, summary: { recall: percents([all]), far: percents([far]) } };
}

function sum(list, of) {
  return list.reduce((total, one) => total + of(one), 0);
}

/** The last losses and the gates at the end. */
function trainingOf(out) {
  const rows = readFileSync(join(out, 'training.csv'), 'utf8')
    .trim()
    .split('\n')
    .slice(1)
    .map((line) => line.split(',').map(Number));
  const last = rows.slice(-3);
  const attention = join(out, 'attention.jsonl');
  const telemetry = existsSync(attention) ? JSON.parse(readFileSync(attention, 'utf8').trim().split('\n').at(-1)) : {};
  const { entropy, collapse, cmp, sel, win, scorer_loss } = telemetry;
  return {
    loss: last.reduce((sum, row) => sum + row[1], 0) / last.length,
    gates: { entropy, collapse, cmp, sel, win },
    scorer_loss,
  };
}

/** Needles found at three lengths, worst depth, and the first checkpoint that finds 95 % at 1,024 tokens. */
async function needles(out) {
  const grid = (model, lengths, trials) =>
    trefoil([
      'eval',
      'needle',
      '--model',
      model,
      '--lengths',
      lengths,
      '--trials',
      trials,
      '--records',
      '3',
      '--facts',
      '2',
      '--json',
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
  const file = join(values.work, 'case.txt');
  writeFileSync(file, Buffer.from(caseTokens(task, 1024, 0.5, 1, 0)));
  return coverageOf(out, file);
}

async function coverageOf(out, file) {
  const words = [
    'eval',
    'selection',
    '--model',
    out,
    '--text-file',
    file,
    '--coverage',
    '--max-tokens',
    '2048',
    '--json',
  ];
  const { json } = await trefoil(words);
  return json.coverage.layers.map(({ forced, random, chosen, best }) => ({ forced, random, chosen, best }));
}

/** Validation loss, what context beyond the window is worth, and coverage by layer: the mean of four documents. */
async function farContext(out) {
  const validation = join(corpus(), 'val.jsonl');
  const words = ['--local-path', validation, '--seq-len', '2048', '--by-position', '--near', '64', '--json'];
  const { loss, bits_per_byte, targets, by_position, far } = (await trefoil(['eval', 'loss', '--model', out, ...words]))
    .json;
  const texts = readFileSync(validation, 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line).text);
  const documents = texts.sort((a, b) => b.length - a.length).slice(0, 4);
  const measured = [];
  for (const text of documents) {
    const file = join(values.work, 'case.txt');
    writeFileSync(file, text);
    measured.push(await coverageOf(out, file));
  }
  const mean = (layer, key) => measured.reduce((sum, one) => sum + one[layer][key], 0) / measured.length;
  const covered = measured[0].map((shares, layer) =>
    Object.fromEntries(Object.keys(shares).map((key) => [key, mean(layer, key)])),
  );
  const validationRow = { loss, bits_per_byte, targets, by_position, far };
  return {
    validation: validationRow,
    coverage: covered,
    summary: { validation: loss, gain: far.gain, error: far.error },
  };
}

function checkpoints(out) {
  const steps = readdirSync(join(out, 'checkpoints')).filter((name) => /^step-\d+$/.test(name));
  return steps.map((name) => Number(name.slice(5))).sort((a, b) => a - b);
}

/** The folder with the text of the language runs. */
function corpus() {
  const folder = join(values.work, 'corpus');
  if (!existsSync(join(folder, 'tokenizer_config.json'))) writeCorpus(root, folder);
  return folder;
}

function trainingText() {
  const sets = { 'data.val_path': 'val.jsonl', 'data.tokenizer': 'tokenizer.json' };
  const words = Object.entries(sets).flatMap(([key, name]) => ['--set', `${key}=${join(corpus(), name)}`]);
  return ['--local-path', join(corpus(), 'train.jsonl'), ...words];
}

/** Runs a command of trefoil; returns what it prints with --json and its processor time. */
function trefoil(words) {
  const command = [process.execPath, join(root, 'dist/cli/main.js'), ...words, '--threads', values.threads];
  // The shell's `times` prints the processor time of its children, which Node does not report.
  child = spawn('sh', ['-c', '"$@"; code=$?; times >&2; exit $code', 'sh', ...command], { detached: true });
  const [out, err] = [[], []];
  child.stdout.on('data', (data) => out.push(data));
  child.stderr.on('data', (data) => err.push(data));
  return new Promise((resolve, reject) =>
    child.on('close', (code) => {
      const errors = Buffer.concat(err).toString();
      if (code !== 0) return reject(new Error(`exit code ${code}: ${errors.slice(-600)}`));
      const last = errors.trim().split('\n').at(-1);
      const cpuSeconds = [...last.matchAll(/(\d+)m([\d.]+)s/g)].reduce(
        (sum, [, m, s]) => sum + 60 * Number(m) + Number(s),
        0,
      );
      const text = Buffer.concat(out).toString();
      resolve({ cpuSeconds, json: words.includes('--json') ? JSON.parse(text) : null });
    }),
  );
}
