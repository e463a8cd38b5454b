// Retrieval in real code: a short fine-tune of a code model, then how often it finds a value, by length and depth.
//
//   node retrieval.mjs --model RUN --train tokens/train --val tokens/val --out DIR
//     [--stages 512:20%@8192,…,65536:100%] [--seconds 560] [--advance 0.95] [--end-at 2] [--lr 1e-3] [--optimizer muon|adamw]
//     [--muon-lr-ratio 2] [--search 0.5] [--search-from 1] [--full-search 0.25]
//     [--lengths 4096,16384,32768,65536] [--depths 11] [--trials 20] [--without sel] [--until SECONDS] [--seed 1]
//
// The task is in retrieval-task.mjs. Fine-tuning: weights of RUN, a fresh optimizer, stages of
// LENGTH[+LENGTH…]:LIMIT[@TOKENS], each length with an equal share of the TOKENS of a step (65536). LIMIT is a number of steps,
// or with % a share of --seconds. A stage ends at its limit, or when a check finds the share --advance of the values, and
// enough of them by search alone; the last one has all that is left, and ends the fine-tune when it finds the share --end-at.
// The share --search of the steps from stage --search-from on, counted from 0, are search steps: only the compressed branch
// can find what they ask for, so that it learns to (docs/guide/long-context.md). In the last stage this holds in the share
// --full-search of them; in the others each layer is as in a search step or as always, by chance. --stages none evaluates RUN as it is.
// Evaluation: code of the projects that no training has seen; an answer counts if greedy decoding writes all its digits. While
// the program is younger than --until seconds, more cases follow, --trials per depth and length in a round.
// Writes DIR/model.safetensors, before the last stage and behind it, and DIR/retrieval.json after every length.
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { loadModel, openDevice, parseConfig } from 'trefoil';
import { Sequences, Tape, Trainer, writeFinalModel } from 'trefoil/nn';
import { openCode, startBatches } from './retrieval-batches.mjs';
import { RetrievalTask, random } from './retrieval-task.mjs';

const STAGES = '512:20%@8192,128+256+512+1024:30%@16384,1024+4096:12%@32768,4096+16384:12%,65536:100%';
const { values } = parseArgs({
  options: {
    model: { type: 'string' },
    train: { type: 'string' },
    val: { type: 'string' },
    out: { type: 'string' },
    stages: { type: 'string', default: STAGES },
    lr: { type: 'string', default: '1e-3' },
    seconds: { type: 'string', default: '560' },
    advance: { type: 'string', default: '0.95' },
    'end-at': { type: 'string', default: '2' },
    optimizer: { type: 'string', default: 'muon' },
    'muon-lr-ratio': { type: 'string', default: '2' },
    search: { type: 'string', default: '0.5' },
    'search-from': { type: 'string', default: '1' },
    'full-search': { type: 'string', default: '0.25' },
    lengths: { type: 'string', default: '4096,16384,32768,65536' },
    depths: { type: 'string', default: '11' },
    trials: { type: 'string', default: '20' },
    without: { type: 'string', default: 'sel' },
    seed: { type: 'string', default: '1' },
    until: { type: 'string', default: '0' },
    device: { type: 'string', default: 'auto' },
  },
});
for (const name of ['model', 'train', 'val', 'out'])
  if (values[name] === undefined) throw new Error(`--${name} is missing`);

const BRANCHES = ['cmp', 'sel', 'win'];
/**
 * Share of the ordinary tokens that count for the loss, so that the model still writes code: before the last stage, and in it,
 * where nearly all answers are right and their gradient would be small beside that of the text.
 */
const TEXT_SHARE = { first: 0.02, last: 0.002 };
/** Questions at the end of a key-value case, most assignments in it, and tokens per assignment. */
const ASKED = 32;
const MAX_ASSIGNMENTS = 256;
const TOKENS_PER_ASSIGNMENT = 128;
/** Key-value cases per passkey case: many of them share a pass. */
const KEY_VALUE_CASES = 4;
/** Steps between checks of what was learned, of up to 32768 tokens, of more, and in the last stage, and cases of a check. */
const CHECK_EVERY = { short: 50, long: 25, last: 100 };
const CHECK_CASES = 128;
/** Share of values to be found by search alone before the next stage. */
const SEARCHED = 0.6;
/** Share of the layers, the first ones, whose window stays on in a search step. */
const LOCAL_LAYERS = 1 / 6;
/** The validation code that `textLoss` predicts: samples of `length` tokens, and one in `every` of them. */
const TEXT = { samples: 32, length: 2048, every: 32 };
/** Share of the trials for the evaluation without a branch. */
const TRIALS_WITHOUT = 1 / 4;
const WARMUP_STEPS = 20;
/** Share of the fine-tune in which the learning rate decays. */
const DECAY_SHARE = 0.75;

