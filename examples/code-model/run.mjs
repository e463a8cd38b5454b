// A code model from the packages installed on this machine: collects, prepares, trains, evaluates, writes, reports.
//
//   node run.mjs [--form cpu|gpu|context] [--out artifacts/code-model] [--from DIR]… [--language LIST] [--max-mb N] [--steps N] [--seed N] [--dense] [--set KEY=VALUE]…
//
// Every stage is a command that it prints. What is finished is not done again: start it once more after an interruption.
// --dense trains the same model with dense attention on the same batches beside it, and compares the two.
// --form context is the recipe for models that use their context, on a GPU; README.md says what is expected of it.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const here = dirname(fileURLToPath(import.meta.url));
const { values } = parseArgs({
  options: {
    form: { type: 'string' },
    out: { type: 'string', default: 'artifacts/code-model' },
    from: { type: 'string', multiple: true, default: [] },
    language: { type: 'string' },
    'max-mb': { type: 'string' },
    steps: { type: 'string' },
    seed: { type: 'string', default: '1337' },
    dense: { type: 'boolean', default: false },
    set: { type: 'string', multiple: true, default: [] },
  },
});
/** The command line of the installed package, or of the repository that this folder lies in. */
const command = join(dirname(createRequire(import.meta.url).resolve('trefoil/package.json')), 'dist', 'cli', 'main.js');
const form = values.form ?? (hasGpu() ? 'gpu' : 'cpu');
/** Differences between the forms besides the config. Lengths are tokens: bytes on the CPU. */
const FORMS = {
  cpu: { tokenizer: 'byte', language: 'python,javascript', maxMb: '24', context: 2048, batches: 24, written: 500 },
  gpu: { tokenizer: 'gpt2', language: undefined, maxMb: '100000', context: 65536, batches: 16, written: 400 },
  context: { tokenizer: 'gpt2', language: undefined, maxMb: '100000', context: 32768, batches: 48, written: 400 },
};
const settings = FORMS[form];
if (settings === undefined) throw new Error(`--form: ${form} is not one of ${Object.keys(FORMS).join(', ')}`);
const language = values.language ?? settings.language;
const inside = (...names) => join(values.out, ...names);
const started = performance.now();
const seconds = {};
mkdirSync(values.out, { recursive: true });

stage('collect', existsSync(inside('corpus', 'corpus.json')), () =>
  node([
    join(here, 'collect.mjs'),
    ...['--out', inside('corpus'), '--max-mb', values['max-mb'] ?? settings.maxMb],
    ...(language === undefined ? [] : ['--language', language]),
    ...values.from.flatMap((folder) => ['--from', folder]),
  ]),
);
for (const part of ['train', 'val'])
  stage(`prepare ${part}`, existsSync(inside('tokens', part)), () =>
    trefoil(
      ...['data', 'prepare', '--local-path', inside('corpus', `${part}.jsonl`)],
      ...['--tokenizer', settings.tokenizer, '--out', inside('tokens', part)],
    ),
  );

const runs = values.dense ? ['nsa', 'dense'] : ['nsa'];
for (const attention of runs)
  stage(`train ${attention}`, existsSync(inside(attention, 'model.safetensors')), () =>
    trefoil(
      ...['train', '--config', join(here, `${form}.yaml`), '--local-path', inside('tokens', 'train')],
      ...['--set', `data.val_path=${inside('tokens', 'val')}`, '--set', `model.attention=${attention}`],
      ...['--seed', values.seed, '--out-dir', inside(attention), '--resume', 'auto'],
      ...(values.steps === undefined ? [] : ['--steps', values.steps]),
      ...values.set.flatMap((setting) => ['--set', setting]),
    ),
  );

