// Writes docs/benchmarks.md and the table of figures in README.md from the files in bench/results.
//
//   node bench/page.mjs [--check]     with --check only says whether the pages are current
//
// Every measured figure, in tables and in sentences, is read from a results file.
import { readFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { count, deviation, mean, median, table, withFigures, wrap, writeOrCheck } from './markdown.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const [training, attention, decoding, serving, cpu, quality] = [
  ...['training-h200', 'attention-h200', 'decoding-h200', 'serving-h200', 'cpu', 'quality-h200'],
].map((name) => JSON.parse(readFileSync(join(root, 'bench', 'results', `${name}.json`), 'utf8')));

const PASSES = ['forward', 'backward'];
const ms = (value) => (value < 1 ? value.toFixed(3) : value < 100 ? value.toPrecision(3) : count(value));
const pair = ([forward, backward]) => `${ms(forward)} / ${ms(backward)}`;
const gib = (mebibytes) => (mebibytes / 1024).toFixed(1);
const sum = (values) => values.reduce((total, value) => total + value, 0);

writeOrCheck(
  [
    [join(root, 'docs', 'benchmarks.md'), page()],
    [join(root, 'README.md'), withFigures(join(root, 'README.md'), { current: readmeTable() })],
  ],
  process.argv[2] === '--check',
);

/** The run of a results file with this name. */
function runOf({ runs }, name) {
  const found = runs.find((run) => run.name === name);
  if (!found) throw new Error(`no run is named ${name}: there are ${runs.map((run) => run.name).join('; ')}`);
  return found;
}

/** The row whose columns have these values; undefined if there is none. */
function findRow({ rows }, wanted) {
  return rows.find((row) => Object.entries(wanted).every(([key, value]) => row[key] === value));
}

function rowOf(run, wanted) {
  const found = findRow(run, wanted);
  if (!found) throw new Error(`${run.name}: no row has ${JSON.stringify(wanted)}`);
  return found;
}

function page() {
  const parts = [trainingPart(), attentionPart(), decodingPart(), servingPart(), cpuPart(), qualityPart()];
  const sections = [
    '<!-- Written by `node bench/page.mjs` from bench/results. -->',
    '# Benchmarks',
    wrap(
      `Compare figures of one run: machines of one kind differ by up to ${training.spread_percent} %. Other measurements: the [log](../dev/log/2026-11-measurements.md).`,
    ),
    machines(),
    wrap(`The 125M shape: ${training.model.shape}, ${count(training.model.params)} parameters. Inputs are random, the
      worst case for block selection. \`fp8.yaml\` sets
      \`data.tokenizer: gpt2\`, \`runtime.precision: bf16\` and \`runtime.fp8: true\`.`),
    ...parts.flatMap(({ title, setting, figures, meaning, slower, runs }) => [
      `## ${title}`,
      wrap(setting),
      figures,
      wrap(meaning),
      wrap(slower),
      commands(runs),
    ]),
    definitions(),
  ];
  return `${sections.join('\n\n')}\n`;
}

function machines() {
  const [xeon, epyc] = ['training', 'small GPT beside peers'].map((name) => runOf(cpu, name));
  return table(
    ['machine', '', 'peak'],
    [
      ['H200', training.machine, `${count(training.peak_gflops / 1000)} TFLOP/s in bf16`],
      ['Xeon', xeon.machine, `${count(xeon.peak_gflops)} GFLOP/s in fp32`],
      ['EPYC', epyc.machine, ''],
    ],
  );
}

/** The commands of a table; those of one build and date stand together. */
function commands(runs) {
  const groups = new Map();
  for (const { command, build, date } of runs) {
    const key = `# ${build}, ${date}`;
    groups.set(key, [...(groups.get(key) ?? []), command]);
  }
  return ['```', ...[...groups].flatMap(([key, lines]) => [key, ...lines]), '```'].join('\n');
}

/** Training of one length by PyTorch and by NSA in the same run; null if that was not measured. */
function besidePyTorch(S) {
  const run = training.runs.find((one) => findRow(one, { name: 'PyTorch, dense', S }));
  if (!run) return null;
  const [ours, theirs] = ['Trefoil, NSA', 'PyTorch, dense'].map((name) => rowOf(run, { name, S }).tokens_per_s);
  return { theirs, ratio: (ours / theirs).toFixed(2), torch: run.torch };
}

