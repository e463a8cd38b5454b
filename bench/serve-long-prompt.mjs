// The cost of a long prompt for other requests: the time between tokens of running streams while it arrives.
//
//   node bench/serve-long-prompt.mjs MODEL [--tokens 65536] [--streams 31] [--tile 256] [--seconds 60]
//
// Starts a server, lets the streams generate, sends the prompt twice, and prints one JSON value for each: times between
// tokens before and during the prompt, and the time of one tile (the prompt's time to the first token divided by its
// tiles). The first prompt of a server also pays for memory that later ones reuse.
import { setTimeout } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { startServer } from './server.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    tokens: { type: 'string', default: '65536' },
    streams: { type: 'string', default: '31' },
    tile: { type: 'string', default: '256' },
    seconds: { type: 'string', default: '60' },
  },
});
const [model] = positionals;
if (!model) throw new Error('usage: node bench/serve-long-prompt.mjs MODEL [--tokens N] [--streams N] [--tile N]');
const count = Number(values.tokens);
const streams = Number(values.streams);
const { url, stop } = await startServer(
  ...['--model', model, '--max-batch', streams + 1, '--prefix-cache-gb', 0],
  ...['--max-context', Math.max(count, 65_536) + 4096, '--tile', values.tile],
);
const token = (i) => (i * i * 7 + i * 91) % 251;

/** Streams until `signal`; calls `onToken` with the time of every token. */
async function stream(prompt, maxTokens, signal, onToken) {
  const body = JSON.stringify({
    prompt,
    max_tokens: maxTokens,
    ignore_eos: true,
    temperature: 0,
    stream: true,
    return_token_ids: true,
  });
  try {
    const response = await fetch(`${url}/v1/completions`, { method: 'POST', body, signal });
    if (response.status !== 200) throw new Error(await response.text());
    for await (const piece of response.body) {
      const frames = Buffer.from(piece).toString('utf8').split('"token_ids":[').length - 1;
      for (let i = 0; i < frames; i++) onToken(performance.now());
    }
  } catch (error) {
    if (error.name !== 'AbortError') throw error;
  }
}

const over = new AbortController();
const times = Array.from({ length: streams }, () => []);
const running = times.map((seen, i) => stream([token(i), token(i + 1)], 50_000, over.signal, (at) => seen.push(at)));
while (times.some(({ length }) => length < 20)) await setTimeout(20);
const prompts = [];
for (const shift of [0, 1]) {
  await setTimeout(1000);
  const prompt = { sentAt: performance.now(), firstAt: 0 };
  prompts.push(prompt);
  const ids = Array.from({ length: count }, (_, i) => token(i + shift));
  await stream(ids, 1, AbortSignal.timeout(1000 * values.seconds), (at) => {
    prompt.firstAt ||= at;
  });
}
over.abort();
await Promise.all(running);
await stop();

const gaps = (from, to) =>
  times.flatMap((seen) => seen.flatMap((at, i) => (i > 0 && at > from && at <= to ? [at - seen[i - 1]] : [])));
const percentiles = (all) => {
  const sorted = all.sort((a, b) => a - b);
  const at = (share) => Number(sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))].toFixed(2));
  return { count: sorted.length, p50: at(0.5), p99: at(0.99), max: at(1) };
};
const tile = Number(values.tile);
for (const { sentAt, firstAt } of prompts)
  console.log(
    JSON.stringify({
      prompt_tokens: count,
      streams,
      ttft_ms: Number((firstAt - sentAt).toFixed(1)),
      itl_before_ms: percentiles(gaps(sentAt - 1000, sentAt)),
      itl_during_ms: percentiles(gaps(sentAt, firstAt)),
      tile_tokens: tile,
      tile_ms: Number(((firstAt - sentAt) / Math.ceil(count / tile)).toFixed(2)),
    }),
  );
