/**
 * Load for a server with the OpenAI API: closed loop (a number of clients, each with one request at a time) or Poisson
 * arrivals, random prompts of random lengths, shared prefixes, random disconnects. Also the same model decoded without
 * a server, to compare with.
 */
import { Agent, request as httpRequest, type IncomingMessage } from 'node:http';
import type { Device } from '../device/device.js';
import { TrefoilError } from '../errors.js';
import { prefill, readTokens } from '../infer/decode.js';
import { loadModel } from '../infer/load.js';
import { DecodeCache } from '../model/cache.js';

/** The load. Lengths are drawn evenly from `[least, most]`. */
export interface ServeLoad {
  readonly url: string;
  readonly key: string | null;
  readonly requests: number;
  /** Clients of a closed loop; ignored with a rate. */
  readonly concurrency: number;
  /** Mean arrivals per second (Poisson); null for a closed loop. */
  readonly rate: number | null;
  readonly promptTokens: readonly [least: number, most: number];
  readonly outputTokens: readonly [least: number, most: number];
  /** Tokens that all prompts begin with. */
  readonly sharedPrefix: number;
  /** Share of requests whose client disconnects at a random moment. */
  readonly disconnect: number;
  readonly seed: number;
}

/** Milliseconds. */
export interface Percentiles {
  readonly p50: number | null;
  readonly p99: number | null;
  readonly max: number | null;
}

export interface ServeResult {
  readonly requests: number;
  readonly completed: number;
  /** Status 429. */
  readonly refused: number;
  readonly disconnected: number;
  /** Any other end: none is expected. */
  readonly failed: number;
  readonly seconds: number;
  /** Generated tokens of completed requests per second. */
  readonly goodput: number;
  /** Tokens per second between the last first token and the first end: all requests decode then. Null where none overlap. */
  readonly decode_tokens_per_s: number | null;
  /** From the request to the first byte of the answer, to the first token, between tokens, per token, and to the end. */
  readonly first_byte_ms: Percentiles;
  readonly ttft_ms: Percentiles;
  readonly itl_ms: Percentiles;
  readonly tpot_ms: Percentiles;
  readonly e2e_ms: Percentiles;
}

interface PreparedRequest {
  readonly body: Buffer;
  /** Tokens that it asks for. */
  readonly tokens: number;
  /** The client disconnects after this share of the tokens; null if it stays. */
  readonly leaves: number | null;
  /** Milliseconds since the request before it. */
  readonly gap: number;
}

interface Sample {
  readonly end: 'completed' | 'refused' | 'disconnected' | 'failed';
  readonly startedAt: number;
  readonly firstByteAt: number;
  readonly tokensAt: readonly number[];
  readonly endedAt: number;
}

export async function loadServer(load: ServeLoad, onDone: (done: number) => void = () => {}): Promise<ServeResult> {
  const agent = new Agent({ keepAlive: true, maxSockets: Number.POSITIVE_INFINITY });
  const card = await models(load, agent);
  const random = randomNumbers(load.seed);
  const whole = ([least, most]: readonly [number, number]) => least + Math.floor(random() * (most - least + 1));
  const prefix = Array.from({ length: load.sharedPrefix }, () => Math.floor(random() * card.vocabulary));
  // Drawn before the load begins, so that a seed names one load whatever the order of answers.
  // Written before it begins, too: otherwise the time to the first byte has the client's time for the requests sent with it.
  const bodies = Array.from({ length: load.requests }, (_, i): PreparedRequest => {
    const text = Array.from({ length: whole(load.promptTokens) }, () => Math.floor(random() * card.vocabulary));
    const tokens = whole(load.outputTokens);
    const settings = { ignore_eos: true, temperature: 0, seed: i, stream: true, return_token_ids: true };
    const body = { model: card.id, prompt: [...prefix, ...text], max_tokens: tokens, ...settings };
    return {
      body: Buffer.from(JSON.stringify(body)),
      tokens,
      leaves: random() < load.disconnect ? random() : null,
      gap: load.rate === null ? 0 : (-1000 * Math.log(1 - random())) / load.rate,
    };
  });
  const samples: Sample[] = [];
  const startedAt = performance.now();
  const one = async (request: PreparedRequest) => {
    samples.push(await complete(load, agent, request));
    onDone(samples.length);
  };
  if (load.rate === null) {
    let next = 0;
    const client = async () => {
      while (next < bodies.length) await one(bodies[next++]);
    };
    await Promise.all(Array.from({ length: Math.min(load.concurrency, bodies.length) }, client));
  } else {
    const pending: Promise<void>[] = [];
    let at = performance.now();
    for (const body of bodies) {
      at += body.gap;
      await new Promise((resolve) => setTimeout(resolve, at - performance.now()));
      pending.push(one(body));
    }
    await Promise.all(pending);
  }
  agent.destroy();
  return summary(samples, (performance.now() - startedAt) / 1000);
}

async function models(load: ServeLoad, agent: Agent): Promise<{ id: string; vocabulary: number }> {
  const response = await send(load, agent, 'GET', '/v1/models', null);
  let text = '';
  for await (const piece of response) text += piece;
  if (response.statusCode !== 200) throw new TrefoilError(`${load.url}/v1/models: status ${response.statusCode}`);
  const [{ id, vocab_size: vocabulary = 256 }] = (JSON.parse(text) as { data: { id: string; vocab_size?: number }[] })
    .data;
  return { id, vocabulary };
}