function trainingPart() {
  const precisions = ['bf16', 'fp8'];
  const rows = ['', '262,144 tokens, ', '1,048,576 tokens, '].flatMap((length) => {
    const [bf16, fp8] = precisions.map((precision) => runOf(training, `${length}${precision}`));
    return bf16.rows.map((half) => {
      const { S } = half;
      const eighth = rowOf(fp8, { S });
      const beside = besidePyTorch(S);
      return [
        ...[count(S), count(half.tokens_per_s), count(eighth.tokens_per_s)],
        gib(eighth.peak_mem_mib),
        ...(beside ? [count(beside.theirs), beside.ratio] : ['', '']),
      ];
    });
  });
  const earlier = runOf(training, 'beside PyTorch');
  const measured = runOf(training, 'bf16').rows;
  const [short, long] = [measured[0], measured.at(-1)];
  const over = (name) => {
    const [own, other] = ['Trefoil, NSA', name].map((one) => rowOf(earlier, { name: one, S: short.S }).tokens_per_s);
    return (other / own).toFixed(2);
  };
  return {
    title: 'Training',
    setting: `H200, 125M shape, ${count(training.model.tokens_per_step)} tokens per step or one sequence, tokens/s; the
      longest has gradient checkpointing. PyTorch ${besidePyTorch(short.S).torch} is compiled, with dense attention; the
      last column is NSA in bf16 beside it, in one run.`,
    figures: table(['S', 'bf16', 'FP8', 'GiB in FP8', 'PyTorch', 'NSA / PyTorch'], rows),
    meaning: `A token of a sequence of ${count(long.S)} costs ${(short.tokens_per_s / long.tokens_per_s).toFixed(2)} times as much
      as one of ${count(short.S)}.`,
    slower: `Slower when sequences are short: at ${count(short.S)} tokens PyTorch was ${over('PyTorch, dense')} times and
      Trefoil's own dense model ${over('Trefoil, dense')} times as fast as NSA.`,
    runs: training.runs,
  };
}

/** Milliseconds forward and backward of an attention of Trefoil. */
function attentionTimes(what, S) {
  return PASSES.map((pass) => rowOf(runOf(attention, 'Trefoil'), { what, pass, S }).ms);
}

/** The same of PyTorch; null where it was not measured. */
function peerTimes(peer, S) {
  const found = findRow(runOf(attention, 'PyTorch'), { peer, S });
  return found ? [found.forward_ms, found.backward_ms] : null;
}

function attentionPart() {
  const lengths = [
    ...new Set(
      runOf(attention, 'Trefoil')
        .rows.filter(({ what }) => what === 'nsa')
        .map(({ S }) => S),
    ),
  ];
  const row = (name, timesOf) => [name, ...lengths.map((S) => (timesOf(S) ? pair(timesOf(S)) : ''))];
  const [short, long] = [lengths[0], lengths.at(-1)];
  const ratios = PASSES.map((_, pass) =>
    (peerTimes('cudnn', long)[pass] / attentionTimes('nsa', long)[pass]).toFixed(1),
  );
  const { heads, groups, dim, tokens } = attention.setting;
  return {
    title: 'Attention',
    setting: `H200, the core alone: ${heads} heads in ${groups} groups of size ${dim}, ${count(tokens)} tokens in all, bf16;
      milliseconds forward / backward by sequence length. PyTorch ${runOf(attention, 'PyTorch').torch} ran on the same machine.`,
    figures: table(
      ['', ...lengths.map(count)],
      [
        row('Trefoil NSA', (S) => attentionTimes('nsa', S)),
        row('Trefoil dense', (S) => attentionTimes('dense', S)),
        row('dense, cuDNN', (S) => peerTimes('cudnn', S)),
        row('dense, FlashAttention-2 (SDPA)', (S) => peerTimes('flash', S)),
      ],
    ),
    meaning: `At ${count(long)} tokens NSA is ${ratios.join(' and ')} times as fast as cuDNN, forward and backward.`,
    slower: `Slower when sequences are short: at ${count(short)} tokens dense attention takes
      ${pair(attentionTimes('dense', short))} ms.`,
    runs: attention.runs,
  };
}

function decodingPart() {
  const [bench, million, layer] = ['bench decode', 'a million tokens', 'attention of one layer'].map((name) =>
    runOf(decoding, name),
  );
  const benchRow = ({ S, batch, ms_total, ms_dense, tokens_per_s, reads_measured }) => [
    count(S),
    batch,
    ms(ms_total),
    ms(ms_dense),
    count(tokens_per_s),
    count(reads_measured),
  ];
  const stepRow = ({ S, batch, ms: total, tokens_per_s }) => [count(S), batch, ms(total), '', count(tokens_per_s), ''];
  const [short] = bench.rows;
  const lengths = bench.rows.map(({ S }) => S);
  const ends = [Math.min(...lengths), Math.max(...lengths)];
  const own = rowOf(layer, { name: 'Trefoil, NSA' });
  const theirs = layer.rows.filter(({ name }) => name.startsWith('PyTorch')).toSorted((a, b) => a.ms - b.ms)[0];
  return {
    title: 'Decoding',
    setting: 'H200, 125M shape in bf16. A step is one graph and gives one token to each sequence of the batch.',
    figures: table(
      ['S', 'batch', 'NSA ms', 'dense ms', 'NSA tokens/s', 'keys read'],
      [...bench.rows.filter(({ S }) => ends.includes(S)).map(benchRow), ...million.rows.map(stepRow)],
    ),
    meaning: `Attention of one layer takes ${ms(own.ms)} ms for ${own.batch}
      sequences of ${count(own.S)} tokens, and ${ms(theirs.ms)} as PyTorch ${layer.torch} does it best (${theirs.name}).`,
    slower: `Slower when the context is short: at ${count(short.S)} tokens one sequence takes ${ms(short.ms_total)} ms, and
      ${ms(short.ms_dense)} with dense attention.`,
    runs: decoding.runs,
  };
}

