// Sends random bodies to all routes of a server that answers streams meanwhile, and asks /health every 50 ms.
//
//   node bench/fuzz-server.mjs MODEL [--bodies 20000] [--seed 1] [--at-once 8] [--max-health-ms 1000]
//   node bench/fuzz-server.mjs --url URL --pid PID …
//
// Fails if a body is answered with 500 or more (but 503), if the server ends or prints a stack, if a stream of the load fails, if
// /health takes longer than --max-health-ms or 100 ms of the HTTP thread, or if memory grows by more than 500 MiB. Prints one JSON
// value: answers by route and status, and the longest time of /health. A failure names the body by --seed and its number: the same
// seed sends it again.
//
// On a machine whose cores are all busy a check of /health waits for its turn. `worstOwn` is what the HTTP thread of the server
// computed between a request for /health and its answer (Linux: schedstat): how long a check would take with a core of its own.
// `atWorst` says what the longest check consists of [ms]: computed by that thread, and spent by it in the queue for a core; the
// rest is the client's.
//
// A further route is a row of ROUTES: its path, and a function that makes a right body. Everything else is derived from it.
import { once } from 'node:events';
import { readFileSync, rmSync, writeFileSync } from 'node:fs';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { isMainThread, parentPort, Worker, workerData } from 'node:worker_threads';
import { startServer } from './server.mjs';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    url: { type: 'string' },
    pid: { type: 'string' },
    bodies: { type: 'string', default: '20000' },
    seed: { type: 'string', default: '1' },
    'at-once': { type: 'string', default: '8' },
    'max-health-ms': { type: 'string', default: '1000' },
  },
});
const [model] = positionals;
if ((model === undefined) === (values.url === undefined))
  throw new Error('usage: node bench/fuzz-server.mjs MODEL|--url URL --pid PID [--bodies N] [--seed N] [--at-once N]');
const template = join(tmpdir(), `trefoil-fuzz-${process.pid}.jinja`);
writeFileSync(template, '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}');
const words = [
  '--device',
  'cpu',
  '--threads',
  1,
  '--cache-gb',
  1,
  '--prefix-cache-gb',
  0.1,
  '--chat-template',
  template,
];
const server = isMainThread && model && (await startServer('--model', model, ...words));
rmSync(template, { force: true });
const url = workerData?.url ?? (server ? server.url : values.url);
const pid = workerData?.pid ?? (server ? server.pid : Number(values.pid));

/** Numbers from 0 to 1 (mulberry32). */
function randomNumbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const sampling = (pick) => ({
  max_tokens: pick([0, 1, 3, 8]),
  n: pick([1, 2, 5]),
  seed: 7,
  temperature: pick([0, 1, 1.5]),
  top_p: pick([0.1, 1]),
  top_k: pick([0, 5]),
  min_p: pick([0, 0.1]),
  repetition_penalty: pick([1, 1.2, 0.9]),
  frequency_penalty: pick([0, 0.5, -2]),
  presence_penalty: pick([0, 2]),
  logit_bias: pick([
    {},
    { 65: -100 },
    { 1: 5, 2: -5 },
    Object.fromEntries(Array.from({ length: 256 }, (_, i) => [i, -100])),
  ]),
  stop: pick([[], 'a', ['b', 'c'], Array(256).fill('ab'), ['a'.repeat(16_000)]]),
  stream: pick([true, false]),
  stream_options: { include_usage: pick([true, false]) },
  ignore_eos: pick([true, false]),
  min_tokens: pick([0, 2]),
  return_token_ids: pick([true, false]),
  return_progress: pick([true, false]),
  cache_salt: pick(['', 'salt']),
  user: 'a user',
});
const schemas = [
  { type: 'object', properties: { name: { type: 'string', maxLength: 9 }, age: { type: 'integer', minimum: 0 } } },
  { type: 'array', items: { enum: ['red', 'green', 1, null] }, maxItems: 3 },
  { type: 'string', pattern: '^[a-c]{1,4}(x|y)?$' },
  { anyOf: [{ type: 'null' }, { type: 'object', required: ['a'], properties: { a: { $ref: '#' } } }] },
];
const format = (pick) => ({
  type: pick(['text', 'json_object', 'json_schema']),
  json_schema: { name: 'a', schema: pick(schemas), strict: true },
});

