// CPU time of `data prepare` beside that of the tokenizer alone in one thread, by number of workers.
//
//   npm run build
//   node bench/prepare.mjs [--megabytes 100] [--workers 1,2,4] [--rounds 2] [--json]
//
// Documents of 8 kB (bench/corpus.mjs) as JSON Lines, the tokenizer gpt2. The tokenizer alone
// encodes the same documents from memory, after one pass that fills its cache of words. CPU seconds hold on a busy machine too:
// where `efficiency` stays at e for n workers, n idle cores give n * e times the speed of the tokenizer alone.
import { closeSync, mkdtempSync, openSync, rmSync, writeFileSync, writeSync } from 'node:fs';
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

/** CPU seconds of one pass of the tokenizer, in a process of one thread. */
const ALONE = `
import { createTokenizer } from '${join(root, 'dist/data/tokenizer.js')}';
import { TokenBuffer } from '${join(root, 'dist/data/tokenizers/token-buffer.js')}';
import { readFileSync } from 'node:fs';
const tokenizer = createTokenizer('gpt2');
const texts = readFileSync('${corpus}', 'utf8').split('\\n').filter(Boolean).map((line) => JSON.parse(line).text);
const tokens = new TokenBuffer();
const pass = () => { for (const text of texts) { tokens.length = 0; tokenizer.encodeInto(text, tokens); } };
for (const text of texts.slice(0, texts.length / 4)) { tokens.length = 0; tokenizer.encodeInto(text, tokens); }
const before = process.cpuUsage();
pass();
const { user, system } = process.cpuUsage(before);
console.log((user + system) / 1e6);
`;

try {
  writeCorpus(Number(values.megabytes) * 1e6);
  const program = join(folder, 'alone.mjs');
  writeFileSync(program, ALONE);
  const rows = [];
  for (let round = 0; round < Number(values.rounds); round++) {
    const { output } = await timed(process.execPath, ['--max-old-space-size=4096', program]);
    rows.push({ what: 'tokenizer alone', round, load: loadavg()[0], cpu_seconds: Number(output) });
    for (const workers of values.workers.split(',')) {
      const words = ['data', 'prepare', '--local-path', corpus, '--tokenizer', 'gpt2', '--workers', workers];
      const out = join(folder, `shards-${round}-${workers}`);
      const result = await timed(process.execPath, [join(root, 'dist/cli/main.js'), ...words, '--out', out]);
      rows.push({ what: `${workers} workers`, round, load: loadavg()[0], ...result, output: undefined });
      rmSync(out, { recursive: true, force: true });
    }
  }
  const of = (what) => rows.filter((row) => row.what === what).map((row) => row.cpu_seconds);
  const alone = median(of('tokenizer alone'));
  const kinds = [...new Set(rows.map(({ what }) => what))];
  const summary = kinds.map((what) => ({
    what,
    cpu_seconds: median(of(what)),
    lowest: Math.min(...of(what)),
    highest: Math.max(...of(what)),
    efficiency: alone / median(of(what)),
  }));
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
        ['', 'CPU seconds (range)', 'efficiency'],
        summary.map(({ what, cpu_seconds: cpu, lowest, highest, efficiency }) => [
          what,
          `${cpu.toFixed(2)} (${lowest.toFixed(2)}-${highest.toFixed(2)})`,
          `${(100 * efficiency).toFixed(0)} %`,
        ]),
      ),
    );
} finally {
  rmSync(folder, { recursive: true, force: true });
}