function servingPart() {
  const [server, alone, first, prefix] = [...['server', 'without a server', 'first byte', 'prefix cache']].map((name) =>
    runOf(serving, name),
  );
  const rows = alone.rows.map(({ batch, tokens_per_s }) => {
    const own = server.rows.filter(({ streams }) => streams === batch);
    const middle = (read) => median(own.map(read));
    const speed = middle((row) => row.decode_tokens_per_s);
    return [
      ...[batch, count(speed), count(tokens_per_s), (speed / tokens_per_s).toFixed(2)],
      ...[ms(middle(({ ttft_ms }) => ttft_ms.p50)), ms(middle(({ itl_ms }) => itl_ms.p99))],
    ];
  });
  const ttft = (row) => ms(rowOf(prefix, { row }).ttft_ms);
  const crowd = first.rows.at(-1);
  const worst = Math.max(...crowd.first_byte_ms.map(({ p99 }) => p99));
  return {
    title: 'Serving',
    setting: `H200, ${serving.model}; requests of ${count(serving.context_tokens)} tokens that share their beginning,
      answers of ${serving.answer_tokens}, medians. TTFT: time to the first token; ITL: between tokens.`,
    figures: table(['streams', 'tokens/s', '`bench decode`', 'ratio', 'TTFT p50, ms', 'ITL p99, ms'], rows),
    meaning: `\`bench decode\` of that build waited for every token. A repeated prompt of
      ${count(prefix.tokens)} tokens has its first token after ${ttft('memory')} ms from memory and ${ttft('disk')} from
      files, instead of ${ttft('cold')}.`,
    slower: `Slower when many long prompts arrive at once: the first byte of ${crowd.requests} requests of
      ${count(crowd.prompt_tokens)} tokens takes up to ${ms(worst)} ms (p99).`,
    runs: serving.runs,
  };
}

function cpuPart() {
  const [small, large, own, core, decoded] = [
    ...['small GPT beside peers', '125M shape beside peers', 'training', 'attention', 'beside llama.cpp'],
  ].map((name) => runOf(cpu, name));
  const row = (title, run, ...names) => [
    title,
    ...names.map((name) => findRow(run, { name })).map((found) => (found ? count(found.tokens_per_s) : '')),
  ];
  const peers = ['PyTorch, eager', 'PyTorch, compiled', 'jax-js, wasm'];
  const total = (what, S) => sum(PASSES.map((pass) => rowOf(core, { what, pass, S }).ms));
  const ratio = (S) => (total('dense', S) / total('nsa', S)).toFixed(2);
  const lengths = [...new Set(core.rows.filter(({ what }) => what === 'nsa').map(({ S }) => S))];
  const [near, middle, far] = [lengths[0], lengths[2], lengths.at(-1)];
  const types = [...new Set(decoded.rows.map(({ ours }) => ours))];
  const beside = (task, ours) => {
    const { trefoil, llama, spread } = rowOf(decoded, { task, ours });
    return [ms(trefoil), ms(llama), spread.map((value) => value.toFixed(2)).join('–')];
  };
  return {
    title: 'CPU',
    setting: 'Training in fp32 on two threads, tokens/s.',
    figures: [
      table(
        ['', 'Trefoil', 'PyTorch eager', 'PyTorch compiled', 'jax-js'],
        [
          row(`small GPT (${small.shape}), EPYC`, small, 'Trefoil, dense', ...peers),
          row(`125M shape, dense (${large.shape}), Xeon`, large, 'Trefoil, dense', ...peers),
        ],
      ),
      'Llama of 135M, one EPYC thread, tokens per processor second:',
      table(
        ['', 'decode', 'llama.cpp', 'ratio', 'prompt', 'llama.cpp', 'ratio'],
        types.map((type) => [type, ...beside('decode', type), ...beside('prompt', type)]),
      ),
    ].join('\n\n'),
    meaning: `A 125M step reaches ${Math.round(100 * rowOf(own, { attention: 'nsa' }).mfu)} % of peak.`,
    slower: `Slower when sequences are short: dense attention takes
      ${ratio(near)} times as long as NSA at ${count(near)} tokens, ${ratio(middle)} at ${count(middle)} and ${ratio(far)} at ${count(far)}.`,
    runs: [small, large, own, core, decoded],
  };
}

