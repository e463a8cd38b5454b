// Compares two builds of this package on one machine, in turns: is the new one slower anywhere?
//
//   node bench/compare-builds.mjs OLD_DIST NEW_DIST [--device cpu|cuda] [--only training|attention|decoding] [--rounds 5]
//                                 [--lengths 8192,65536] [--limit 1] [--out FILE.json]
//
// Measures training, attention and (on a GPU) decoding with `trefoil bench` of each build, alternately, and prints the
// medians and their ratio. --lengths, on a GPU: sequence lengths of training and attention. Exit code 1 if the new build is slower by more than --limit percent. A build is the folder
// `dist` that `npm run build` writes, with its package.json and configs/ beside it and node_modules there or above it.
// Both builds run once, at the same time, before the first round: kernels are compiled at first use. The file of --out
// is rewritten after every round, so that a run that is stopped keeps what it has measured.
import { execFile } from 'node:child_process';
import { writeFileSync } from 'node:fs';
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
if (![undefined, 'training', 'attention', 'decoding'].includes(values.only))
  stop('--only: expected training, attention or decoding');
const lengths = values.lengths?.split(',').map(Number);
if (lengths?.some((length) => !(Number.isInteger(length) && length >= 1))) stop('--lengths: expected whole numbers');
if (lengths && values.device === 'cpu') stop('--lengths: only with --device cuda');
if (!(Number.isInteger(rounds) && rounds >= 1)) stop('--rounds: expected a whole number of at least 1');
if (!(limit >= 0)) stop('--limit: expected a percentage of at least 0');
const builds = { before: positionals[0], after: positionals[1] };

// Configs are named by their earlier names, which builds from before the renaming know too.
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
      ];

const cases = all.filter(({ kind }) => values.only === undefined || kind === values.only);

process.stderr.write('warming up: compiling the kernels of both builds\n');
let machine;
for (const { warmUp } of cases) // both builds at a time: two trainings fit on a GPU, eight do not
  [{ machine }] = await Promise.all(Object.values(builds).map((dist) => run(dist, warmUp)));

/** By the name of a figure: what each build reached, round by round. */
const measured = new Map();
for (let round = 0; round < rounds; round++) {
  // The order changes every round, so that a falling clock rate affects both.
  const order = round % 2 === 0 ? ['before', 'after'] : ['after', 'before'];
  for (const { words, figures } of cases)
    for (const build of order) {
      const found = Object.entries(figures((await run(builds[build], words)).rows));
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
for (const { name, before, after, ratio } of rows)
  console.log(`${name}: before ${before.toPrecision(5)}, after ${after.toPrecision(5)}, ratio ${ratio.toFixed(4)}`);
process.exitCode = rows.some(({ ratio }) => ratio < 1 - limit / 100) ? 1 : 0;

function result() {
  const rows = [...measured].map(([name, runs]) => {
    const [before, after] = [median(runs.before), median(runs.after)];
    return { name, before, after, ratio: after / before, all: runs };
  });
  return { machine, device: values.device, rows };
}

/** The JSON that a command of one build prints. */
async function run(dist, words) {
  const command = [join(dist, 'cli', 'main.js'), ...words, '--device', values.device, '--json'];
  try {
    const { stdout } = await promisify(execFile)(process.execPath, command, { maxBuffer: 1 << 26 });
    return JSON.parse(stdout);
  } catch (error) {
    const end = error.signal ? `ended by ${error.signal}` : `exit code ${error.code}`;
    return stop(`${command.join(' ')}: ${end}: ${error.stderr || error.message}`);
  }
}

function stop(message) {
  process.stderr.write(`${message}\n`);
  process.exit(2);
}
