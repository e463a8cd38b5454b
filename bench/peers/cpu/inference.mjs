// Decoding and prompts on this machine's CPU beside llama.cpp: the same random weights, peers in turns.
//
//   npm run build
//   node bench/peers/cpu/inference.mjs [--folder F] [--rounds 5] [--threads 1,2] [--tasks decode,prompt]
//                                      [--types f32,bf16,int8] [--json]
//
// The folder (default: a new one under the system's temporary folder) gets node-llama-cpp by npm, checkpoints of the 135M shape
// and GGUF files, about 3 GB, and is used again if it is named. All figures are per second of processor time of all threads,
// since other programs may use the machine; memory bandwidth is shared with them all the same. A row is the median of the
// rounds, its spread the least and the largest ratio of a round.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { writeGguf } from './gguf.mjs';
import { TASKS } from './inference-task.mjs';

const here = dirname(fileURLToPath(import.meta.url));
const { values: options } = parseArgs({
  options: {
    folder: { type: 'string' },
    rounds: { type: 'string', default: '5' },
    threads: { type: 'string', default: '1,2' },
    tasks: { type: 'string', default: Object.keys(TASKS).join() },
    types: { type: 'string', default: 'f32,bf16,int8' },
    json: { type: 'boolean', default: false },
  },
});
const tasks = options.tasks.split(',');
const unknown = tasks.find((task) => !(task in TASKS));
if (unknown !== undefined)
  throw new Error(`--tasks: ${unknown} is unknown; the tasks are ${Object.keys(TASKS).join(', ')}`);
const folder = resolve(options.folder ?? mkdtempSync(join(tmpdir(), 'trefoil-peers-')));
const say = (line) => console.error(line);

/** The last line of a program's output as JSON. */
function run(command, words) {
  const { status, stdout, stderr, error } = spawnSync(command, words, { encoding: 'utf8', maxBuffer: 2 ** 26 });
  if (error || status !== 0) throw new Error(`${words[0]}: ${error?.message ?? stderr.trim().split('\n').at(-1)}`);
  return stdout.trim().split('\n').at(-1);
}

mkdirSync(folder, { recursive: true });
const modules = join(folder, 'llama');
if (!existsSync(join(modules, 'node_modules', 'node-llama-cpp'))) {
  say(`installing node-llama-cpp in ${modules}`);
  run('npm', ['install', '--no-audit', '--no-fund', '--prefix', modules, 'node-llama-cpp']);
}
const checkpoints = Object.fromEntries(
  ['bf16', 'f32'].map((dtype) => {
    const path = join(folder, dtype);
    const words = [join(here, '../../../scripts/random-checkpoint.mjs'), path, '--size', '135m', '--dtype', dtype];
    if (!existsSync(path)) run(process.execPath, words);
    return [dtype, path];
  }),
);
for (const type of ['f32', 'bf16', 'q8_0']) {
  const path = join(folder, `${type}.gguf`);
  if (existsSync(path)) continue;
  say(`writing ${path}`);
  writeGguf(checkpoints.bf16, path, type);
}

const trefoil = (checkpoint, weights) => (threads, task) =>
  run(process.execPath, [join(here, 'inference-trefoil.mjs'), checkpoints[checkpoint], threads, task, weights]);
const llama = (type) => (threads, task) =>
  run(process.execPath, [join(here, 'inference-llama.mjs'), modules, join(folder, `${type}.gguf`), threads, task]);
const PEERS = {
  'trefoil f32': trefoil('f32', 'file'),
  'llama F32': llama('f32'),
  'trefoil bf16': trefoil('bf16', 'file'),
  'llama BF16': llama('bf16'),
  'trefoil int8': trefoil('bf16', 'int8'),
  'llama Q8_0': llama('q8_0'),
};
const PAIRS = [
  ['trefoil f32', 'llama F32'],
  ['trefoil bf16', 'llama BF16'],
  ['trefoil int8', 'llama Q8_0'],
].filter(([ours]) => options.types.split(',').some((type) => ours.endsWith(type)));
const ONLY_BF16 = ['trefoil bf16'];
const peersOf = (task) => (task.startsWith('batch') ? ONLY_BF16 : PAIRS.flat());

const results = []; // with --rounds 0 only the files are made
for (let round = 0; round < Number(options.rounds); round++)
  for (const threads of options.threads.split(','))
    for (const task of tasks)
      for (const name of peersOf(task)) {
        const measured = JSON.parse(PEERS[name](threads, task));
        results.push({ round, threads: Number(threads), task, name, ...measured });
        say(`round ${round + 1}, ${threads} threads, ${task}, ${name}: ${JSON.stringify(measured)}`);
      }

const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
const of = (name, task, threads) =>
  results.filter((row) => row.name === name && row.task === task && row.threads === threads);
const rows = [];
for (const threads of results.length === 0 ? [] : options.threads.split(',').map(Number))
  for (const task of tasks) {
    const pairs = task.startsWith('batch') ? [] : PAIRS;
    for (const [ours, theirs] of pairs) {
      const [a, b] = [of(ours, task, threads), of(theirs, task, threads)];
      const value = (row) => row.perSecond ?? row.seconds;
      const ratios = a.map((row, i) => value(row) / value(b[i]));
      const spread = [Math.min(...ratios), Math.max(...ratios)];
      const unit = task === 'first' ? 'seconds' : 'tokens per second';
      rows.push({
        threads,
        task,
        unit,
        ours,
        theirs,
        trefoil: median(a.map(value)),
        llama: median(b.map(value)),
        ratio: median(ratios),
        spread,
      });
    }
    if (!task.startsWith('batch') || task === 'batch4' || !tasks.includes('batch4')) continue;
    const [name] = ONLY_BF16;
    const [a, b] = [of(name, task, threads), of(name, 'batch4', threads)];
    const ratios = a.map((row, i) => row.perSecond / b[i].perSecond);
    const spread = [Math.min(...ratios), Math.max(...ratios)];
    rows.push({
      threads,
      task,
      unit: 'tokens per second',
      ours: task,
      theirs: 'batch4',
      trefoil: median(a.map((row) => row.perSecond)),
      llama: median(b.map((row) => row.perSecond)),
      ratio: median(ratios),
      spread,
    });
  }
if (results.length === 0) say(`${folder} is ready`);
else if (options.json) {
  const files = Object.fromEntries(
    Object.entries(checkpoints).map(([name, path]) => [name, statSync(join(path, 'model.safetensors')).size]),
  );
  console.log(JSON.stringify({ rows, results, files }));
} else {
  console.log(
    '| threads | task | Trefoil | beside | ours | theirs | ratio | spread |\n|---|---|---|---|---|---|---|---|',
  );
  for (const { threads, task, ours, theirs, trefoil: a, llama: b, ratio, spread } of rows)
    console.log(
      `| ${threads} | ${task} | ${ours} | ${theirs} | ${a.toFixed(2)} | ${b.toFixed(2)} | ${ratio.toFixed(2)} | ${spread.map((x) => x.toFixed(2)).join('–')} |`,
    );
}
