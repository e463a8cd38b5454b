// Time to the first token of a long prompt: cold, repeated (from memory), and after a restart (from --prefix-cache-dir).
//
//   node bench/prefix-cache.mjs MODEL [--tokens 65536] [--repeats 5]
import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { tokens: { type: 'string', default: '65536' }, repeats: { type: 'string', default: '5' } },
});
const [model] = positionals;
if (!model) throw new Error('usage: node bench/prefix-cache.mjs MODEL [--tokens N] [--repeats N]');
const count = Number(values.tokens);
const repeats = Number(values.repeats);
const main = fileURLToPath(new URL('../dist/cli/main.js', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'trefoil-prefix-bench-'));

/** Runs `use` with the URL of a server on the folder. */
async function withServer(use) {
  const words = ['serve', '--model', model, '--port', '0', '--max-context', String(count + 16)];
  const memory = ['--max-batch', '1', '--prefix-cache-gb', '4', '--prefix-cache-dir', folder];
  const server = spawn(process.execPath, [main, ...words, ...memory], { stdio: ['ignore', 'pipe', 'inherit'] });
  const ended = new Promise((resolve) => server.once('exit', resolve));
  const url = await new Promise((resolve, reject) => {
    createInterface({ input: server.stdout }).on('line', (line) => {
      if (line.startsWith('listening on ')) resolve(line.slice('listening on '.length));
    });
    void ended.then(() => reject(new Error('the server did not start')));
  });
  try {
    return await use(url);
  } finally {
    server.kill('SIGTERM');
    await ended;
  }
}

/** Seconds to the first token, and the tokens that were cached. */
async function measure(url) {
  const prompt = Array.from({ length: count }, (_, i) => (i * i * 7 + i * 91) % 251);
  const body = JSON.stringify({ prompt, max_tokens: 1, ignore_eos: true });
  const startedAt = performance.now();
  const response = await fetch(`${url}/v1/completions`, { method: 'POST', body });
  const { usage } = await response.json();
  return { seconds: (performance.now() - startedAt) / 1000, cached: usage.prompt_tokens_details.cached_tokens };
}

const median = (times) => [...times].sort((a, b) => a - b)[Math.floor(times.length / 2)];
const [cold, memory] = await withServer(async (url) => {
  const first = await measure(url);
  const again = [];
  for (let i = 0; i < repeats; i++) again.push(await measure(url));
  return [first, again];
});
const disk = [];
for (let i = 0; i < repeats; i++) disk.push(await withServer(measure));
rmSync(folder, { recursive: true });
const row = (name, all) => {
  const seconds = median(all.map((one) => one.seconds));
  const { cached } = all[0];
  console.log(
    `${name.padEnd(8)} ${(1000 * seconds).toFixed(1).padStart(10)} ms ${(cold.seconds / seconds).toFixed(1).padStart(8)}x` +
      ` ${String(cached).padStart(8)} of ${count} tokens cached`,
  );
};
row('cold', [cold]);
row('memory', memory);
row('disk', disk);
