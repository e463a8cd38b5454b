// Speed of `data prepare` beside that of the tokenizer alone in one thread, by number of workers.
//
//   npm run build
//   node bench/prepare.mjs [--megabytes 100] [--workers 1,2,4] [--rounds 2] [--json]
//
// Documents of 8 kB (bench/corpus.mjs) as JSON Lines, the tokenizer gpt2. The tokenizer alone encodes the first 200 MB of
// them from memory, after one pass that fills its cache of words. Two ratios: speed on the clock to
// that of one tokenizer for each worker (at most one for each core), which needs idle cores, and processor time.
import { closeSync, mkdtempSync, openSync, rmSync, statSync, writeFileSync, writeSync } from 'node:fs';
import { availableParallelism, loadavg, tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { texts } from './corpus.mjs';
import { median, table } from './markdown.mjs';
import { timed } from './timed.mjs';

const { values } = parseArgs({
  options: {
    megabytes: { type: 'string', default: '100' },
    workers: { type: 'string', default: '1,2,4' },
    rounds: { type: 'string', default: '2' },
    json: { type: 'boolean' },
  },
});
const root = fileURLToPath(new URL('..', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'trefoil-prepare-'));
const corpus = join(folder, 'corpus.jsonl');

const DOCUMENT_BYTES = 8000;

function writeCorpus(bytes) {
  const descriptor = openSync(corpus, 'w');
  for (const text of texts(DOCUMENT_BYTES, bytes / DOCUMENT_BYTES))
    writeSync(descriptor, `${JSON.stringify({ text })}\n`);
  closeSync(descriptor);
}

const ALONE_BYTES = 200e6;

/** Seconds and CPU seconds of one pass of the tokenizer, in a process of one thread. */
const ALONE = `
import { createTokenizer } from '${join(root, 'dist/data/tokenizer.js')}';
import { TokenBuffer } from '${join(root, 'dist/data/tokenizers/token-buffer.js')}';
import { readFileSync } from 'node:fs';
const tokenizer = createTokenizer('gpt2');
const bytes = readFileSync('${corpus}').subarray(0, ${ALONE_BYTES});
const lines = bytes.subarray(0, bytes.lastIndexOf(10) + 1);
const texts = lines.toString().split('\\n').filter(Boolean).map((line) => JSON.parse(line).text);
const tokens = new TokenBuffer();
const pass = () => { for (const text of texts) { tokens.length = 0; tokenizer.encodeInto(text, tokens); } };
for (const text of texts.slice(0, texts.length / 4)) { tokens.length = 0; tokenizer.encodeInto(text, tokens); }
const [before, started] = [process.cpuUsage(), performance.now()];
pass();
const { user, system } = process.cpuUsage(before);
const seconds = (performance.now() - started) / 1000;
console.log(JSON.stringify({ bytes: lines.length, seconds, cpu_seconds: (user + system) / 1e6 }));
`;

try {
  writeCorpus(Number(values.megabytes) * 1e6);
  const program = join(folder, 'alone.mjs');
  writeFileSync(program, ALONE);
  const rows = [];
  for (let round = 0; round < Number(values.rounds); round++) {
    const { output } = await timed(process.execPath, ['--max-old-space-size=4096', program]);
    rows.push({ what: 'tokenizer alone', workers: 1, round, load: loadavg()[0], ...JSON.parse(output) });
    for (const workers of values.workers.split(',')) {
      const words = ['data', 'prepare', '--local-path', corpus, '--tokenizer', 'gpt2', '--workers', workers];
      const out = join(folder, `shards-${round}-${workers}`);
      const result = await timed(process.execPath, [join(root, 'dist/cli/main.js'), ...words, '--out', out]);
      const { size: bytes } = statSync(corpus);
      const what = `${workers} worker${workers === '1' ? '' : 's'}`;
      rows.push({ what, workers: Number(workers), round, load: loadavg()[0], bytes, ...result, output: undefined });
      rmSync(out, { recursive: true, force: true });
    }
  }
  const kinds = [...new Set(rows.map(({ what }) => what))];
  const of = (what) => rows.filter((row) => row.what === what);
  const speeds = (what, key) => of(what).map((row) => row.bytes / 1e6 / row[key]);
  const alone = (key) => median(speeds('tokenizer alone', key));
  const summary = kinds.map((what) => {
    const [speed, busy] = [speeds(what, 'seconds'), speeds(what, 'cpu_seconds')];
    const cores = Math.min(of(what)[0].workers, availableParallelism());
    return {
      what,
      mb_per_s: median(speed),
      lowest: Math.min(...speed),
      highest: Math.max(...speed),
      efficiency: median(speed) / cores / alone('seconds'),
      mb_per_cpu_s: median(busy),
      cpu_efficiency: median(busy) / alone('cpu_seconds'),
    };
  });
  const result = {
    cores: availableParallelism(),
    megabytes: Number(values.megabytes),
    load: loadavg()[0],
    summary,
    rows,
  };
  if (values.json) console.log(JSON.stringify(result));
  else
    console.log(
      table(
        ['', 'MB/s (range)', 'of the tokenizer', 'MB per CPU second', 'of the tokenizer'],
        summary.map(({ what, mb_per_s: speed, lowest, highest, efficiency, mb_per_cpu_s: busy, cpu_efficiency }) => [
          what,
          `${speed.toFixed(1)} (${lowest.toFixed(1)}-${highest.toFixed(1)})`,
          `${(100 * efficiency).toFixed(0)} %`,
          busy.toFixed(1),
          `${(100 * cpu_efficiency).toFixed(0)} %`,
        ]),
      ),
    );
} finally {
  rmSync(folder, { recursive: true, force: true });
}
