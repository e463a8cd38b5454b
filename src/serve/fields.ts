/** Fields of the bodies of requests: types, bounds, defaults, and parameters of the API that are not supported. */

import { HttpError } from '../http/error.js';
import { MAX_BIAS, MAX_PENALTY, MAX_SHIFT, MIN_PENALTY } from '../infer/engine/sampler.js';
import * as z from '../zod.js';

const MAX_LOGPROBS = 20;
const MAX_TOOLS = 1024;
/** As JSON. Answers of one protocol repeat it. */
const MAX_METADATA = 2 ** 14;
/** Stop strings, and their bytes together. */
const MAX_STOPS = 256;
const MAX_STOP_BYTES = 2 ** 14;
/** Unknown fields that are named. */
export const MAX_UNKNOWN = 20;
/** Characters of what a client sent that are repeated in a message. */
const MAX_SHOWN = 200;

const isToken = (value: unknown) => Number.isSafeInteger(value) && (value as number) >= 0;
const isStop = (value: unknown) => typeof value === 'string' && value !== '';
const areStops = (values: readonly unknown[]) =>
  values.length <= MAX_STOPS &&
  values.every(isStop) &&
  (values as string[]).reduce((sum, stop) => sum + Buffer.byteLength(stop), 0) <= MAX_STOP_BYTES;
/** Not a record of zod: that takes a microsecond for every token. */
const isBiases = (value: unknown) =>
  typeof value === 'object' &&
  value !== null &&
  !Array.isArray(value) &&
  Object.entries(value).every(
    ([token, bias]) => /^\d{1,9}$/.test(token) && typeof bias === 'number' && Math.abs(bias) <= MAX_BIAS,
  );
const isListOf = (value: unknown, isOne: (one: unknown) => boolean) =>
  Array.isArray(value) && value.length > 0 && value.every(isOne);
/** Not arrays of zod: those take a microsecond for every one of 100,000 tokens. */
const prompt = z.custom<string | string[] | number[] | number[][] | Int32Array>(
  (value) =>
    typeof value === 'string' ||
    value instanceof Int32Array || // parseBody has checked it
    isListOf(value, (one) => typeof one === 'string') ||
    isListOf(value, isToken) ||
    isListOf(value, (one) => isListOf(one, isToken)),
  'expected a text, a list of texts, a list of tokens, or a list of such lists',
);
/** Not arrays of zod: those go on after the first item that is wrong, with an error for each. */
const listOf = <T>(item: z.ZodType<T>) =>
  z.array(z.unknown()).transform((items, context): T[] => {
    const good: T[] = [];
    for (const [i, value] of items.entries()) {
      const { success, data, error } = item.safeParse(value);
      if (!success) {
        const [{ message, path }] = error.issues;
        context.addIssue({ code: 'custom', message, path: [i, ...path] });
        return z.NEVER;
      }
      good.push(data);
    }
    return good;
  });
const tokenList = z.custom<number[]>(
  (value) => Array.isArray(value) && value.every(isToken),
  'expected a list of tokens',
);
const responseFormat = z.discriminatedUnion('type', [
  z.strictObject({ type: z.literal('text') }),
  z.strictObject({ type: z.literal('json_object') }),
  z.strictObject({
    type: z.literal('json_schema'),
    json_schema: z.strictObject({
      name: z.string().optional(),
      description: z.string().optional(),
      schema: z.record(z.string(), z.unknown()),
      // The schema always holds, strict or not.
      strict: z.boolean().nullish(),
    }),
  }),
]);
export const sampling = {
  model: z.string().optional(),
  n: z.int().min(1).max(128).default(1),
  seed: z.int().min(0).optional(),
  stop: z
    .custom<string | string[]>(
      (value) => areStops(Array.isArray(value) ? value : [value]),
      `expected a text, or a list of up to ${MAX_STOPS}, none empty, with up to ${MAX_STOP_BYTES} bytes together`,
    )
    .default([]),
  stream: z.boolean().default(false),
  stream_options: z.looseObject({ include_usage: z.boolean().nullish() }).optional(),
  temperature: z.number().min(0).default(1),
  top_p: z.number().gt(0).max(1).default(1),
  top_k: z.int().min(-1).default(0),
  min_p: z.number().min(0).max(1).default(0),
  repetition_penalty: z.number().min(MIN_PENALTY).max(MAX_PENALTY).default(1),
  frequency_penalty: z.number().min(-MAX_SHIFT).max(MAX_SHIFT).default(0),
  presence_penalty: z.number().min(-MAX_SHIFT).max(MAX_SHIFT).default(0),
  logit_bias: z
    .custom<Record<string, number>>(
      isBiases,
      `expected an object of token ids with biases from -${MAX_BIAS} to ${MAX_BIAS}`,
    )
    .default({}),
  ignore_eos: z.boolean().default(false),
  min_tokens: z.int().min(0).default(0),
  return_token_ids: z.boolean().default(false),
  return_progress: z.boolean().default(false),
  cache_salt: z.string().default(''),
  response_format: responseFormat.default({ type: 'text' }),
  // Accepted without effect: they describe the caller.
  user: z.string().optional(),
  metadata: z
    .unknown()
    .refine((value) => JSON.stringify(value ?? null).length <= MAX_METADATA, `has more than ${MAX_METADATA} characters`)
    .optional(),
};

export const completion = z.looseObject({
  ...sampling,
  prompt,
  max_tokens: z.int().min(0).default(16),
  logprobs: z.int().min(0).max(MAX_LOGPROBS).optional(),
  echo: z.boolean().default(false),
});