const messages = (pick) => ({
  max_tokens: pick([1, 90]),
  system: pick([undefined, 'Be brief.', [{ type: 'text', text: 'a' }]]),
  messages: pick([
    [{ role: 'user', content: 'Hello' }],
    [
      { role: 'user', content: [{ type: 'text', text: 'a' }] },
      {
        role: 'assistant',
        content: [
          { type: 'thinking', thinking: 'b' },
          { type: 'tool_use', id: 't', name: 'tool_0', input: {} },
        ],
      },
      { role: 'user', content: [{ type: 'tool_result', tool_use_id: 't', content: [{ type: 'text', text: 'c' }] }] },
    ],
  ]),
  tools: tools(pick, (name, input_schema) => ({ name, input_schema })),
  tool_choice: pick([undefined, { type: 'auto' }, { type: 'any' }, { type: 'tool', name: 'tool_1' }]),
  stop_sequences: pick([[], ['a']]),
  thinking: pick([undefined, { type: 'disabled' }]),
  stream: pick([true, false]),
});
const toolCount = (pick) => pick([...Array(12).fill(0), ...Array(24).fill(2), 200, 1000, 10_000]);
const toolSchemas = [
  { type: 'object', properties: { a: { type: 'string' }, b: { type: 'integer' } }, required: ['a'] },
  { type: 'object', properties: { a: { type: 'array', items: { $ref: '#' } } } },
  { type: 'object', properties: { a: { type: 'string', pattern: '^(a?){400}$' } } },
  { properties: { a: { enum: ['x', 'y'] } } },
];
const tools = (pick, form) => Array.from({ length: toolCount(pick) }, (_, i) => form(`tool_${i}`, pick(toolSchemas)));
const chatTools = (pick) => tools(pick, (name, parameters) => ({ type: 'function', function: { name, parameters } }));
const call = { id: 'call_1', type: 'function', function: { name: 'tool_0', arguments: '{"a": "b"}' } };
const deepItems = (depth) =>
  JSON.parse(`${'{"type":"message","role":"user","content":['.repeat(depth)}${']}'.repeat(depth)}`);

/** Routes, and a right body of each. */
const ROUTES = {
  '/v1/completions': (pick) => ({
    prompt: pick(['Once upon', 'x'.repeat(600), ['a', 'b'], [1, 2, 3], [[1, 2], [3]], Array(500).fill(65)]),
    logprobs: pick([0, 3, 20]),
    echo: pick([true, false]),
    ...sampling(pick),
    ...(pick([true, false, false]) ? { response_format: format(pick) } : {}),
  }),
  '/v1/chat/completions': (pick) => ({
    messages: [
      { role: 'system', content: 'Be brief.' },
      { role: 'user', content: pick(['Hello', [{ type: 'text', text: 'Hi' }], 'y'.repeat(700)]) },
      ...pick([
        [],
        [{ role: 'assistant', content: 'Yes?' }],
        [
          { role: 'assistant', tool_calls: [call] },
          { role: 'tool', tool_call_id: 'call_1', content: 'c' },
        ],
      ]),
    ],
    ...pick([
      {},
      {
        tools: chatTools(pick),
        tool_choice: pick(['none', 'auto', 'required', { type: 'function', function: { name: 'tool_1' } }]),
      },
      { tools: chatTools(pick), parallel_tool_calls: false, max_tokens: 90, ignore_eos: false, min_tokens: 0 },
    ]),
    reasoning_effort: pick(['low', 'high']),
    chat_template_kwargs: pick([{}, { enable_thinking: false }, { a: [[[]]] }]),
    max_completion_tokens: pick([1, 5]),
    logprobs: pick([true, false]),
    top_logprobs: pick([0, 5]),
    ...sampling(pick),
    ...(pick([true, false]) ? { response_format: format(pick) } : {}),
  }),
  '/v1/responses': (pick) => ({
    input: pick([
      'Hello',
      [{ role: 'user', content: [{ type: 'input_text', text: 'Hi' }] }],
      [
        { type: 'function_call', call_id: 'c', name: 'f', arguments: '{}' },
        { type: 'function_call_output', call_id: 'c', output: '4' },
      ],
      [
        { type: 'reasoning', summary: [{ type: 'summary_text', text: 'so' }] },
        { role: 'assistant', content: 'Yes' },
      ],
      [deepItems(pick([3, 200]))],
      Array(3000).fill({ role: 'user', content: 'x' }),
    ]),
    instructions: pick([undefined, 'Be brief.']),
    tools: tools(pick, (name, parameters) => ({ type: 'function', name, parameters })),
    tool_choice: pick(['auto', 'required', 'none', { type: 'function', name: 'tool_0' }]),
    max_output_tokens: pick([3, 90]),
    text: pick([undefined, { format: { type: 'json_schema', name: 'a', schema: pick(schemas) } }]),
    reasoning: pick([undefined, { effort: 'low' }]),
    stream: pick([true, false]),
    store: pick([true, false]),
  }),
  '/v1/messages': (pick) => messages(pick),
  '/v1/messages/count_tokens': (pick) => messages(pick),
  '/tokenize': (pick) => ({ prompt: pick(['a text', 'é'.repeat(300), '']) }),
  '/detokenize': (pick) => ({ tokens: pick([[1, 2, 3], Array(300).fill(66), []]) }),
  '/reader': (pick) => ({ prompt: pick(['a text that is read', 'b'.repeat(90)]) }),
};
/** Routes without a body, which get one as well, and paths that are none. */
const OTHERS = [
  '/health',
  '/metrics',
  '/v1/models',
  '/v1/models/x',
  '/reader/x/token/1',
  '/',
  '/v1/nothing',
  '/%ff',
  '//',
];

