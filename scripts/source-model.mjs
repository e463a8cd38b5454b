// Trains a small model on Trefoil's own sources and saves what it reads in sources it has not seen:
//   node scripts/source-model.mjs [folder] [steps]      (default: artifacts/source, 4000 steps, about 20 minutes of CPU time)
// Needs a build (npm run build). Everything under src/ is training text except src/watch, which is the text of the trace.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const [folder = join(root, 'artifacts/source'), steps = '4000'] = process.argv.slice(2);
const HELD_OUT = 'watch';
const MERGES = 1790;
const TRACE_TOKENS = '32768';

/** The sources of each folder of src/ as one document, so that uses of a name follow its definition. */
function documents() {
  const byRoom = new Map();
  const files = readdirSync(join(root, 'src'), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && /\.tsx?$/.test(entry.name))
    .map((entry) => join(entry.parentPath ?? entry.path, entry.name))
    .sort();
  for (const file of files) {
    const path = relative(join(root, 'src'), file);
    const room = path.split('/')[0];
    if (room === HELD_OUT && path.endsWith('.test.ts')) continue;
    byRoom.set(room, `${byRoom.get(room) ?? ''}// ${path}\n${readFileSync(file, 'utf8')}\n`);
  }
  return byRoom;
}

/** The characters that stand for the 256 bytes in a byte-level tokenizer.json. */
function byteCharacters() {
  const isVisible = (byte) => (byte >= 33 && byte <= 126) || (byte >= 161 && byte !== 173);
  let next = 256;
  return Array.from({ length: 256 }, (_, byte) => String.fromCharCode(isVisible(byte) ? byte : next++));
}

/** Byte-pair encoding: the most frequent pair of neighbours becomes a token, `count` times. */
function trainTokenizer(texts, count) {
  const characters = byteCharacters();
  const frequencies = new Map();
  const words = /'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu;
  for (const text of texts)
    for (const [word] of text.matchAll(words)) frequencies.set(word, (frequencies.get(word) ?? 0) + 1);
  const entries = [...frequencies].map(([word, times]) => ({
    times,
    symbols: [...Buffer.from(word)].map((byte) => characters[byte]),
  }));
  const totals = new Map();
  const holders = new Map();
  const change = (entry, sign) => {
    for (let i = 0; i + 1 < entry.symbols.length; i++) {
      const pair = `${entry.symbols[i]} ${entry.symbols[i + 1]}`;
      totals.set(pair, (totals.get(pair) ?? 0) + sign * entry.times);
      if (sign < 0) continue;
      if (!holders.has(pair)) holders.set(pair, new Set());
      holders.get(pair).add(entry);
    }
  };
  for (const entry of entries) change(entry, 1);
  const merges = [];
  while (merges.length < count) {
    let best = '';
    for (const [pair, total] of totals) {
      const most = totals.get(best) ?? 0;
      if (total > most || (total === most && pair < best)) best = pair;
    }
    const [left, right] = best.split(' ');
    merges.push([left, right]);
    for (const entry of holders.get(best)) {
      change(entry, -1);
      const joined = [];
      for (const symbol of entry.symbols) {
        if (symbol === right && joined.at(-1) === left) joined[joined.length - 1] = left + right;
        else joined.push(symbol);
      }
      entry.symbols = joined;
      change(entry, 1);
    }
    totals.delete(best);
    holders.delete(best);
  }
  const tokens = [...characters, ...merges.map((pair) => pair.join('')), '<|endoftext|>'];
  const separator = tokens.length - 1;
  return {
    version: '1.0',
    added_tokens: [{ id: separator, content: '<|endoftext|>', special: true }],
    pre_tokenizer: { type: 'ByteLevel', add_prefix_space: false, use_regex: true },
    decoder: { type: 'ByteLevel' },
    model: { type: 'BPE', vocab: Object.fromEntries(tokens.map((token, id) => [token, id])), merges },
  };
}

const trefoil = (...given) => {
  const { status } = spawnSync(process.execPath, [join(root, 'dist/cli/main.js'), ...given], { stdio: 'inherit' });
  if (status !== 0) process.exit(status ?? 1);
};

const corpus = join(folder, 'corpus');
const run = join(folder, 'runs/trefoil-sources');
const tokenizer = join(folder, 'tokenizer/tokenizer.json');
const text = join(folder, `${HELD_OUT}.ts`);
for (const path of [corpus, dirname(tokenizer)]) mkdirSync(path, { recursive: true });
const rooms = documents();
writeFileSync(text, rooms.get(HELD_OUT));
rooms.delete(HELD_OUT);
for (const [room, content] of rooms) writeFileSync(join(corpus, `${room}.txt`), content);
if (!existsSync(tokenizer)) writeFileSync(tokenizer, JSON.stringify(trainTokenizer(rooms.values(), MERGES)));
// A narrow window and as many groups as heads: what is further back than a line has to be found by the selection.
// Compressed keys carry no positions and rotations are slow, so that a text may be longer than those of the training.
const settings = {
  'model.vocab_size': MERGES + 257,
  'model.dim': 96,
  'model.n_layers': 3,
  'model.n_heads': 3,
  'model.n_kv_groups': 3,
  'model.rope_theta': 1e6,
  'nsa.cmp_rope': 'none',
  'nsa.n_sel': 6,
  'nsa.w': 16,
  'train.batch_size': 4,
  'train.lr': 3e-3,
  'train.log_every': 20,
  'train.eval_every': 200,
  'train.save_every': 400,
  'train.sample_every': 200,
};
const sets = Object.entries(settings).flatMap(([key, value]) => ['--set', `${key}=${value}`]);
trefoil(
  ...['train', '--config', 'text_cpu', '--local-path', corpus, '--tokenizer', tokenizer, '--out-dir', run],
  ...['--seq-len', '512', '--steps', steps, ...(existsSync(run) ? ['--resume', 'auto'] : []), ...sets],
);
trefoil('eval', 'selection', '--model', run, '--text-file', text, '--max-tokens', TRACE_TOKENS, '--trace');
const trace = join(run, 'traces', `${HELD_OUT}.ts.safetensors`);
spawnSync(process.execPath, [join(root, 'scripts/trace-kinds.mjs'), trace], { stdio: 'inherit' });
