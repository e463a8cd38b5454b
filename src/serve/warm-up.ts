/**
 * Requests that a server sends to itself before it is ready. The code of a request is compiled while the first ones run,
 * which makes each of them several times as slow as later ones.
 */
import { once } from 'node:events';
import { createServer, request as httpRequest } from 'node:http';
import type { AddressInfo } from 'node:net';
import { IDLE_STATS } from '../infer/engine/interface.js';
import { parseBody } from './body.js';
import type { HostEvent, ModelHost, ModelInfo } from './host.js';
import { packLogprobs } from './logprobs.js';
import { mountModel } from './server.js';

const ROUNDS = 20;
const LONG_PROMPT = 16_384;

/** Sends requests over HTTP, with short and long prompts, to a server of its own for a model of this description. */
export async function warmUp(info: ModelInfo, id: string): Promise<void> {
  const longest = Math.min(LONG_PROMPT, info.maxContext, info.maxTokens) - 1;
  const long = bodyOf(promptOf(longest, info.vocabulary), true);
  // In one go, not request by request: the loop over the tokens would be compiled before it has seen all there is.
  for (let i = 0; i < ROUNDS; i++) parseBody(long);
  const model = mountModel(cannedAnswers(info), { id });
  const server = createServer((request, response) => void model.answer(request, response));
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  for (let i = 0; i < ROUNDS; i++) await Promise.all([post(port, long), post(port, bodyOf([0], i % 2 === 0))]);
  model.close();
  server.close();
  server.closeAllConnections();
}

/** Numbers of all lengths: code is compiled for what it has seen. */
function promptOf(length: number, vocabulary: number): number[] {
  return Array.from({ length }, (_, i) => (i * 7919) % Math.min(10 ** (1 + (i % 5)), vocabulary));
}

function bodyOf(prompt: readonly number[], stream: boolean): Buffer {
  const options = stream ? { stream, stream_options: { include_usage: true } } : {};
  return Buffer.from(JSON.stringify({ prompt, max_tokens: 1, ...options }));
}

async function post(port: number, body: Buffer): Promise<void> {
  const request = httpRequest({ port, host: '127.0.0.1', method: 'POST', path: '/v1/completions' });
  request.end(body);
  const [response] = await once(request, 'response');
  await once(response.resume(), 'end');
}

/** A host that answers every request with the same two tokens, and needs no model. */
function cannedAnswers(info: ModelInfo): ModelHost {
  const usage = {
    promptTokens: 1,
    cachedTokens: 0,
    newTokens: 2,
    queueSeconds: 0,
    prefillSeconds: 0,
    decodeSeconds: 0,
  };
  const steps: readonly HostEvent[][] = [
    [
      { type: 'progress', total: 1, cached: 0, processed: 1 },
      { type: 'prompt', logprobs: packLogprobs([]) },
      { type: 'token', token: 0, text: 'a' },
    ],
    [{ type: 'token', token: 0, text: 'b' }],
    [{ type: 'end', text: '', finishReason: 'length', usage }],
  ];
  return {
    info,
    failure: null,
    submit: (_, listener) => {
      const next = (step: number) =>
        setImmediate(() => {
          listener(steps[step]);
          if (step + 1 < steps.length) next(step + 1);
        });
      next(0);
      return () => {};
    },
    trace: async () => {},
    stats: () => IDLE_STATS,
    close: async () => {},
  };
}
