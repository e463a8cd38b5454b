// Soaks a server. First 4 times the load it can take for --seconds, and what it completes of that, against the mean of closed
// loops before, between and after; then --disconnects clients that leave at a random token; then rounds of 4 times the load with random
// disconnects, slow readers and malformed requests for --minutes. Prints memory, pages and latencies, and fails if pages leak,
// memory grows, a request fails, or less than 0.97 of the capacity is completed.
//
//   node bench/serve-soak.mjs MODEL [--seconds 15] [--disconnects 12000] [--minutes 10]
import { readFileSync } from 'node:fs';
import { connect } from 'node:net';
import { parseArgs } from 'node:util';
import { loadServer } from '../dist/bench/serve.js';
import { mean } from './markdown.mjs';
import { startServer } from './server.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    seconds: { type: 'string', default: '15' },
    disconnects: { type: 'string', default: '12000' },
    minutes: { type: 'string', default: '10' },
  },
});
const [model] = positionals;
if (!model) throw new Error('usage: node bench/serve-soak.mjs MODEL [--seconds N] [--disconnects N] [--minutes N]');
const { url, pid, stop } = await startServer(
  ...['--model', model, '--max-batch', 8, '--max-queued', 8, '--prefix-cache-gb', 0],
);

const metric = async (name) => {
  const text = await (await fetch(`${url}/metrics`)).text();
  return Number(new RegExp(`^trefoil:${name} (\\S+)$`, 'm').exec(text)[1]);
};
/** Resident memory in MiB. */
const memory = () => Number(/^VmRSS:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))[1]) / 1024;

/** Connections that send nonsense, or ask for a stream and read nothing. */
async function abuse() {
  const { port, hostname } = new URL(url);
  const raw = (text, ms) =>
    new Promise((resolve) => {
      const socket = connect(Number(port), hostname, () => socket.write(text));
      socket.on('error', resolve);
      socket.on('close', resolve);
      socket.pause();
      setTimeout(() => socket.destroy(), ms);
    });
  const body = JSON.stringify({ prompt: 'slow', max_tokens: 400, ignore_eos: true, stream: true });
  const post = `POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: ${body.length}\r\n\r\n${body}`;
  await Promise.all([
    raw('NONSENSE\r\n\r\n', 500),
    raw(`GET / HTTP/1.1\r\na: ${'b'.repeat(30_000)}\r\n\r\n`, 500),
    raw('POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{"prompt"', 500),
    raw(post, 2000),
    raw(post, 300),
  ]);
}

const load = { url, key: null, promptTokens: [4, 300], outputTokens: [4, 60], sharedPrefix: 0 };
const closed = { ...load, requests: 200, concurrency: 8, rate: null, disconnect: 0, seed: 0 };
await loadServer(closed); // until its code is compiled
const capacity = await loadServer(closed);
const perSecond = capacity.completed / capacity.seconds;
console.log(`capacity ${perSecond.toFixed(1)} requests/s, ${capacity.goodput.toFixed(0)} tok/s`);

/** Once no request runs: bytes of pages, and memory. */
async function idle() {
  // The last disconnects are seen within one step.
  for (let i = 0; i < 100 && (await metric('num_requests_running')) > 0; i++)
    await new Promise((r) => setTimeout(r, 50));
  return { pages: await metric('kv_cache_page_bytes'), mib: memory() };
}

/** Parts of the time, each between two closed loops: other programs change the capacity of a machine. */
const PARTS = 5;
const overload = { ...load, concurrency: 1, rate: 4 * perSecond, disconnect: 0, seed: 1 };
const capacities = [capacity.goodput];
const over = { completed: 0, refused: 0, failed: 0, goodput: 0 };
for (let part = 0; part < PARTS; part++) {
  const requests = Math.ceil((4 * perSecond * Number(values.seconds)) / PARTS);
  const result = await loadServer({ ...overload, requests, seed: part });
  for (const name of ['completed', 'refused', 'failed']) over[name] += result[name];
  over.goodput += result.goodput / PARTS;
  capacities.push((await loadServer(closed)).goodput);
}
const middle = mean(capacities);
const share = over.goodput / middle;
console.log(
  `4 times the capacity: ${over.completed} completed, ${over.refused} refused, ${over.failed} failed; goodput ` +
    `${over.goodput.toFixed(0)} tok/s, ${share.toFixed(3)} of the capacity, ${middle.toFixed(0)} tok/s ` +
    `(${Math.min(...capacities).toFixed(0)} to ${Math.max(...capacities).toFixed(0)})`,
);
const leaving = { ...load, requests: Number(values.disconnects), concurrency: 16, rate: null, disconnect: 1, seed: 2 };
const left = { ...(await loadServer(leaving)), ...(await idle()) };
console.log(
  `${left.requests} clients that leave: ${left.disconnected} disconnected, ${left.completed} completed, ${left.failed} failed; ` +
    `pages ${left.pages} bytes, memory ${left.mib.toFixed(0)} MiB`,
);
const rounds = [];
const until = Date.now() + Number(values.minutes) * 60_000;
for (let seed = 1; Date.now() < until; seed++) {
  const requests = Math.ceil(perSecond * 4 * 20);
  const [result] = await Promise.all([
    loadServer({ ...load, requests, concurrency: 1, rate: 4 * perSecond, disconnect: 0.2, seed }),
    abuse(),
  ]);
  const round = { ...result, ...(await idle()) };
  rounds.push(round);
  console.log(
    `round ${seed}: ${round.completed} completed, ${round.refused} refused, ${round.disconnected} disconnected, ` +
      `${round.failed} failed; goodput ${round.goodput.toFixed(0)} tok/s; p99 first byte ${round.first_byte_ms.p99.toFixed(1)}, ` +
      `TTFT ${round.ttft_ms.p99.toFixed(0)}, ITL ${round.itl_ms.p99.toFixed(0)}, E2E ${round.e2e_ms.p99.toFixed(0)} ms; ` +
      `pages ${round.pages} bytes, memory ${round.mib.toFixed(0)} MiB`,
  );
}
const code = await stop();
const half = rounds.slice(Math.floor(rounds.length / 2));
const growth = (rounds.at(-1)?.mib ?? 0) - (half[0]?.mib ?? 0);
const all = [over, left, ...rounds];
const checks = {
  'goodput of 0.97 of the capacity': share >= 0.97,
  'no page leaked': [left, ...rounds].every(({ pages }) => pages === 0),
  'no request failed': all.every(({ failed }) => failed === 0),
  'memory flat in the second half (32 MiB)': growth < 32,
  'exit code 0': code === 0,
};
console.log(JSON.stringify({ growth_mib: Math.round(growth), ...checks }));
process.exitCode = Object.values(checks).every(Boolean) ? 0 : 1;
