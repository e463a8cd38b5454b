// The first byte of the answers to prompts that arrive at the same moment.
//
//   node bench/first-byte.mjs MODEL [--requests 32] [--tokens 65536] [--rounds 5] [--text]
//   node bench/first-byte.mjs --url http://127.0.0.1:8080 …
//
// Sends the requests of a round at once, on connections that are open, each prepared as bytes before. The clock of a request
// starts when its last byte went to the system, and stops with the first byte of its answer. Prints one JSON value: the
// percentiles of each round in milliseconds. With --text the prompts are texts of --tokens bytes.
import { once } from 'node:events';
import { connect } from 'node:net';
import { setTimeout } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { startServer } from './server.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    url: { type: 'string' },
    requests: { type: 'string', default: '32' },
    tokens: { type: 'string', default: '65536' },
    rounds: { type: 'string', default: '5' },
    text: { type: 'boolean', default: false },
  },
});
const [model] = positionals;
if ((model === undefined) === (values.url === undefined))
  throw new Error('usage: node bench/first-byte.mjs MODEL|--url URL [--requests N] [--tokens N] [--rounds N] [--text]');
const requests = Number(values.requests);
const count = Number(values.tokens);

const server = model && (await startServer('--model', model, '--max-context', count + 16, '--prefix-cache-gb', 0));
const url = server?.url ?? values.url;

function requestBytes(number, host) {
  const tokens = Array.from({ length: count }, (_, i) => (i * i * 7 + i * 91 + number) % 251);
  const prompt = values.text ? Buffer.from(tokens.map((token) => 32 + (token % 95))).toString('latin1') : tokens;
  const body = JSON.stringify({ prompt, max_tokens: 1, stream: true });
  const head = [
    'POST /v1/completions HTTP/1.1',
    `host: ${host}`,
    'content-type: application/json',
    `content-length: ${Buffer.byteLength(body)}`,
  ];
  return Buffer.from(`${head.join('\r\n')}\r\n\r\n${body}`);
}

/** Milliseconds from the last byte of each request to the first of its answer. */
async function round(first) {
  const { hostname, port, host } = new URL(url);
  const all = await Promise.all(
    Array.from({ length: requests }, async (_, i) => {
      const socket = connect(Number(port), hostname).setNoDelay(true);
      await once(socket, 'connect');
      return { socket, bytes: requestBytes(first + i, host) };
    }),
  );
  await setTimeout(200);
  const times = await Promise.all(
    all.map(async ({ socket, bytes }) => {
      let sentAt = Number.NaN;
      socket.write(bytes, () => {
        sentAt = performance.now();
      });
      const [answer] = await once(socket, 'data');
      const ms = performance.now() - sentAt;
      if (!answer.toString('latin1').startsWith('HTTP/1.1 200')) throw new Error(answer.toString('latin1'));
      return ms;
    }),
  );
  for (const { socket } of all) socket.destroy(); // the server stops working on them
  const sorted = times.sort((a, b) => a - b);
  const at = (share) => Number(sorted[Math.min(requests - 1, Math.floor(share * requests))].toFixed(2));
  return { p50: at(0.5), p99: at(0.99) };
}

const rounds = [];
for (let i = 0; i < Number(values.rounds); i++) {
  rounds.push(await round(i * requests));
  await setTimeout(500);
}
console.log(
  JSON.stringify({ requests, prompt_tokens: count, as: values.text ? 'text' : 'tokens', first_byte_ms: rounds }),
);
await server?.stop();