/** Values that replace right ones. */
const ODD = [
  ...[
    null,
    true,
    0,
    -1,
    1,
    0.5,
    1e-300,
    1e300,
    -1e300,
    2 ** 31,
    2 ** 53,
    4294967296,
    '',
    'a',
    '\u0000',
    '\ud800',
    '💥',
  ],
  ...[
    [],
    {},
    [[]],
    [{}],
    { a: null },
    [null],
    ['', ''],
    { __proto__: 1 },
    'x'.repeat(5000),
    Array(3000).fill(1),
    'NaN',
  ],
  ...['^(a+)+$', '(', '[', '\\', '(?=a)', '^(a?){500}$', { $ref: '#' }, { $ref: '#/x' }, { type: 'object', items: 3 }],
];
const deep = (depth) => `${'['.repeat(depth)}1${']'.repeat(depth)}`;

/** The bytes of a body: a right one, changed in up to four places as a value or as text. */
function bodyOf(make, next) {
  const pick = (list) => list[Math.floor(next() * list.length)];
  const value = structuredClone(make(pick));
  for (let changes = pick([0, 0, 0, 1, 1, 2, 4]); changes > 0; changes--) change(value, pick, next);
  const text = JSON.stringify(value);
  const kind = next();
  if (kind < 0.75) return Buffer.from(text);
  if (kind < 0.8) return Buffer.from(text.slice(0, Math.floor(next() * text.length)));
  if (kind < 0.85)
    return Buffer.from(`{${pick(['"prompt"', '"messages"', '"tools"', '"a"'])}:${deep(pick([3, 600, 20_000]))}}`);
  if (kind < 0.87)
    return Buffer.from(`{"prompt":[${Array(pick([10, 30_000, 100_000])).fill(pick([1, -1, '""', '{}', '1e9']))}]}`);
  const bytes = Buffer.from(text);
  for (let flips = pick([1, 3, 20]); flips > 0; flips--)
    bytes[Math.floor(next() * bytes.length)] = Math.floor(next() * 256);
  return bytes;
}

/** Replaces, removes or adds a member somewhere in the value. */
function change(value, pick, next) {
  let at = value;
  for (;;) {
    const keys = Object.keys(at);
    const key =
      keys.length === 0 || next() < 0.1 ? pick(['prompt', 'n', 'zz', 'type', 'logit_bias', 'tools']) : pick(keys);
    const inner = at[key];
    if (typeof inner === 'object' && inner !== null && !Array.isArray(at) && next() < 0.5) {
      at = inner;
      continue;
    }
    if (next() < 0.15) delete at[key];
    else if (!(Array.isArray(at) && at.length > 5000))
      at[Array.isArray(at) ? Math.floor(next() * (at.length + 1)) : key] = structuredClone(pick(ODD));
    return;
  }
}

/** The status and text of the answer, over a connection of its own; a part of the clients leave early. */
async function ask(path, { method = 'GET', body, leavesAfter = 0 } = {}) {
  const headers = body === undefined ? {} : { 'content-length': body.length };
  const asked = request(url + path, { agent: false, method, headers });
  asked.on('error', () => {}); // what is read then ends early
  asked.end(body);
  const [response] = await once(asked, 'response');
  if (leavesAfter > 0) {
    await Promise.race([once(response, 'data'), once(response, 'end'), setTimeout(leavesAfter)]);
    response.destroy();
    return { status: response.statusCode, text: '' };
  }
  let text = '';
  for await (const piece of response.setEncoding('utf8')) text += piece;
  return { status: response.statusCode, text };
}

const memory = () => Number(/^VmRSS:\s+(\d+)/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))[1]) / 1024;
/** Time that the server's HTTP thread has computed, and waited for a core [ms]; null where the system does not tell. */
function threadMs() {
  try {
    const [computed, waited] = readFileSync(`/proc/${pid}/task/${pid}/schedstat`, 'utf8').split(' ');
    return { computed: Number(computed) / 1e6, waited: Number(waited) / 1e6 };
  } catch {
    return null; // not Linux
  }
}
const failures = [];
const fail = (text) => {
  failures.push(text);
  if (failures.length > 20) throw new Error(`too many failures:\n${failures.join('\n')}`);
};

