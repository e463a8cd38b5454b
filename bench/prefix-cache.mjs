// Time to the first token of a long prompt: cold, repeated (from memory), and after a restart (from --prefix-cache-dir).
//
//   node bench/prefix-cache.mjs MODEL [--tokens 65536] [--repeats 5] [--text]
//
// "first" is the first prompt of a server, which also pays for memory that later ones reuse; "cold" is another one after it.
// "other end" is a prompt whose last 100 tokens differ from those of the prompt in the files. Of every row: milliseconds to the
// first and to the second token, to the first byte, and those of the engine to the first token (/metrics); medians of
// --repeats new servers for the last two rows, and of three times as many requests for "memory". With --text
// the prompt is a text of --tokens bytes instead of a list of tokens. UV_THREADPOOL_SIZE in the environment is the number
// of threads that read files, 4 by default.
import { mkdtempSync, rmSync } from 'node:fs';
import { Agent, request as httpRequest } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { median } from './markdown.mjs';
import { startServer } from './server.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    tokens: { type: 'string', default: '65536' },
    repeats: { type: 'string', default: '5' },
    text: { type: 'boolean', default: false },
  },
});
const [model] = positionals;
if (!model) throw new Error('usage: node bench/prefix-cache.mjs MODEL [--tokens N] [--repeats N] [--text]');
const count = Number(values.tokens);
const repeats = Number(values.repeats);
const agent = new Agent({ keepAlive: true });
const folder = mkdtempSync(join(tmpdir(), 'trefoil-prefix-bench-'));

/** Files are written after an answer; the next request is not to wait for a copy to them. */
const WRITING_MS = 1500;

/** Runs `use` with the URL of a server on the folder. */
async function withServer(use) {
  const { url, stop } = await startServer(
    ...['--model', model, '--max-context', count + 16],
    ...['--max-batch', 1, '--prefix-cache-gb', 4, '--prefix-cache-dir', folder],
  );
  try {
    return await use(url);
  } finally {
    await stop();
  }
}

/** A light client on a connection that stays open: its own time is part of what is measured. */
function send(url, method, body, onPiece) {
  return new Promise((resolve, reject) => {
    const request = httpRequest(url, { method, agent }, (response) => {
      response.on('data', onPiece);
      response.on('end', () => resolve(response));
    });
    request.on('error', reject);
    request.end(body);
  });
}

async function engineSeconds(url) {
  let text = '';
  await send(`${url}/metrics`, 'GET', undefined, (piece) => {
    text += piece;
  });
  const sum = (name) => Number(new RegExp(`^trefoil:${name}_sum(?:{.*})? (.*)$`, 'm').exec(text)?.[1] ?? Number.NaN);
  return sum('request_queue_time_seconds') + sum('request_prefill_time_seconds');
}

/** Milliseconds to the first byte and token, and the tokens that were cached, for the prompt `start` with its end changed by `end`. */
async function measure(url, start, end = 0) {
  const from = count - 100;
  const prompt = Array.from({ length: count }, (_, i) => (i * i * 7 + i * 91 + start + (i < from ? 0 : end)) % 251);
  const text = Buffer.from(prompt.map((token) => 32 + (token % 95))).toString('latin1');
  const settings = { max_tokens: 2, ignore_eos: true, stream: true, return_token_ids: true };
  const body = Buffer.from(
    JSON.stringify({ prompt: values.text ? text : prompt, ...settings, stream_options: { include_usage: true } }),
  );
  const before = await engineSeconds(url);
  const startedAt = performance.now();
  const times = { firstByte: 0, firstToken: 0, secondToken: 0 };
  let all = '';
  const response = await send(`${url}/v1/completions`, 'POST', body, (piece) => {
    const ms = performance.now() - startedAt;
    all += piece.toString('utf8');
    const tokens =
      all
        .match(/"token_ids":\[\d+(,\d+)?\]/g)
        ?.join()
        .match(/\d+/g)?.length ?? 0;
    times.firstByte ||= ms;
    if (tokens > 0) times.firstToken ||= ms;
    if (tokens > 1) times.secondToken ||= ms;
  });
  if (response.statusCode !== 200) throw new Error(all);
  const cached = Number(/"cached_tokens":(\d+)/.exec(all)?.[1]);
  return { ...times, engine: 1000 * ((await engineSeconds(url)) - before), cached };
}

/** Time of the row "cold", with which later rows are compared. */
let cold = Number.NaN;
const row = (name, all) => {
  const of = (key) => median(all.map((one) => one[key])).toFixed(1);
  const faster = cold / median(all.map(({ firstToken }) => firstToken));
  const ratio = Number.isNaN(faster) ? '' : `${faster.toFixed(1)}x`;
  console.log(
    `${name.padEnd(10)} ${of('firstToken').padStart(9)} ms ${ratio.padStart(9)} ${String(all[0].cached).padStart(8)} of ` +
      `${count} tokens cached; second token ${of('secondToken')} ms, first byte ${of('firstByte')} ms, ` +
      `engine ${of('engine')} ms`,
  );
};
await withServer(async (url) => {
  row('first', [await measure(url, 0)]);
  await setTimeout(WRITING_MS);
  const second = await measure(url, 1);
  cold = second.firstToken;
  row('cold', [second]);
  await setTimeout(WRITING_MS);
  const again = [];
  for (let i = 0; i < 3 * repeats; i++) again.push(await measure(url, 1));
  row('memory', again);
});
for (const [name, isOther] of [
  ['disk', false],
  ['other end', true],
]) {
  const all = [];
  for (let i = 0; i < repeats; i++) all.push(await withServer((url) => measure(url, i % 2, isOther ? 5 + i : 0)));
  row(name, all);
}
rmSync(folder, { recursive: true });
agent.destroy();
