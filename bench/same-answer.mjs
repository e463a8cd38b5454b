// The same answer under load: random requests (prompts, lengths, seeds, sampling, penalties, biases, calls of tools,
// log-probabilities, cancellations, shared beginnings) alone and all together, compared.
//
//   node bench/same-answer.mjs MODEL [--requests 500] [--device cpu|cuda] [--max-batch 32] [--seed 1] [--references 100]
//
// On the CPU answers must be equal bit for bit. On CUDA kernels add in an order that depends on the size of the batch, so
// numbers are rounded to bf16 differently. The rule there: load adds no error to that of bf16. Let E be the largest
// difference between log-probabilities of answers alone and of the same tokens in f32 (--references requests). Two answers
// that are each within E of f32 differ by at most 2 E: that is the limit for the log-probabilities of the tokens until two
// answers differ, and for the gap between the two tokens where they differ (greedy requests). Prints one JSON value; the
// exit code is 1 if the rule is broken.
import { setImmediate } from 'node:timers/promises';
import { parseArgs } from 'node:util';
import { HERMES } from '../dist/data/answer-form.js';
import { createEngine, loadModel, openDevice } from '../dist/index.js';
import { readRows } from '../dist/infer/decode.js';
import { positionLogprobs } from '../dist/infer/engine/sequence.js';
import { usedVocabulary } from '../dist/infer/load.js';
import { DecodeCache } from '../dist/model/cache.js';
import { kernelOptions } from '../dist/model/kernels.js';

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    requests: { type: 'string', default: '500' },
    device: { type: 'string', default: 'auto' },
    'max-batch': { type: 'string', default: '32' },
    seed: { type: 'string', default: '1' },
    references: { type: 'string', default: '100' },
  },
});
const [path] = positionals;
if (!path) throw new Error('usage: node bench/same-answer.mjs MODEL [--requests N] [--device cpu|cuda]');
const device = openDevice(values.device, { deterministic: true });
const { model, tokenizer, config, endTokens } = loadModel(device, path);
const source = { model, tokenizer, config, endTokens };
const vocabulary = usedVocabulary(source);
const count = Number(values.requests);

let state = Number(values.seed) * 2654435761 + 1;
const next = () => {
  state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
  return state / 2 ** 32;
};
const whole = (most) => Math.floor(next() * most);
const text = (length, seed) => Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed * 13) % vocabulary);

const schema = { type: 'object', properties: { a: { type: 'integer' }, b: { enum: ['x', 'y'] } }, required: ['b'] };
/** Calls take more tokens than other answers, and end where the last one does. */
const calls = () => ({
  ...{ maxNewTokens: 120 + whole(80), minNewTokens: 0, ignoreSeparator: false, stop: [] },
  responseFormat: {
    type: 'tool_calls',
    form: { calls: HERMES, reasoning: null },
    tools: ['add', 'find'].map((name) => ({ name, schema })),
    ...{ isRequired: next() < 0.7, isParallel: next() < 0.5, document: null },
  },
});

function randomRequest() {
  const beginning = next() < 0.5 ? text(2100 + 2048 * whole(2), whole(3)) : [];
  return {
    prompt: [...beginning, ...text(1 + whole(300), 10 + whole(50))],
    maxNewTokens: whole(40),
    minNewTokens: whole(3),
    stop: next() < 0.2 ? ['e', 'ab'] : [],
    ignoreSeparator: next() < 0.2,
    cacheSalt: next() < 0.2 ? 'other' : '',
    ...(next() < 0.4 ? { logprobs: 1 + whole(4) } : {}),
    ...(next() < 0.2 ? calls() : {}),
    sampling: {
      temperature: next() < 0.4 ? 0 : 0.5 + next(),
      topK: whole(3) * 20,
      topP: next() < 0.5 ? 1 : 0.9,
      minP: next() < 0.8 ? 0 : 0.05,
      repetitionPenalty: next() < 0.9 ? 1 : 1.3,
      frequencyPenalty: next() < 0.8 ? 0 : 0.7,
      presencePenalty: next() < 0.8 ? 0 : -0.4,
      logitBias: next() < 0.8 ? {} : { [whole(vocabulary)]: -100, [whole(vocabulary)]: 3 },
      seed: whole(1e6),
    },
  };
}

async function ask(engine, request, signal) {
  const tokens = [];
  const logprobs = [];
  const abort = signal ? new AbortController() : null;
  let finish = null;
  for await (const event of engine.submit({ ...request, ...(abort ? { signal: abort.signal } : {}) })) {
    if (event.type === 'token') {
      tokens.push(event.token);
      if (event.logprobs) logprobs.push(event.logprobs.logprob);
      if (abort && tokens.length > 2) abort.abort();
    }
    if (event.type === 'end') finish = event.finishReason;
  }
  return { tokens, logprobs, finish };
}

async function withEngine(options, body) {
  const engine = createEngine(source, { maxContext: 8192, ...options });
  const result = await body(engine);
  await engine.close();
  const { running, waiting, reservedBytes, pageBytes } = engine.stats();
  if (running + waiting + reservedBytes + pageBytes > 0) throw new Error('the engine kept pages');
  return result;
}

