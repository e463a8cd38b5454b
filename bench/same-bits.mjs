// Do two builds of this package compute the same on the CPU, bit for bit, and does the new one go on with the files of the old one?
//
//   node bench/same-bits.mjs OLD_DIST NEW_DIST [--steps 12] [--keep FOLDER]
//
// A build is the folder `dist`, with its package.json and configs/ beside it, as for compare-builds.mjs. Compared are: training
// (weights and losses), a run that the old build began and the new one resumes, generated texts, answers of the server, and
// answers from a folder of prefixes that the old server wrote. Prints a line for each; exit code 1 if one differs.
import { execFile, spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { cpSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { isDeepStrictEqual, parseArgs, promisify } from 'node:util';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: { steps: { type: 'string', default: '12' }, keep: { type: 'string' } },
});
if (positionals.length !== 2) throw new Error('usage: node bench/same-bits.mjs OLD_DIST NEW_DIST [--steps N]');
const [before, after] = positionals;
const steps = Number(values.steps);
const folder = values.keep ?? mkdtempSync(join(tmpdir(), 'trefoil-same-bits-'));
const at = (...names) => join(folder, ...names);

/** Names of the differences. */
const different = [];
function report(name, isSame, detail = '') {
  if (!isSame) different.push(name);
  console.log(`${isSame ? 'same     ' : 'DIFFERENT'} ${name}${detail && `: ${detail}`}`);
}

async function run(dist, ...words) {
  const command = [join(dist, 'cli', 'main.js'), ...words.map(String)];
  return (await promisify(execFile)(process.execPath, command, { maxBuffer: 1 << 26 })).stdout;
}

const digest = (file) => createHash('sha256').update(readFileSync(file)).digest('hex').slice(0, 16);
/** Weights and optimizer state: all files of the newest checkpoint that are not about its time or version. */
const state = (out) =>
  readdirSync(join(out, 'checkpoints', `step-${steps}`))
    .filter((name) => name.endsWith('.safetensors'))
    .map((name) => [name, digest(join(out, 'checkpoints', `step-${steps}`, name))]);
/** The columns of training.csv that do not depend on time. */
const losses = (out) =>
  readFileSync(join(out, 'training.csv'), 'utf8')
    .split('\n')
    .map((line) => line.split(',').slice(0, 3).join(','));

/**
 * By name, the words of a training of `steps` steps. Configs are named by their earlier names, which both builds know;
 * quickstart is the old build's.
 */
const TRAININGS = {
  quickstart: ['--config', join(before, '..', 'configs', 'quickstart.yaml')],
  'small_smoke, fp32': ['--config', 'm7c_small_smoke', '--precision', 'fp32', '--seq-len', '256', '--batch-size', '2'],
  'small_smoke, bf16 and Muon': [
    ...['--config', 'm7c_small_smoke', '--precision', 'bf16', '--seq-len', '192', '--accum-batches', '2'],
    ...['--set', 'train.optimizer=muon', '--set', 'nsa.phi=conv'],
  ],
  'dense, with names of the runbooks': [
    ...['--config', 'm7c_small_smoke', '--precision', 'fp32', '--seq-len', '128', '--set', 'model.attention=dense'],
    ...['--set', 'data.fwe_queue=3', '--set', 'runtime.use_fa2=false', '--fwe-report-docs', '10'],
  ],
};
const half = steps / 2;
const saves = ['--device', 'cpu', '--steps', steps, '--set', `train.save_every=${half}`, '--set', 'train.log_every=1'];

for (const [name, words] of Object.entries(TRAININGS)) {
  const [old, now, resumed] = ['old', 'new', 'resumed'].map((kind) => at(`${kind} ${name}`));
  await run(before, 'train', ...words, ...saves, '--out-dir', old);
  await run(after, 'train', ...words, ...saves, '--out-dir', now);
  report(`training, ${name}`, isDeepStrictEqual([state(old), losses(old)], [state(now), losses(now)]));
  // The run as it was when the old build had half of the steps.
  cpSync(old, resumed, { recursive: true });
  rmSync(join(resumed, 'checkpoints', `step-${steps}`), { recursive: true });
  rmSync(join(resumed, 'model.safetensors'));
  rmSync(join(resumed, 'checkpoints', 'latest'), { force: true });
  await run(after, 'train', ...words, ...saves, '--out-dir', resumed, '--resume', 'auto');
  const same = isDeepStrictEqual(state(old), state(resumed));
  report(`resumed at step ${half} from files of the old build, ${name}`, same);
}