export const tool = z.looseObject({
  type: z.literal('function'),
  function: z.looseObject({
    name: z.string().regex(/^[\w.:/-]{1,128}$/, 'expected up to 128 letters, digits, and _ . : / -'),
    description: z.string().nullish(),
    parameters: z.record(z.string(), z.unknown()).nullish(),
    // The schema always holds, strict or not.
    strict: z.boolean().nullish(),
  }),
});
const toolChoice = z.union(
  [
    z.enum(['none', 'auto', 'required']),
    z.looseObject({ type: z.literal('function'), function: z.looseObject({ name: z.string() }) }),
  ],
  'expected none, auto, required, or a function with its name',
);
/** Variables of a template that the request sets by fields of their own. */
const RESERVED = ['messages', 'tools', 'add_generation_prompt'];

const part = z.strictObject({ type: z.literal('text'), text: z.string() });
const content = z.union([z.string(), listOf(part)], 'expected a text, or a list of parts of the type text');
export const message = z.looseObject({ role: z.string().min(1), content: content.nullish() });
export const chat = z.looseObject({
  ...sampling,
  messages: listOf(message).refine(({ length }) => length > 0, 'expected at least one message'),
  max_tokens: z.int().min(1).optional(),
  max_completion_tokens: z.int().min(1).optional(),
  tools: listOf(tool)
    .refine(({ length }) => length <= MAX_TOOLS, `expected at most ${MAX_TOOLS} tools`)
    .default([]),
  tool_choice: toolChoice.default('auto'),
  parallel_tool_calls: z.boolean().default(true),
  reasoning_effort: z.string().optional(),
  chat_template_kwargs: z
    .record(z.string(), z.unknown())
    .refine((given) => !RESERVED.some((name) => name in given), `expected none of ${RESERVED.join(', ')}`)
    .default({}),
  logprobs: z.boolean().default(false),
  top_logprobs: z.int().min(0).max(MAX_LOGPROBS).optional(),
});

/**
 * Parameters of the OpenAI API that at least one route does not support, with the values that ask for nothing. A route whose
 * schema has the name is not concerned.
 */
const NEUTRAL_VALUES: Readonly<Record<string, readonly unknown[]>> = {
  best_of: [1],
  suffix: [''],
  tools: [[]],
  tool_choice: ['none'],
  functions: [[]],
  function_call: ['none'],
  parallel_tool_calls: [true, false],
  modalities: [['text']],
  audio: [],
  prediction: [],
  reasoning_effort: [],
  web_search_options: [],
  store: [false],
  service_tier: ['auto', 'default'],
  verbosity: [],
};

export const readingBody = z.strictObject({
  model: z.string().optional(),
  prompt: z.string().min(1).optional(),
  messages: listOf(message).optional(),
});

export const tokenizeBody = z.strictObject({ prompt: z.string(), model: z.string().optional() });
export const detokenizeBody = z.strictObject({ tokens: tokenList, model: z.string().optional() });

/** Whether the value is a neutral one, which is at most a list of texts: a value may be nested too deeply to be compared. */
function isSame(value: unknown, neutral: unknown): boolean {
  if (typeof neutral !== 'object' || neutral === null) return value === neutral;
  if (typeof value !== 'object' || value === null || Array.isArray(value) !== Array.isArray(neutral)) return false;
  const [given, wanted] = [Object.values(value), Object.values(neutral)];
  return given.length === wanted.length && given.every((one, i) => one === wanted[i]);
}

/** Checks a body: types, parameters that are not supported, fields that are not known, the name of the model. */
export function check<T extends { model?: string | undefined; stream_options?: object | undefined }>(
  schema: z.ZodType<T> & { readonly shape: object },
  body: unknown,
  model: { readonly id: string },
): { known: T; unknown: string[] } {
  const given = withoutNulls(body);
  for (const [name, neutral] of Object.entries(NEUTRAL_VALUES)) {
    const value = given[name];
    if (value === undefined || Object.hasOwn(schema.shape, name)) continue;
    if (!neutral.some((one) => isSame(value, one)))
      throw new HttpError(400, `the parameter ${name} is not supported`, {
        param: name,
        code: 'unsupported_parameter',
      });
  }
  const parsed = schema.safeParse(given);
  if (!parsed.success) throw invalid(parsed.error);
  if (parsed.data.model !== undefined && parsed.data.model !== model.id)
    throw new HttpError(
      404,
      `there is no model ${JSON.stringify(parsed.data.model.slice(0, MAX_SHOWN))}; this server has ${model.id}`,
      {
        param: 'model',
        code: 'model_not_found',
      },
    );
  const options = Object.keys(parsed.data.stream_options ?? {}).filter((name) => name !== 'include_usage');
  const unknown = Object.keys(given)
    .filter((name) => !Object.hasOwn(schema.shape, name) && !Object.hasOwn(NEUTRAL_VALUES, name))
    .concat(options.map((name) => `stream_options.${name}`))
    .slice(0, MAX_UNKNOWN);
  return { known: parsed.data, unknown };
}

/** The fields of a body; null means that a field is not given. */
export function withoutNulls(body: unknown): Record<string, unknown> {
  if (typeof body !== 'object' || body === null || Array.isArray(body))
    throw new HttpError(400, 'the body must be a JSON object');
  return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null));
}

export function invalid(error: z.ZodError): HttpError {
  const [issue] = error.issues;
  const path = issue.path.join('.').slice(0, MAX_SHOWN);
  return new HttpError(
    400,
    `${path === '' ? 'body' : path}: ${issue.message.slice(0, MAX_SHOWN)}`,
    path === '' ? {} : { param: path },
  );
}