function qualityPart() {
  const last = ({ val_loss, validation }) => (val_loss ?? validation).at(-1)[1];
  /** Means of two groups of runs over the same seeds, and of their difference. */
  const row = (title, name, isFirst, isSecond) => {
    const { setting, rows } = runOf(quality, name);
    const [first, second] = [isFirst, isSecond].map((isOf) => rows.filter(isOf));
    const differences = first.map((one) => last(one) - last(second.find(({ seed }) => seed === one.seed)));
    const [left, right] = [first, second].map((group) => mean(group.map(last)).toFixed(3));
    const difference = `${mean(differences) < 0 ? '' : '+'}${mean(differences).toFixed(3)}`;
    return [title, setting, left, right, `${difference} ± ${deviation(differences).toFixed(3)}`];
  };
  const of = (key, value) => (run) => run[key] === value;
  const sameSteps = (kind) => (run) => run.attention === kind && run.steps === 200;
  const bf16 = runOf(quality, 'FP8 and bf16').rows.filter(of('name', 'bf16'));
  const again = rowOf(runOf(quality, 'FP8 and bf16'), { name: 'bf16, again' });
  const { step_ms: step } = runOf(quality, 'Muon and AdamW');
  const ends = bf16.map(last);
  const longer = 100 * (mean(step.muon) / mean(step.adamw) - 1);
  return {
    title: 'Quality',
    setting: `H200. Validation loss in nats per token, mean of three seeds; the difference with its deviation between
      seeds.`,
    figures: table(
      ['first, second', 'setting', 'first', 'second', 'difference'],
      [
        row('NSA, dense', 'NSA and dense, 32,768 tokens', sameSteps('nsa'), sameSteps('dense')),
        row('FP8, bf16', 'FP8 and bf16', of('name', 'FP8'), of('name', 'bf16')),
        row('Muon, AdamW', 'Muon and AdamW', of('optimizer', 'muon'), of('optimizer', 'adamw')),
      ],
    ),
    meaning: `Per step NSA learns at least as fast as dense attention, FP8 is within the spread of seeds, Muon is ahead.`,
    slower: `Slower when Muon updates, by ${longer.toFixed(1)} % of a step. Long trainings were not compared; seeds of bf16 spread over ${(Math.max(...ends) - Math.min(...ends)).toFixed(3)}, and seed ${again.seed} repeated differed by
      ${Math.abs(last(again) - last(bf16.find(of('seed', again.seed)))).toFixed(3)}.`,
    runs: quality.runs,
  };
}

function definitions() {
  return [
    '## Definitions',
    wrap(`**MFU**: the FLOPs the maths requires, over those of the peak in the same time: six per token and parameter of a
      matrix product, \`6 (d_k + d_v)\` per visible (query, key) pair and head, nothing for recomputation. The peak is what \`bench\` measures.`),
  ].join('\n\n');
}

/** The table of figures in the README, from the same results. */
function readmeTable() {
  const [bf16, fp8] = ['bf16', 'fp8'].map((name) => runOf(training, name));
  const lengths = bf16.rows.map(({ S }) => S);
  const rounded = (value) => count(Number(value.toPrecision(3)));
  const speeds = (run) => lengths.map((S) => rounded(rowOf(run, { S }).tokens_per_s));
  const decoded = (read) =>
    lengths.map((S) => findRow(runOf(decoding, 'bench decode'), { S, batch: 32 })).map((row) => (row ? read(row) : ''));
  const times = (timesOf) => lengths.map((S) => (timesOf(S) ? pair(timesOf(S)) : ''));
  return table(
    ['context', ...lengths.map(count)],
    [
      ['training, tokens/s', ...speeds(bf16)],
      ['… with FP8 products', ...speeds(fp8)],
      [
        '… against dense PyTorch, compiled, in one run',
        ...lengths.map((S) => (besidePyTorch(S) ? `${besidePyTorch(S).ratio} times` : '')),
      ],
      ['attention forward / backward, ms', ...times((S) => attentionTimes('nsa', S))],
      ['… dense, cuDNN', ...times((S) => peerTimes('cudnn', S))],
      ['… dense, FlashAttention-2', ...times((S) => peerTimes('flash', S))],
      ['decoding 32 sequences, tokens/s', ...decoded(({ tokens_per_s }) => rounded(tokens_per_s))],
      ['… the same with dense attention', ...decoded(({ batch, ms_dense }) => rounded((1000 * batch) / ms_dense))],
    ],
  );
}
