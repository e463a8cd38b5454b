/** Reads the cases of `eval long` with a server that speaks the OpenAI API: `/v1/completions` with `echo` and `logprobs`. */

import { UsageError } from '../../errors.js';
import * as z from '../../zod.js';
import type { Reader, Scores } from './evaluate.js';
import { ANSWER_TOKENS } from './model-reader.js';

const answer = z.looseObject({
  choices: z.array(
    z.looseObject({
      text: z.string(),
      logprobs: z
        .looseObject({ tokens: z.array(z.string()), token_logprobs: z.array(z.number().nullable()) })
        .nullish(),
    }),
  ),
  usage: z.looseObject({ prompt_tokens: z.int() }).nullish(),
});
const models = z.looseObject({ data: z.array(z.looseObject({ id: z.string() })).min(1) });

export interface Server {
  /** `http://HOST:PORT`, with or without `/v1`. */
  readonly url: string;
  /** Default: the first that the server lists. */
  readonly model?: string | undefined;
  /** Sent as a bearer token. */
  readonly key?: string | undefined;
}

export async function serverReader(server: Server): Promise<Reader & { readonly model: string }> {
  const model = server.model ?? (await ask(server, 'models', models)).data[0].id;
  const complete = (body: object) => ask(server, 'completions', answer, { model, temperature: 0, ...body });
  return {
    model,
    async score(prompt, candidates): Promise<Scores> {
      const logprobs: number[] = [];
      for (const candidate of candidates) {
        const wanted = ` ${candidate}`;
        // Some servers refuse to generate nothing; what they generate is left out again.
        const body = { prompt: prompt + wanted, echo: true, logprobs: 1, max_tokens: 1 };
        const { choices, usage } = await complete(body);
        const listed = choices[0]?.logprobs;
        if (!listed || !usage)
          throw new UsageError(
            `--url: ${server.url} returns no log-probabilities of the prompt (echo with logprobs); it cannot be measured this way`,
          );
        logprobs.push(sumOfEnd(listed.tokens.slice(0, usage.prompt_tokens), listed.token_logprobs, wanted, server.url));
      }
      return { logprobs, seen: null };
    },
    async generate(prompt) {
      return (await complete({ prompt, max_tokens: ANSWER_TOKENS, stop: ['\n'] })).choices[0]?.text ?? '';
    },
  };
}

/** The log-probabilities of the last tokens, which together are `text`. */
function sumOfEnd(tokens: readonly string[], logprobs: readonly (number | null)[], text: string, url: string): number {
  let [sum, at, end] = [0, tokens.length, ''];
  while (end.length < text.length && at > 0) {
    at -= 1;
    end = tokens[at] + end;
    sum += logprobs[at] ?? 0;
  }
  if (!end.endsWith(text))
    throw new UsageError(`--url: the tokens that ${url} echoes end with "${end}", not with "${text}"`);
  return sum;
}

async function ask<T>({ url, key }: Server, path: string, schema: z.ZodType<T>, body?: object): Promise<T> {
  const address = `${url.replace(/\/+$/, '').replace(/\/v1$/, '')}/v1/${path}`;
  const request = {
    method: body ? 'POST' : 'GET',
    headers: { 'content-type': 'application/json', ...(key && { authorization: `Bearer ${key}` }) },
    ...(body && { body: JSON.stringify(body) }),
  };
  let response: Response;
  try {
    response = await fetch(address, request);
  } catch (error) {
    const { cause } = error as Error;
    throw new UsageError(`--url: ${address} cannot be reached: ${(cause as Error | undefined)?.message ?? error}`);
  }
  const text = await response.text();
  if (!response.ok) throw new UsageError(`--url: ${address} answered ${response.status}: ${text.slice(0, 300)}`);
  const parsed = schema.safeParse(jsonOrNull(text));
  if (!parsed.success) throw new UsageError(`--url: ${address} is not an OpenAI server: ${text.slice(0, 200)}`);
  return parsed.data;
}

function jsonOrNull(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null; // refused by the schema
  }
}
