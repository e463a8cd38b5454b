// `trefoil data tokenizer` beside the trainer of Hugging Face's tokenizers (Rust, from Python): seconds, CPU seconds and peak
// memory of both on the same files, and whether they learn the same merges.
//
//   npm run build
//   node bench/peers/tokenizer.mjs [--megabytes 100] [--vocab-size 32000] [--rounds 2] [--python PATH] [--json]
//
// --python   a Python with tokenizers: python -m venv V; V/bin/pip install tokenizers -> V/bin/python; without it only ours runs
//
// Lines of the text (bench/corpus.mjs) have no white space at their ends: the peer reads line by line.
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { availableParallelism, loadavg, tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { texts } from '../corpus.mjs';
import { table } from '../markdown.mjs';
import { timed } from '../timed.mjs';

const { values } = parseArgs({
  options: {
    megabytes: { type: 'string', default: '100' },
    'vocab-size': { type: 'string', default: '32000' },
    rounds: { type: 'string', default: '2' },
    python: { type: 'string' },
    json: { type: 'boolean' },
  },
});
const FILES = 16;
const MIN_COUNT = 2;
const root = fileURLToPath(new URL('../..', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'trefoil-tokenizer-'));

function writeCorpus(bytes) {
  mkdirSync(join(folder, 'corpus'));
  let file = 0;
  for (const text of texts(bytes / FILES, FILES))
    writeFileSync(join(folder, 'corpus', `${String(file++).padStart(2, '0')}.txt`), text);
}

const PEER = `
import glob, json, resource, sys, time
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
folder, size, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=${MIN_COUNT}, special_tokens=['<|endoftext|>'], show_progress=False,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
started = time.time()
tokenizer.train(sorted(glob.glob(folder + '/*.txt')), trainer)
tokenizer.save(out)
print(time.time() - started)
`;

function row(who, round, { seconds, cpu_seconds, peak_mib }) {
  return { who, round, load: loadavg()[0], seconds, cpu_seconds, peak_mib };
}

function mergesOf(path) {
  return JSON.parse(readFileSync(path, 'utf8')).model.merges.map((pair) =>
    typeof pair === 'string' ? pair : pair.join(' '),
  );
}

try {
  const started = performance.now();
  writeCorpus(Number(values.megabytes) * 1e6);
  console.error(`${values.megabytes} MB of text written in ${((performance.now() - started) / 1000).toFixed(1)} s`);
  writeFileSync(join(folder, 'peer.py'), PEER);
  const rows = [];
  const own = (round) => join(folder, `own-${round}`);
  const peer = (round) => join(folder, `peer-${round}.json`);
  for (let round = 0; round < Number(values.rounds); round++) {
    const words = ['data', 'tokenizer', '--local-path', join(folder, 'corpus'), '--vocab-size', values['vocab-size']];
    const ours = await timed(process.execPath, [join(root, 'dist/cli/main.js'), ...words, '--out', own(round)]);
    rows.push(row('trefoil', round, ours));
    if (values.python === undefined) continue;
    const theirs = await timed(values.python, [
      join(folder, 'peer.py'),
      join(folder, 'corpus'),
      values['vocab-size'],
      peer(round),
    ]);
    rows.push(row('tokenizers', round, theirs));
  }
  const merges = mergesOf(join(own(0), 'tokenizer.json'));
  let same = null;
  if (values.python !== undefined) {
    const theirs = mergesOf(peer(0));
    const known = new Set(theirs);
    same = {
      in_order: theirs.findIndex((pair, i) => pair !== merges[i]),
      both: merges.filter((pair) => known.has(pair)).length,
    };
    if (same.in_order < 0) same.in_order = merges.length;
  }
  const result = {
    cores: availableParallelism(),
    megabytes: Number(values.megabytes),
    merges: merges.length,
    same,
    rows,
  };
  if (values.json) console.log(JSON.stringify(result));
  else {
    console.log(
      table(
        ['program', 'round', 'seconds', 'CPU seconds', 'peak MiB', 'load'],
        rows.map((row) => [
          ...[
            row.who,
            row.round + 1,
            row.seconds.toFixed(1),
            row.cpu_seconds.toFixed(1),
            row.peak_mib,
            row.load.toFixed(1),
          ],
        ]),
      ),
    );
    console.log(
      same === null
        ? `${merges.length} merges; Hugging Face's trainer was not given (--python)`
        : `${merges.length} merges: the first ${same.in_order} in the same order, ${same.both} learned by both`,
    );
  }
} finally {
  rmSync(folder, { recursive: true, force: true });
}