const requests = Array.from({ length: count }, randomRequest);
const startedAt = performance.now();
const alone = await withEngine({ maxBatch: 1, prefixCacheBytes: 0 }, async (engine) => {
  const results = [];
  for (const request of requests) results.push(await ask(engine, request));
  return results;
});
const aloneSeconds = (performance.now() - startedAt) / 1000;
const { together, hits } = await withEngine(
  { maxBatch: Number(values['max-batch']), maxQueued: count, maxQueuedTokens: 1e9 },
  async (engine) => {
    const results = await Promise.all(
      requests.map(async (request, i) => {
        for (let wait = 0; wait < (i % 9) * 5; wait++) await setImmediate();
        return ask(engine, request, i % 11 === 3);
      }),
    );
    return { together: results, hits: engine.stats().prefixHits };
  },
);

/** The largest difference between log-probabilities of answers alone and of the same tokens in f32. */
function errorOfBf16() {
  const { model: exact } = loadModel(device, path, 'f32');
  const cache = new DecodeCache(device, exact.shape, exact.dtype);
  let most = Number.NaN;
  const chosen = requests.flatMap((request, i) => (alone[i].logprobs.length > 0 ? [[request, alone[i]]] : []));
  for (const [{ prompt }, { tokens, logprobs }] of chosen.slice(0, Number(values.references))) {
    const sequence = cache.sequence();
    const rows = tokens.map((_, i) => prompt.length - 1 + i);
    const read = [...prompt, ...tokens.slice(0, -1)];
    const logits = readRows(exact, [sequence], [read], rows, { kernels: kernelOptions(config) });
    sequence.free();
    for (const [i, row] of logits.entries()) {
      const difference = Math.abs(positionLogprobs(row, tokens[i], 0, vocabulary).logprob - logprobs[i]);
      if (!(difference <= most)) most = difference;
    }
  }
  exact.free();
  return most;
}

const togetherSeconds = (performance.now() - startedAt) / 1000 - aloneSeconds;
const error = device.kind === 'cpu' ? 0 : errorOfBf16();
const limit = 2 * error;

/** The log-probability of token `at` of a greedy request's answer, and of another token in its place. */
async function gapAt(request, at, other) {
  return withEngine({ maxBatch: 1, prefixCacheBytes: 0 }, async (engine) => {
    for await (const event of engine.submit({ ...request, logprobs: 20 })) {
      if (event.type !== 'token') continue;
      if (at > 0) at -= 1;
      else {
        const found = event.logprobs.top.find(({ token }) => token === other);
        return found ? event.logprobs.logprob - found.logprob : Number.POSITIVE_INFINITY;
      }
    }
    return Number.POSITIVE_INFINITY;
  });
}

let equal = 0;
let cancelled = 0;
let worst = 0;
let worstGap = 0;
const broken = [];
for (const [i, given] of together.entries()) {
  const expected = alone[i];
  const isCut = given.finish === 'aborted';
  if (isCut) cancelled += 1;
  const length = isCut ? given.tokens.length : Math.max(given.tokens.length, expected.tokens.length);
  const tokens = Array.from({ length }, (_, at) => at);
  const at = tokens.find((at) => given.tokens[at] !== expected.tokens[at]) ?? length;
  const differences = tokens
    .slice(0, at)
    .map((at) => Math.abs((given.logprobs[at] ?? 0) - (expected.logprobs[at] ?? 0)));
  const most = Math.max(0, ...differences);
  worst = Math.max(worst, most);
  if (at === length && (isCut || given.finish === expected.finish)) equal += 1;
  const { temperature, repetitionPenalty } = requests[i].sampling;
  const isGreedy = temperature === 0 && repetitionPenalty === 1;
  let gap = 0;
  if (at < length && isGreedy && expected.tokens[at] !== undefined && given.tokens[at] !== undefined)
    gap = await gapAt(requests[i], at, given.tokens[at]);
  worstGap = Math.max(worstGap, gap);
  const isExact = at === length && most === 0;
  if (device.kind === 'cpu' ? !isExact : !(most <= limit && gap <= limit)) broken.push({ request: i, at, most, gap });
}
console.log(
  JSON.stringify({
    device: device.kind,
    rule:
      device.kind === 'cpu'
        ? 'tokens and log-probabilities are equal'
        : 'log-probabilities differ by at most twice the largest error of bf16 against f32',
    requests: count,
    equal,
    different: count - equal,
    cancelled,
    cached_tokens: hits,
    largest_logprob_difference: worst,
    largest_gap_of_different_greedy_tokens: worstGap,
    error_of_bf16: error,
    limit,
    seconds_alone: Number(aloneSeconds.toFixed(1)),
    seconds_together: Number(togetherSeconds.toFixed(1)),
    broken,
  }),
);
model.free();
process.exitCode = broken.length > 0 ? 1 : 0;
