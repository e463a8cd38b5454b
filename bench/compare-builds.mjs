// Compares two builds of this package on one machine, in turns: is the new one slower anywhere?
//
//   node bench/compare-builds.mjs OLD_DIST NEW_DIST [--device cpu|cuda] [--only training|attention|decoding|commands]
//                                 [--rounds 5] [--lengths 8192,65536] [--limit 1] [--out FILE.json]
//
// Measures training, attention and (on a GPU) decoding with `trefoil bench` of each build, alternately, and prints the
// medians and their ratio. On a CPU also whole commands, by their processor time, which other programs change little: a
// training of the quickstart, and texts and answers of its model. --lengths, on a GPU: sequence lengths of training and
// attention. Exit code 1 if the new build is slower by more than --limit percent. A build is the folder `dist` that
// `npm run build` writes, with its package.json and configs/ beside it and node_modules there or above it.
// Both builds run once, at the same time, before the first round: kernels are compiled at first use. The file of --out
// is rewritten after every round, so that a run that is stopped keeps what it has measured.
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseArgs, promisify } from 'node:util';
import { median } from './markdown.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    device: { type: 'string', default: 'cpu' },
    only: { type: 'string' },
    rounds: { type: 'string', default: '5' },
    lengths: { type: 'string' },
    limit: { type: 'string', default: '1' },
    out: { type: 'string' },
  },
});
const [rounds, limit] = [Number(values.rounds), Number(values.limit)];
if (positionals.length !== 2) stop('expected two folders: the dist of the old build and the dist of the new one');
if (!['cpu', 'cuda'].includes(values.device)) stop('--device: expected cpu or cuda');
const KINDS = ['training', 'attention', 'decoding', 'commands'];
if (![undefined, ...KINDS].includes(values.only)) stop(`--only: expected ${KINDS.join(', ')}`);
const lengths = values.lengths?.split(',').map(Number);
if (lengths?.some((length) => !(Number.isInteger(length) && length >= 1))) stop('--lengths: expected whole numbers');
if (lengths && values.device === 'cpu') stop('--lengths: only with --device cuda');
if (!(Number.isInteger(rounds) && rounds >= 1)) stop('--rounds: expected a whole number of at least 1');
if (!(limit >= 0)) stop('--limit: expected a percentage of at least 0');
const builds = { before: positionals[0], after: positionals[1] };

// Configs are named by their earlier names, which builds from before the renaming know too; quickstart is the old build's.
/** Training of the small shape on a CPU, of the 125m shape on a GPU; `figures` reads what is compared: more is better. */
const training = (name, words, steps) => ({
  kind: 'training',
  words: ['bench', 'train', '--attention', 'nsa', ...words, '--steps', String(steps)],
  warmUp: ['bench', 'train', '--attention', 'nsa', ...words, '--steps', '1'],
  figures: ([row]) => ({ [`training, ${name}, tokens/s`]: row.tokens_per_s }),
});
/** Whole sparse attention. */
const attention = (length, ...options) => ({
  kind: 'attention',
  words: ['bench', 'attention', '--lengths', String(length), ...options],
  warmUp: ['bench', 'attention', '--lengths', String(length), '--quick'],
  figures: (rows) => {
    const [forward, backward] = ['forward', 'backward'].map(
      (pass) => rows.find((row) => row.what === 'nsa' && row.pass === pass).ms,
    );
    const name = `attention, ${length} tokens, 1/s`;
    return {
      [name]: 1000 / (forward + backward),
      [`${name}, forward`]: 1000 / forward,
      [`${name}, backward`]: 1000 / backward,
    };
  },
});
/** Steps of the 125m shape after 65,536 tokens of context. */
const decoding = (batch) => {
  const words = ['bench', 'decode', '--config', 'm7c_125m_80g', '--lengths', '65536', '--batch-size', String(batch)];
  return {
    kind: 'decoding',
    words: [...words, '--no-dense', '--runs', '60'],
    warmUp: [...words, '--no-dense', '--runs', '1'],
    figures: ([row]) => ({ [`decoding, batch ${batch}, tokens/s`]: row.tokens_per_s }),
  };
};
let processes = 0;
const folder = mkdtempSync(join(tmpdir(), 'trefoil-compare-'));
process.once('exit', () => rmSync(folder, { recursive: true, force: true }));
/** A whole command on one thread. */
const whole = (name, words) => ({
  kind: 'commands',
  words,
  warmUp: words,
  measure: processorSeconds,
  figures: (seconds) => ({ [`${name}, 1/processor second`]: 1 / seconds }),
});
const model = join(folder, '0');
const text = (name, count, ...prompts) =>
  whole(name, [
    ...['generate', '--model', model, '--greedy', '--max-new-tokens', String(count), '--threads', '1'],
    ...prompts.flatMap((prompt) => ['--prompt', prompt]),
  ]);