function send(
  load: ServeLoad,
  agent: Agent,
  method: string,
  path: string,
  body: Buffer | null,
): Promise<IncomingMessage> {
  const headers = load.key === null ? {} : { authorization: `Bearer ${load.key}` };
  return new Promise((resolve, reject) => {
    const request = httpRequest(new URL(path, load.url), { agent, method, headers }, resolve);
    request.on('error', reject);
    request.end(body ?? undefined);
  });
}

async function complete(load: ServeLoad, agent: Agent, { body, tokens, leaves }: PreparedRequest): Promise<Sample> {
  const startedAt = performance.now();
  const tokensAt: number[] = [];
  let firstByteAt = Number.NaN;
  const sample = (end: Sample['end']): Sample => ({
    end,
    startedAt,
    firstByteAt,
    tokensAt,
    endedAt: performance.now(),
  });
  try {
    const response = await send(load, agent, 'POST', '/v1/completions', body);
    if (response.statusCode !== 200) {
      response.resume();
      return sample(response.statusCode === 429 ? 'refused' : 'failed');
    }
    let rest = '';
    for await (const piece of response as AsyncIterable<Buffer>) {
      firstByteAt = Number.isNaN(firstByteAt) ? performance.now() : firstByteAt;
      rest += piece.toString('utf8');
      const frames = rest.split('\n\n');
      rest = frames.pop() ?? '';
      for (const frame of frames) {
        if (frame === 'data: [DONE]') return sample(tokensAt.length === tokens ? 'completed' : 'failed');
        const ids = /"token_ids":\[([\d,]*)\]/.exec(frame)?.[1] ?? '';
        if (ids !== '') for (const _ of ids.split(',')) tokensAt.push(performance.now());
      }
      if (leaves !== null && tokensAt.length >= leaves * tokens) {
        response.destroy();
        return sample('disconnected');
      }
    }
    return sample('failed');
  } catch {
    return sample('failed'); // counted: the result names how many
  }
}

function summary(samples: readonly Sample[], seconds: number): ServeResult {
  const of = (end: Sample['end']) => samples.filter((sample) => sample.end === end);
  const completed = of('completed');
  const tokens = completed.reduce((sum, { tokensAt }) => sum + tokensAt.length, 0);
  const from = Math.max(...completed.map(({ tokensAt }) => tokensAt[0]));
  const to = Math.min(...completed.map(({ tokensAt }) => tokensAt[tokensAt.length - 1]));
  const inside = completed.reduce(
    (sum, { tokensAt }) => sum + tokensAt.filter((at) => at > from && at <= to).length,
    0,
  );
  return {
    requests: samples.length,
    completed: completed.length,
    refused: of('refused').length,
    disconnected: of('disconnected').length,
    failed: of('failed').length,
    seconds,
    goodput: tokens / seconds,
    decode_tokens_per_s: to > from ? (1000 * inside) / (to - from) : null,
    first_byte_ms: percentiles(completed.map(({ firstByteAt, startedAt }) => firstByteAt - startedAt)),
    ttft_ms: percentiles(completed.map(({ tokensAt, startedAt }) => tokensAt[0] - startedAt)),
    itl_ms: percentiles(completed.flatMap(({ tokensAt }) => tokensAt.slice(1).map((at, i) => at - tokensAt[i]))),
    tpot_ms: percentiles(
      completed.flatMap(({ tokensAt }) =>
        tokensAt.length < 2 ? [] : [(tokensAt[tokensAt.length - 1] - tokensAt[0]) / (tokensAt.length - 1)],
      ),
    ),
    e2e_ms: percentiles(completed.map(({ endedAt, startedAt }) => endedAt - startedAt)),
  };
}

function percentiles(values: readonly number[]): Percentiles {
  const sorted = [...values].sort((a, b) => a - b);
  const at = (share: number) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? null;
  return { p50: at(0.5), p99: at(0.99), max: at(1) };
}

/** Deterministic numbers in [0, 1). */
function randomNumbers(seed: number): () => number {
  let state = (seed + 1) * 0x9e3779b1;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

/** Tokens per second of `batch` sequences of `prompt` tokens that grow by `tokens`, without a server. */
export function measureDecode(
  device: Device,
  path: string,
  { batch, prompt, tokens }: { readonly batch: number; readonly prompt: number; readonly tokens: number },
): number {
  const { model } = loadModel(device, path);
  const cache = new DecodeCache(device, model.shape, model.dtype);
  const sequences = Array.from({ length: batch }, () => cache.sequence());
  const vocabulary = model.shape.vocabSize;
  const prompts = sequences.map((_, row) => Array.from({ length: prompt }, (_, i) => (i * 7919 + row) % vocabulary));
  try {
    let logits = prefill(model, sequences, prompts);
    const startedAt = performance.now();
    for (let i = 0; i < tokens; i++) logits = readTokens(model, sequences, logits.map(argmax));
    return (1000 * batch * tokens) / (performance.now() - startedAt);
  } finally {
    for (const sequence of sequences) sequence.free();
    model.free();
  }
}

function argmax(logits: Float32Array): number[] {
  let best = 0;
  for (let token = 1; token < logits.length; token++) if (logits[token] > logits[best]) best = token;
  return [best];
}