const model = at('old quickstart');
const story = 'Once upon a time Pip hid the red kite under the bridge.';
const schema = at('schema.json');
writeFileSync(
  schema,
  JSON.stringify({
    type: 'object',
    properties: { name: { type: 'string', maxLength: 12 }, age: { type: 'integer', minimum: 0, maximum: 99 } },
    required: ['name', 'age'],
    additionalProperties: false,
  }),
);
const TEXTS = {
  greedy: ['--prompt', story, '--greedy'],
  'temperature 0.8': ['--prompt', story, '--seed', '5'],
  'top-k, top-p, min-p, repetition penalty': [
    ...['--prompt', story, '--seed', '6', '--temperature', '1.1', '--top-k', '40', '--top-p', '0.9', '--min-p', '0.01'],
    ...['--repetition-penalty', '1.2'],
  ],
  'three prompts': ['--prompt', story, '--prompt', 'The', '--prompt', '', '--seed', '7'],
  'stop text': ['--prompt', story, '--seed', '8', '--stop', 'the'],
  schema: ['--prompt', story, '--seed', '9', '--json-schema', schema],
};
for (const [name, words] of Object.entries(TEXTS)) {
  const texts = await Promise.all(
    [before, after].map(async (dist) => {
      const rows = JSON.parse(
        await run(dist, 'generate', '--model', model, '--json', '--max-new-tokens', 60, '--device', 'cpu', ...words),
      );
      return [rows].flat().map(({ tokens_per_s: _, ...row }) => row);
    }),
  );
  report(`generate, ${name}`, isDeepStrictEqual(texts[0], texts[1]));
}

/** A stream's text and its last frame: how many tokens a frame has depends on time. */
function joined(stream) {
  const frames = [...stream.matchAll(/^data: ({.*})$/gm)].map(([, frame]) => JSON.parse(frame));
  return [frames.map(({ choices }) => choices[0]?.text ?? '').join(''), frames.at(-1)];
}

/** The answers of a server of `dist` to `requests`, one after the other, without their ids and times. */
async function answers(dist, requests, ...words) {
  const command = [join(dist, 'cli', 'main.js'), 'serve', '--model', model, '--port', '0', '--device', 'cpu', ...words];
  const server = spawn(process.execPath, command.map(String), { stdio: ['ignore', 'pipe', 'inherit'] });
  const ended = new Promise((resolve) => server.once('exit', resolve));
  const url = await new Promise((resolve, reject) => {
    createInterface({ input: server.stdout }).on('line', (line) => {
      if (line.startsWith('listening on ')) resolve(line.slice('listening on '.length));
    });
    void ended.then(() => reject(new Error('the server did not start')));
  });
  while ((await fetch(`${url}/health`)).status !== 200) await new Promise((resolve) => setTimeout(resolve, 100));
  const results = [];
  for (const body of requests) {
    const init = { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) };
    const response = await fetch(`${url}/v1/completions`, init);
    const text = (await response.text()).replace(/cmpl-[\w-]+/g, 'ID').replace(/"created":\d+/g, '"created":0');
    results.push([response.status, body.stream ? joined(text) : text]);
  }
  const metrics = await (await fetch(`${url}/metrics`)).text();
  server.kill('SIGTERM');
  await ended;
  const counter = (name) => Number(new RegExp(`${name}(?:\\{[^}]*\\})? (\\d+)`).exec(metrics)?.[1]);
  return {
    results,
    fileHits: counter('prefix_cache_file_hits_total'),
    refused: counter('prefix_cache_files_damaged_total'),
  };
}

const long = Array.from({ length: 1500 }, (_, i) => (i * i * 7 + i * 91) % 250);
const requests = [
  { prompt: story, max_tokens: 30, temperature: 0 },
  { prompt: story, max_tokens: 30, seed: 3, temperature: 0.9, top_p: 0.9, n: 2, logprobs: 3 },
  { prompt: story, max_tokens: 30, seed: 4, stream: true, stream_options: { include_usage: true } },
  { prompt: [story, 'The'], max_tokens: 10, seed: 5, echo: true },
  { prompt: long, max_tokens: 20, seed: 6 },
  { prompt: story, max_tokens: -1 },
];
const [old, now] = [await answers(before, requests), await answers(after, requests)];
for (const [i, request] of requests.entries())
  report(
    `server, request ${i + 1}`,
    isDeepStrictEqual(old.results[i], now.results[i]),
    JSON.stringify(request).slice(0, 80),
  );

const cache = ['--prefix-cache-dir', at('prefixes')];
const question = [{ prompt: [...long, 17], max_tokens: 20, seed: 6 }];
const [plain] = (await answers(after, question)).results;
await answers(before, [{ prompt: long, max_tokens: 1 }], ...cache);
const continued = await answers(after, question, ...cache);
const withoutCounts = ([status, text]) => [status, text.replace(/"cached_tokens":\d+/, '')];
report(
  'server with the prefixes of the old one',
  isDeepStrictEqual(withoutCounts(plain), withoutCounts(continued.results[0])),
  `${continued.fileHits} tokens from its files; files deleted, of another format: ${continued.refused}`,
);

if (!values.keep) rmSync(folder, { recursive: true });
process.exitCode = different.length > 0 ? 1 : 0;