const commands = () => [
  whole('40 steps of the quickstart', [
    ...['train', '--config', join(builds.before, '..', 'configs', 'quickstart.yaml'), '--steps', '40'],
    ...['--set', 'runtime.threads=1'],
    ...['--set', 'train.eval_every=0'],
    ...['--set', 'train.save_every=0', '--out-dir', join(folder, '{run}')],
  ]),
  text('first token of generate', 1, 'Once'),
  text('800 tokens of one text', 800, 'Once'),
  text('800 tokens of each of eight texts', 800, ...'abcdefgh'),
  whole('64 answers of the server, eight streams', [
    ...['bench', 'serve', '--model', model, '--concurrency', '8', '--output-tokens', '400', '--threads', '1'],
  ]),
];
const all =
  values.device === 'cuda'
    ? [
        ...(lengths ?? [8192]).map((length) =>
          training(`${length} tokens`, ['--seq-len', String(length), '--kernel', 'adaptive'], 20),
        ),
        ...(lengths ?? [65_536]).map((length) => attention(length)),
        ...[1, 32].map(decoding),
      ]
    : [
        training('1024 tokens', ['--config', 'm7c_small_smoke', '--seq-len', '1024', '--batch-size', '1'], 5),
        attention(2048, '--quick'),
        ...commands(),
      ];

const cases = all.filter(({ kind }) => values.only === undefined || kind === values.only);

process.stderr.write('warming up: compiling the kernels of both builds\n');
let machine;
for (const { warmUp, measure = run } of cases) {
  // Both builds at a time: two trainings fit on a GPU, eight do not.
  const [printed] = await Promise.all(Object.keys(builds).map((build) => measure(build, warmUp)));
  machine ??= printed.machine;
}

/** By the name of a figure: what each build reached, round by round. */
const measured = new Map();
for (let round = 0; round < rounds; round++) {
  // The order changes every round, so that a falling clock rate affects both.
  const order = round % 2 === 0 ? ['before', 'after'] : ['after', 'before'];
  for (const { words, figures, measure = run } of cases)
    for (const build of order) {
      const found = Object.entries(figures(await measure(build, words)));
      for (const [name, figure] of found) {
        if (!measured.has(name)) measured.set(name, { before: [], after: [] });
        measured.get(name)[build].push(figure);
      }
      const text = found.map(([name, figure]) => `${name}: ${figure.toPrecision(5)}`).join('; ');
      process.stderr.write(`round ${round + 1} of ${rounds}, ${build}: ${text}\n`);
    }
  if (values.out) writeFileSync(values.out, `${JSON.stringify(result(), null, 2)}\n`);
}

const { rows } = result();
for (const { name, before, after, ratio, spread } of rows) {
  const range = spread.map((x) => x.toFixed(3)).join(' to ');
  console.log(
    `${name}: before ${before.toPrecision(5)}, after ${after.toPrecision(5)}, ratio ${ratio.toFixed(4)} (${range})`,
  );
}
process.exitCode = rows.some(({ ratio }) => ratio < 1 - limit / 100) ? 1 : 0;

function result() {
  const rows = [...measured].map(([name, runs]) => {
    const [before, after] = [median(runs.before), median(runs.after)];
    const ratios = runs.after.map((figure, round) => figure / runs.before[round]);
    return {
      name,
      before,
      after,
      ratio: after / before,
      spread: [Math.min(...ratios), Math.max(...ratios)],
      all: runs,
    };
  });
  return { machine, device: values.device, rows };
}

function program(build) {
  return join(builds[build], 'cli', 'main.js');
}

/** The rows that a command of `trefoil bench` prints, and the machine. */
async function run(build, words) {
  const { stdout } = await execute(process.execPath, [program(build), ...words, '--device', values.device, '--json']);
  const { rows, machine } = JSON.parse(stdout);
  return Object.assign(rows, { machine });
}

/** User and system seconds of a whole command and its threads; `{run}` in its words is a number that no other run has. */
async function processorSeconds(build, words) {
  const own = words.map((word) => word.replace('{run}', processes));
  processes++;
  const timed = 'TIMEFORMAT="%U %S"; { time "$@" > /dev/null 2> /dev/null; } 2>&1 || exit 1';
  const { stdout } = await execute('bash', ['-c', timed, 'bash', process.execPath, program(build), ...own]);
  const [user, system] = stdout.trim().split(' ').map(Number);
  return user + system;
}

async function execute(file, words) {
  try {
    return await promisify(execFile)(file, words, { maxBuffer: 1 << 26 });
  } catch (error) {
    const end = error.signal ? `ended by ${error.signal}` : `exit code ${error.code}`;
    return stop(`${[file, ...words].join(' ')}: ${end}: ${error.stderr || error.message}`);
  }
}

function stop(message) {
  process.stderr.write(`${message}\n`);
  process.exit(2);
}