const seed = number('seed');
const device = openDevice(values.device);
const {
  model,
  tokenizer,
  config: loaded,
  step: pretrained,
} = loadModel(device, values.model, undefined, {
  trainable: true,
});
const task = new RetrievalTask(tokenizer);
mkdirSync(values.out, { recursive: true });
const stages = values.stages === 'none' ? [] : values.stages.split(',').map(stageOf);
const seconds = { fineTune: 0, evaluation: 0 };
/** Sequences of `check` by length. */
const checks = new Map();
const curve = [];
/** Mean loss of ordinary code of the validation projects. */
const textLosses = { before: await textLoss(), after: null };
/** Counts of the evaluation by task, length, depth and switched-off branch, and its answers that are wrong. */
const cells = new Map();
const misses = [];
if (stages.length > 0) await fineTune();
await evaluateAll();
console.log(`\nwrote ${join(values.out, 'retrieval.json')}; evaluated in ${seconds.evaluation.toFixed(0)} s`);

function writeResult() {
  const result = {
    model: values.model,
    pretraining_steps: pretrained,
    device: device.name,
    stages: values.stages,
    lr: number('lr'),
    optimizer: values.optimizer,
    muon_lr_ratio: number('muon-lr-ratio'),
    search: number('search'),
    full_search: number('full-search'),
    text_share: TEXT_SHARE,
    text_loss: textLosses,
    decay_share: DECAY_SHARE,
    seed,
    trials: number('trials'),
    seconds,
    curve,
    rows: rows(),
    misses,
  };
  writeFileSync(join(values.out, 'retrieval.json'), `${JSON.stringify(result, null, 1)}\n`);
}

function number(name) {
  const value = Number(values[name]);
  if (!(value >= 0)) throw new Error(`--${name}: ${values[name]} is not a number`);
  return value;
}

function stageOf(text) {
  const [, lengths, limit, percent, tokens = '65536'] = /^([\d+]+):(\d+)(%?)(?:@(\d+))?$/.exec(text) ?? [];
  const stage = {
    lengths: (lengths ?? '').split('+').map(Number),
    steps: percent === '' ? Number(limit) : Number.POSITIVE_INFINITY,
    seconds: percent === '%' ? (Number(limit) / 100) * number('seconds') : Number.POSITIVE_INFINITY,
    tokens: Number(tokens),
  };
  const share = stage.tokens / stage.lengths.length;
  if (!(Number(limit) > 0) || !stage.lengths.every((length) => Number.isInteger(share / length)))
    throw new Error(
      `--stages ${text}: want LENGTH[+LENGTH…]:STEPS[@TOKENS] or …:SHARE%[@TOKENS], each length a divisor of its share of TOKENS`,
    );
  return stage;
}

