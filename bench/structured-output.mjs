// Measures what structured output costs per token: a schema and a random text of it, with a vocabulary of 128k tokens
// (the first of o200k_base). Prints the time that a server takes for it before it is ready, and microseconds per token of three
// texts of a schema, and of calls of four tools: masking (a copy of the logits included), the check against the tokens left, and
// the new state. Times are of the process, so that other programs on the machine count little.
//
//   node bench/structured-output.mjs [--vocabulary 131072] [--tokens 300]
import { parseArgs } from 'node:util';
import ranks from 'gpt-tokenizer/bpeRanks/o200k_base';
import { HERMES } from '../dist/data/answer-form.js';
import { StructuredOutput } from '../dist/infer/structured/structured-output.js';

const { values } = parseArgs({
  options: { vocabulary: { type: 'string', default: '131072' }, tokens: { type: 'string', default: '300' } },
});
const vocabulary = Number(values.vocabulary);
const bytes = ranks.slice(0, vocabulary).map((text) => Buffer.from(text));
const tokenizer = {
  name: 'o200k',
  vocabSize: vocabulary,
  separator: 0,
  tokenBytes: (id) => (id === 0 ? null : bytes[id]),
};
const output = new StructuredOutput(tokenizer, vocabulary, [0]);

const person = {
  type: 'object',
  properties: {
    name: { type: 'string' },
    age: { type: 'integer', minimum: 0, maximum: 150 },
    mood: { enum: ['glad', 'sad', 'calm'] },
    about: { type: 'string', maxLength: 400 },
    friends: {
      type: 'array',
      items: {
        type: 'object',
        properties: { name: { type: 'string' }, since: { type: 'number' } },
        required: ['name'],
      },
    },
  },
  required: ['name', 'age', 'about', 'friends'],
  additionalProperties: false,
};
const tools = ['get_weather', 'find_people', 'add', 'send'].map((name) => ({ name, schema: person }));
const form = { calls: HERMES, reasoning: null };
const calls = { type: 'tool_calls', form, tools, isParallel: true, document: null };
const formats = {
  'tools, in calls': { ...calls, isRequired: true },
  'tools, free text': { ...calls, isRequired: false },
  'person schema': { type: 'json_schema', schema: person },
  json_object: { type: 'json_object' },
};

/** Microseconds that this process has computed. */
const now = () => {
  const { user, system } = process.cpuUsage();
  return user + system;
};

/** Draws evenly; inside strings mostly letters, as a model would. Returns microseconds per token by quantile. */
function pass(format, seed) {
  let state = seed;
  const random = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  const budget = Number(values.tokens);
  const mask = output.mask(format, budget);
  const times = [];
  const logits = new Float32Array(vocabulary);
  for (let drawn = 0; drawn < budget && !mask.isComplete; drawn++) {
    const startedAt = now();
    const candidates = logits.slice();
    mask.apply(candidates);
    const masked = now();
    const draw = () => {
      const from = Math.floor(random() * vocabulary);
      for (let i = 0; i < vocabulary; i++) {
        const token = (from + i) % vocabulary;
        // A text that seldom ends its strings.
        if (candidates[token] === 0 && (random() < 0.02 || !bytes[token].includes(0x22))) return token;
      }
      return candidates.indexOf(0);
    };
    let token = draw();
    const drawnAt = now();
    if (mask.narrow(token, candidates)) token = draw();
    if (token === 0) break;
    mask.accept(token);
    times.push(masked - startedAt + now() - drawnAt);
  }
  const all = times.sort((a, b) => a - b);
  const at = (share) => Math.round(all[Math.min(all.length - 1, Math.floor(share * all.length))]);
  const mean = Math.round(all.reduce((sum, us) => sum + us, 0) / all.length);
  return { tokens: all.length, mean, p50: at(0.5), p99: at(0.99), max: at(1) };
}

const startedAt = now();
output.warmUp(); // as a server before it is ready
console.log(`tree of ${vocabulary} tokens and warm-up: ${Math.round((now() - startedAt) / 1000)} ms, once per server`);
for (const [name, format] of Object.entries(formats))
  for (const [label, seed] of [
    ['first text', 1],
    ['second text', 2],
    ['third text', 3],
  ]) {
    const { tokens, mean, p50, p99, max } = pass(format, seed);
    console.log(`${name}, ${label}: ${tokens} tokens; µs per token: mean ${mean}, p50 ${p50}, p99 ${p99}, max ${max}`);
  }