const data = ['--local-path', inside('tokens', 'val'), '--seq-len', String(settings.context)];
const evaluation = ['eval', 'loss', '--model', inside('nsa'), ...data, '--batches', String(settings.batches), '--json'];
stage('loss by position', existsSync(inside('positions.json')), () => {
  const others = values.dense ? ['--compare', inside('dense')] : [];
  save('positions.json', trefoil(...evaluation, '--by-position', '--svg', inside('positions.svg'), ...others));
});
stage('what each branch contributes', existsSync(inside('branches.json')), () =>
  save('branches.json', trefoil(...evaluation, '--without', 'cmp', 'sel', 'win')),
);
stage('coverage', existsSync(inside('coverage.json')), () => {
  const documents = readFileSync(inside('corpus', 'val.jsonl'), 'utf8').trim().split('\n');
  const [longest] = documents.map((line) => JSON.parse(line).text).sort((a, b) => b.length - a.length);
  writeFileSync(inside('longest.txt'), longest);
  const words = [
    '--text-file',
    inside('longest.txt'),
    '--max-tokens',
    String(settings.context),
    '--coverage',
    '--json',
  ];
  save('coverage.json', trefoil('eval', 'selection', '--model', inside('nsa'), ...words));
});
const prompt = read('corpus/corpus.json').languages.python ? 'def __init__(self' : 'function ';
stage('write', existsSync(inside('sample.txt')), () =>
  save(
    'sample.txt',
    trefoil(
      ...['generate', '--model', inside('nsa'), '--prompt', prompt, '--max-new-tokens', String(settings.written)],
      ...['--temperature', '0.7', '--top-p', '0.95', '--seed', '1'],
    ),
  ),
);
stage('report', false, () => trefoil('report', '--dir', inside('nsa')));

const times = Object.entries(seconds).map(([name, value]) => `${name} ${value.toFixed(0)} s`);
console.log(`\n${times.join(', ')}; in all ${((performance.now() - started) / 1000).toFixed(0)} s`);
const compared = read('positions.json').models ?? [read('positions.json')];
console.log(`\ntokens of context: loss of ${runs.join(' and ')}`);
for (const [at, { from, to }] of compared[0].by_position.entries())
  console.log(
    `${`${from}-${to}`.padStart(17)}: ${compared.map((row) => row.by_position[at].loss.toFixed(4)).join('  ')}`,
  );
console.log('');
for (const { without, loss, bits_per_byte: bits } of read('branches.json').models)
  console.log(
    `loss ${loss.toFixed(4)}, ${bits.toFixed(3)} bits per byte: ${without ? `without ${without}` : 'all branches'}`,
  );
console.log('\nlayer: of its attention that could be read, what was read, and a random choice would');
for (const [layer, { forced, random, chosen, best }] of read('coverage.json').coverage.layers.entries()) {
  const of = (share) => `${((100 * (share - forced)) / (best - forced)).toFixed(0).padStart(4)} %`;
  console.log(`${String(layer).padStart(5)}: ${of(chosen)} ${of(random)}`);
}
for (const [at, { far }] of compared.entries())
  if (far) console.log(`${runs[at]}: far context is worth ${far.gain.toFixed(4)} nats (error ${far.error.toFixed(4)})`);
console.log(`\n${prompt}${readFileSync(inside('sample.txt'), 'utf8')}`);

function hasGpu() {
  return spawnSync('nvidia-smi', ['-L'], { stdio: 'ignore' }).status === 0;
}

function stage(name, isDone, body) {
  console.log(`\n## ${name}${isDone ? ': done before' : ''}`);
  if (isDone) return;
  const begun = performance.now();
  body();
  seconds[name] = (performance.now() - begun) / 1000;
}

function read(name) {
  return JSON.parse(readFileSync(inside(name), 'utf8'));
}

function save(name, text) {
  writeFileSync(inside(name), text);
}

function trefoil(...words) {
  console.log(`npx trefoil ${words.join(' ')}`);
  return node([command, ...words], words[0] === 'eval' || words[0] === 'generate');
}

/** Runs a program to its end. Its output goes to the terminal, or is returned. */
function node(words, isKept = false) {
  const { status, signal, stdout } = spawnSync(process.execPath, words, {
    stdio: ['inherit', isKept ? 'pipe' : 'inherit', 'inherit'],
    encoding: 'utf8',
    maxBuffer: 1 << 28,
  });
  if (status !== 0) {
    console.error(
      `\n${words.slice(1, 3).join(' ')} ended with ${signal ?? `exit code ${status}`}; start again to continue`,
    );
    process.exit(status ?? 1);
  }
  return stdout;
}