async function fineTune() {
  const started = performance.now();
  const steps = stages.reduce((sum, stage) => sum + stage.steps, 0);
  const { model: modelKeys, nsa, data, runtime } = loaded;
  const config = parseConfig({
    ...{ model: modelKeys, nsa, data: { ...data, source: 'synthetic', path: null, val_path: null } },
    runtime: { ...runtime, precision: model.dtype === 'bf16' ? 'bf16' : 'fp32' },
    train: { optimizer: values.optimizer, muon_lr_ratio: number('muon-lr-ratio'), weight_decay: 0.01 },
  });
  const searchFrom = number('search-from');
  const source = startBatches({
    ...{ path: values.train, tokenizer: loaded.data.tokenizer, stages, steps },
    ...{ textShare: TEXT_SHARE, repeatedUntil: searchFrom, seed },
  });
  const elapsed = () => (performance.now() - started) / 1000;
  // Constant, then a linear decay at the end of the steps or of the time, whichever comes first.
  const schedule = (step) => {
    const left = 1 - Math.max((step - 1) / steps, elapsed() / number('seconds'));
    return number('lr') * Math.min(1, step / WARMUP_STEPS, Math.max(0.02, left / DECAY_SHARE));
  };
  const trainer = new Trainer({ model, data: source.batches, config, steps, schedule });
  let stage = 0;
  let stageStart = { step: 0, seconds: 0 };
  const searchesUpTo = (step) => Math.floor(step * number('search'));
  const isSearch = (step) => stage >= searchFrom && searchesUpTo(step) > searchesUpTo(step - 1);
  const draw = random(seed + 2);
  // The branches that a search step switches off. In the last stage some have layers of both kinds: the compressed
  // branch is to find a block beside branches that read, too, as it has to in the evaluation.
  const offIn = () => {
    if (stage === 0 || stage + 1 < stages.length || draw() < number('full-search')) return isOffInSearch;
    const searches = Array.from({ length: model.shape.nLayers }, () => draw() < 0.5);
    return (branch, layer) => searches[layer] && isOffInSearch(branch, layer);
  };
  let switchOn = isSearch(1) ? switchOff(offIn()) : undefined;
  const losses = [];
  for await (const { step, loss, tokensPerSecond } of trainer) {
    losses.push(loss);
    switchOn = switchOn?.();
    let isLast = step === steps || elapsed() > number('seconds');
    if (step % checkEvery(stage) === 0 || isLast) {
      const length = Math.max(...stages[stage].lengths);
      const { found, selected } = await check(length);
      const searched = stage >= searchFrom ? await searchCheck(length) : null;
      const mean = losses.reduce((sum, one) => sum + one, 0) / losses.length;
      losses.length = 0;
      const rounded = (value) => (value === null ? null : Number(value.toFixed(3)));
      const line = { step, seconds: Number(elapsed().toFixed(1)), length, loss: rounded(mean) };
      curve.push({ ...line, found: rounded(found), searched: rounded(searched), selected });
      const percent = (share) => `${(100 * share).toFixed(0)} %`;
      console.log(
        `step ${step} length ${length} loss ${mean.toFixed(4)} found ${percent(found)}${searched === null ? '' : `, by search ${percent(searched)}`}, ` +
          `selected ${selected.join(' ')} | ${Math.round(tokensPerSecond)} tokens/s, ${elapsed().toFixed(0)} s`,
      );
      isLast ||= stage + 1 === stages.length && found >= number('end-at');
      const isFound = found >= number('advance') && (searched ?? 1) >= SEARCHED;
      const { steps: mostSteps, seconds: mostSeconds } = stages[stage];
      const isOver = step - stageStart.step >= mostSteps || elapsed() - stageStart.seconds >= mostSeconds;
      if (!isLast && stage + 1 < stages.length && (isFound || isOver)) {
        stage++;
        stageStart = { step, seconds: elapsed() };
        source.advance();
        if (stage + 1 === stages.length) writeFinalModel(values.out, model, config, { step: pretrained + step });
      }
    }
    if (isLast) break;
    if (isSearch(step + 1)) switchOn = switchOff(offIn());
  }
  await source.close();
  trainer.free();
  const trained = curve.at(-1).step;
  writeFinalModel(values.out, model, config, { step: pretrained + trained });
  seconds.fineTune = elapsed();
  textLosses.after = await textLoss();
  writeResult();
  const [before, after] = [textLosses.before, textLosses.after].map((loss) => loss.toFixed(3));
  console.log(
    `fine-tuned ${trained} steps in ${seconds.fineTune.toFixed(0)} s; loss of ordinary code ${before} before, ${after} after`,
  );
}

function checkEvery(stage) {
  if (stage > 0 && stage + 1 === stages.length) return CHECK_EVERY.last;
  return stages[stage].tokens > 32768 ? CHECK_EVERY.long : CHECK_EVERY.short;
}

/** Share of values found in other training code of this length, which decides when the next stage begins; by layer, the percentage of blocks selected. */
async function check(length) {
  if (!checks.has(length)) checks.set(length, await checkSequences(length));
  const cell = { cases: 0, correct: 0, selected: 0, layers: new Array(model.shape.nLayers).fill(0) };
  answerAll(checks.get(length).map(({ tokens, cases }) => ({ tokens, cases: cases.map((one) => ({ ...one, cell })) })));
  return {
    found: cell.correct / cell.cases,
    selected: cell.layers.map((count) => Math.round((100 * count) / cell.cases)),
  };
}

async function checkSequences(length) {
  const draw = random(seed + 1);
  const loader = await openCode(values.train, loaded.data.tokenizer, length, seed + 1);
  const sequences = [];
  // As many as in training, more than in the evaluation: with few of them any value is a good guess.
  const count = Math.min(MAX_ASSIGNMENTS, task.mostPairs(length));
  const asked = Math.min(ASKED, count);
  while (sequences.length * asked < CHECK_CASES)
    sequences.push(task.keyValue(loader.next().inputs, length, count, asked, draw));
  loader.close();
  return sequences;
}

/** Share of values found as in a search step. */
async function searchCheck(length) {
  const switchOn = switchOff(isOffInSearch);
  const { found } = await check(length);
  switchOn();
  return found;
}