/** Streams one after another, and /health every 50 ms, until a message comes: in a thread of its own, as bodies take time. */
async function load() {
  const health = { checks: 0, worst: 0, over100: 0, atWorst: null, worstOwn: threadMs() && 0, ownOver100: 0 };
  const failed = [];
  let isOver = false;
  let streams = 0;
  parentPort.once('message', () => {
    isOver = true;
  });
  const body = JSON.stringify({ prompt: [1, 2, 3], max_tokens: 30, ignore_eos: true, stream: true });
  const stream = async () => {
    while (!isOver) {
      const { status, text } = await ask('/v1/completions', { method: 'POST', body });
      if (status !== 429 && !text.endsWith('data: [DONE]\n\n')) failed.push(`a stream: ${status} ${text.slice(-200)}`);
      streams += 1;
    }
  };
  const watch = async () => {
    while (!isOver) {
      const [startedAt, before] = [performance.now(), threadMs()];
      const { status } = await ask('/health');
      const [ms, after] = [performance.now() - startedAt, threadMs()];
      const own = after && before && after.computed - before.computed;
      health.checks += 1;
      if (Math.round(ms) > health.worst) {
        health.worst = Math.round(ms);
        health.atWorst = own && { computed: Math.round(own), waited: Math.round(after.waited - before.waited) };
      }
      if (ms > 100) health.over100 += 1;
      if (own) health.worstOwn = Math.max(health.worstOwn, Math.round(own));
      if (own > 100) health.ownOver100 += 1;
      if (status !== 200) failed.push(`/health: ${status}`);
      await setTimeout(50);
    }
  };
  await Promise.all([stream(), stream(), watch()]);
  parentPort.postMessage({ health, streams, failed: failed.slice(0, 20) });
}

const bodies = Number(values.bodies);
const seed = Number(values.seed);
const statuses = {};
let sent = 0;
async function fuzz() {
  while (sent < bodies) {
    const number = sent++;
    const next = randomNumbers(seed * 1_000_003 + number);
    const pick = (list) => list[Math.floor(next() * list.length)];
    const isKnown = next() < 0.9;
    const path = pick(isKnown ? Object.keys(ROUTES) : OTHERS);
    const body = bodyOf(ROUTES[path] ?? pick(Object.values(ROUTES)), next);
    const method = next() < 0.97 ? 'POST' : pick(['GET', 'PUT', 'DELETE', 'OPTIONS', 'HEAD', 'PATCH']);
    const leavesAfter = next() < 0.05 ? 1 + 20 * next() : 0;
    try {
      const { status, text } = await ask(path, { method, body, leavesAfter });
      const name = `${isKnown ? path : 'others'} ${status}`;
      statuses[name] = (statuses[name] ?? 0) + 1;
      if (status >= 500 && status !== 503)
        fail(`body ${number}: ${path} ${status} ${text.slice(0, 200)} ${body.subarray(0, 300)}`);
      if (/\n\s+at |node_modules|\.js:\d/.test(text))
        fail(`body ${number}: ${path} shows internals: ${text.slice(0, 300)}`);
      if (status === 429) await setTimeout(20);
    } catch (error) {
      if (leavesAfter === 0) fail(`body ${number}: ${path} ${error.message} ${body.subarray(0, 300)}`);
    }
  }
}

async function main() {
  await ask('/v1/completions', { method: 'POST', body: '{"prompt":"a","max_tokens":1}' });
  const before = memory();
  const loading = new Worker(new URL(import.meta.url), { workerData: { url, pid }, argv: process.argv.slice(2) });
  const startedAt = performance.now();
  await Promise.all(Array.from({ length: Number(values['at-once']) }, fuzz));
  loading.postMessage('stop');
  const [{ health, streams, failed }] = await once(loading, 'message');
  failures.push(...failed);
  await setTimeout(2000); // clients that left are noticed, memory is given back
  const stillRunning = /^trefoil:num_requests_running (\d+)/m.exec((await ask('/metrics')).text)?.[1];
  if (stillRunning !== '0') fail(`${stillRunning} requests still run`);
  const grown = memory() - before;
  if (grown > 500) fail(`memory grew by ${grown.toFixed(0)} MiB`);
  if (health.worst > Number(values['max-health-ms'])) fail(`/health took ${health.worst.toFixed(0)} ms`);
  if (health.ownOver100 > 0) fail(`the HTTP thread computed for ${health.worstOwn} ms before it answered /health`);
  const code = server ? await server.stop() : 0;
  if (code !== 0) fail(`the server ended with ${code}`);
  const round = (x) => Number(x.toFixed(0));
  console.log(
    JSON.stringify({
      ...{ bodies, seed, seconds: round((performance.now() - startedAt) / 1000), statuses, streams },
      health,
      memoryMiB: { before: round(before), grown: round(grown) },
      failures,
    }),
  );
  process.exitCode = failures.length > 0 ? 1 : 0;
}

await (isMainThread ? main() : load());