function assignmentsIn(length) {
  return Math.min(MAX_ASSIGNMENTS, Math.floor(length / TOKENS_PER_ASSIGNMENT));
}

/** Sets the gates of the branches for which `isOff(branch, layer)` to 0; returns the function that restores them. */
function switchOff(isOff) {
  const biases = model.parameters.filter(({ name }) => name.endsWith('.gate.bias'));
  const before = biases.map(({ value }) => Float32Array.from(value.read()));
  const set = (valueAt) => {
    for (const [layer, parameter] of biases.entries()) {
      const now = Float32Array.from(parameter.value.read());
      const column = (at) => BRANCHES[at % BRANCHES.length];
      parameter.value.write(now.map((bias, at) => (isOff(column(at), layer) ? valueAt(layer, at) : bias)));
      parameter.changed();
    }
  };
  set(() => -1e30);
  return () => set((layer, at) => before[layer][at]);
}

/**
 * Whether a branch is off in a search step. Off are the selected branch, and in the layers behind the first ones the
 * window too. The first layers tell a token what stands before it, the others can find it by the compressed branch
 * alone, at any distance.
 */
function isOffInSearch(branch, layer) {
  return branch === 'sel' || (branch === 'win' && layer >= model.shape.nLayers * LOCAL_LAYERS);
}

/** One round with all lengths, with and without branches; then more rounds with other cases while --until allows. */
async function evaluateAll() {
  const started = performance.now();
  const lengths = values.lengths.split(',').map(Number);
  const spent = new Map();
  const evaluate = async (length, without, trials, round) => {
    const begun = performance.now();
    await evaluateLength(length, without, trials, round);
    spent.set(length, (performance.now() - begun) / 1000);
    seconds.evaluation = (performance.now() - started) / 1000;
    writeResult();
  };
  const trials = number('trials');
  for (const length of lengths) await evaluate(length, null, trials, 0);
  const costs = new Map(spent);
  for (const without of values.without === '' ? [] : values.without.split(',')) {
    const switchOn = switchOff((branch) => branch === without);
    for (const length of lengths) await evaluate(length, without, Math.ceil(trials * TRIALS_WITHOUT), 0);
    switchOn();
  }
  const left = () => number('until') - performance.now() / 1000;
  for (let round = 1; lengths.some((length) => costs.get(length) < left()); round++)
    for (const length of lengths) if (costs.get(length) < left()) await evaluate(length, null, trials, round);
}

/** Adds to the rows of this length. The code and the values depend on seed, round, length and number of trials alone. */
async function evaluateLength(length, without, trials, round) {
  const draw = random(seed + length + round);
  const loader = await openCode(values.val, loaded.data.tokenizer, length, seed + round);
  const depths = number('depths');
  const cellOf = (name, i) => {
    const depth = depths === 1 ? 0 : Number((i / (depths - 1)).toFixed(3));
    const key = `${name} ${length} ${depth} ${without}`;
    if (!cells.has(key)) cells.set(key, { task: name, length, depth, without, cases: 0, correct: 0, selected: 0 });
    return cells.get(key);
  };
  const sequences = [];
  const take = () => loader.next().inputs;
  for (let i = 0; i < depths; i++)
    for (let trial = 0; trial < trials; trial++) {
      const cell = cellOf('passkey', i);
      const { tokens, cases } = task.passkey(take(), length, depths === 1 ? 0 : i / (depths - 1), draw);
      sequences.push({ tokens, cases: cases.map((one) => ({ ...one, cell })) });
    }
  const count = assignmentsIn(length);
  const asked = Math.min(ASKED, count);
  for (let trial = 0; trial < Math.ceil((KEY_VALUE_CASES * depths * trials) / asked); trial++) {
    const { tokens, cases } = task.keyValue(take(), length, count, asked, draw);
    const cellAt = (depth) => cellOf('key-value', Math.round(depth * (depths - 1)));
    sequences.push({ tokens, cases: cases.map((one) => ({ ...one, cell: cellAt(one.depth) })) });
  }
  loader.close();
  answerAll(sequences);
  for (const [sequence, { tokens, cases }] of (without === null ? sequences : []).entries())
    for (const { cell, at, length: size, factAt, isSelected, isRight, answered } of cases)
      if (!isRight)
        misses.push({
          ...{ task: cell.task, length, round, sequence, at: factAt, is_selected: isSelected },
          ...{ value: tokenizer.decode(tokens.slice(at, at + size)), answered: tokenizer.decode(answered) },
        });
  for (const name of ['passkey', 'key-value']) console.log(summary(name, length, without));
}

/** A row for each cell. */
function rows() {
  return [...cells.values()].map(({ selected, ...cell }) => ({
    ...cell,
    accuracy: cell.correct / cell.cases,
    selected: selected / cell.cases,
  }));
}

/** Answers sequences of one length, as many in a pass as fit. */
function answerAll(sequences) {
  const perPass = Math.max(1, Math.floor((device.kind === 'cuda' ? 2 ** 18 : 2 ** 14) / sequences[0].tokens.length));
  for (let i = 0; i < sequences.length; i += perPass) answer(sequences.slice(i, i + perPass));
}

/**
 * Greedy answers by one pass: an answer is right if each of its tokens has the largest logit behind the true text before it.
 * Adds to a case's `cell`, and says of the case whether its block `isSelected`, what is `answered`, and whether that `isRight`.
 */
function answer(sequences) {
  const tape = new Tape(device, { record: false });
  const lengths = sequences.map(({ tokens }) => tokens.length);
  const layout = tape.hold(new Sequences(device, lengths));
  const packed = new Int32Array(layout.total);
  for (const [i, { tokens }] of sequences.entries()) packed.set(tokens, layout.starts[i]);
  const all = sequences.flatMap(({ cases, tokens }, i) =>
    cases.map((one) => ({ ...one, one, tokens, start: layout.starts[i] })),
  );
  const rows = all.flatMap(({ start, at, length }) => Array.from({ length }, (_, i) => start + at - 1 + i));
  const hasSelected = new Array(all.length).fill(false);
  const observer = {
    selected: (layer, selected) => {
      for (const [i, { start, at, factAt, cell }] of all.entries()) {
        if (hasSelected[i] && cell.layers === undefined) continue;
        const blocks = selected.rows(start + at - 1, start + at).read(); // [1, G, n_sel]
        if (!blocks.includes(Math.floor(factAt / model.shape.nsa.lSel))) continue;
        hasSelected[i] = true;
        if (cell.layers !== undefined) cell.layers[layer]++;
      }
    },
  };
  const options = { lengths: layout, ...(model.shape.attention === 'nsa' && { observer }) };
  const logits = model.logits(tape, tape.from(packed, [packed.length], 'i32'), rows, options).read();
  const { vocabSize } = model.shape;
  let row = 0;
  for (const [i, { one, cell, at, length, tokens }] of all.entries()) {
    one.isSelected = hasSelected[i];
    one.answered = Array.from({ length }, () => indexOfMax(logits, row++ * vocabSize, vocabSize));
    one.isRight = one.answered.every((token, k) => token === tokens[at + k]);
    cell.cases++;
    cell.correct += Number(one.isRight);
    cell.selected += Number(hasSelected[i]);
  }
  tape.end();
}

/** Mean loss of the tokens of `TEXT`, which depend on the seed alone. */
async function textLoss() {
  const loader = await openCode(values.val, loaded.data.tokenizer, TEXT.length, seed);
  const { vocabSize } = model.shape;
  const rows = Array.from({ length: TEXT.length / TEXT.every }, (_, i) => (i + 1) * TEXT.every - 1);
  let sum = 0;
  for (let sample = 0; sample < TEXT.samples; sample++) {
    const { inputs, targets } = loader.next();
    const tape = new Tape(device, { record: false });
    const logits = model.logits(tape, tape.from(inputs, [TEXT.length], 'i32'), rows, { lengths: [TEXT.length] }).read();
    for (const [i, row] of rows.entries()) {
      const these = logits.subarray(i * vocabSize, (i + 1) * vocabSize);
      const most = these[indexOfMax(these, 0, vocabSize)];
      const total = these.reduce((all, logit) => all + Math.exp(logit - most), 0);
      sum += most + Math.log(total) - these[targets[row]];
    }
    tape.end();
  }
  loader.close();
  return sum / (TEXT.samples * rows.length);
}

function indexOfMax(values, from, count) {
  let best = 0;
  for (let i = 1; i < count; i++) if (values[from + i] > values[from + best]) best = i;
  return best;
}

function summary(name, length, without) {
  const these = rows().filter((row) => row.task === name && row.length === length && row.without === without);
  const total = (key) => these.reduce((sum, row) => sum + row[key] * (key === 'correct' ? 1 : row.cases), 0);
  const cases = these.reduce((sum, row) => sum + row.cases, 0);
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const worst = Math.min(...these.map(({ accuracy }) => accuracy));
  return (
    `${name.padEnd(9)} ${String(length).padStart(6)} ${without === null ? 'all branches' : `without ${without}`}: ` +
    `${percent(total('correct') / cases)} of ${cases}, worst depth ${percent(worst)}, block selected ${percent(total('selected') / cases)}`
  );
}
