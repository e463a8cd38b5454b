/** Bodies of requests: checked, with the defaults of the OpenAI API, turned into requests to the engine. */
import { randomInt } from 'node:crypto';
import { z } from 'zod';
import { applyChatTemplate, type ChatMessage } from '../data/chat.js';
import type { ChatTemplates, Tokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { tokenBeyond } from '../infer/engine/request.js';
import { encodePrompt } from '../infer/generate.js';
import type { JsonSchema } from '../infer/structured/schema.js';
import type { ResponseFormat, StructuredOutput } from '../infer/structured/structured-output.js';
import { ApiError } from './errors.js';
import type { HostRequest, ModelInfo } from './host.js';

/** Choices of one request: prompts times `n`. */
const MOST_CHOICES = 256;
const MOST_LOGPROBS = 20;

const isToken = (value: unknown) => Number.isSafeInteger(value) && (value as number) >= 0;
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
const sampling = {
  model: z.string().optional(),
  n: z.int().min(1).max(128).default(1),
  seed: z.int().min(0).optional(),
  stop: z
    .union(
      [z.string().min(1), z.array(z.string().min(1)).max(4)],
      'expected a text, or a list of up to four, none empty',
    )
    .default([]),
  stream: z.boolean().default(false),
  stream_options: z.strictObject({ include_usage: z.boolean().default(false) }).optional(),
  temperature: z.number().min(0).default(1),
  top_p: z.number().gt(0).max(1).default(1),
  top_k: z.int().min(-1).default(0),
  min_p: z.number().min(0).max(1).default(0),
  repetition_penalty: z.number().gt(0).default(1),
  ignore_eos: z.boolean().default(false),
  min_tokens: z.int().min(0).default(0),
  return_token_ids: z.boolean().default(false),
  return_progress: z.boolean().default(false),
  cache_salt: z.string().default(''),
  response_format: responseFormat.default({ type: 'text' }),
  // Accepted without effect: they describe the caller.
  user: z.string().optional(),
  metadata: z.unknown().optional(),
};

const completion = z.looseObject({
  ...sampling,
  prompt,
  max_tokens: z.int().min(0).default(16),
  logprobs: z.int().min(0).max(MOST_LOGPROBS).optional(),
  echo: z.boolean().default(false),
});

const part = z.strictObject({ type: z.literal('text'), text: z.string() });
const content = z.union([z.string(), z.array(part)], 'expected a text, or a list of parts of the type text');
const message = z.looseObject({ role: z.string().min(1), content: content.nullish() });
const chat = z.looseObject({
  ...sampling,
  messages: z.array(message).min(1),
  max_tokens: z.int().min(1).optional(),
  max_completion_tokens: z.int().min(1).optional(),
  logprobs: z.boolean().default(false),
  top_logprobs: z.int().min(0).max(MOST_LOGPROBS).optional(),
});

/** Parameters of the OpenAI API that are not supported, with the values that ask for nothing. */
const NEUTRAL: Readonly<Record<string, readonly unknown[]>> = {
  frequency_penalty: [0],
  presence_penalty: [0],
  logit_bias: ['{}'],
  best_of: [1],
  suffix: [''],
  tools: ['[]'],
  tool_choice: ['none'],
  functions: ['[]'],
  function_call: ['none'],
  parallel_tool_calls: [true, false],
  modalities: ['["text"]'],
  audio: [],
  prediction: [],
  reasoning_effort: [],
  web_search_options: [],
  store: [false],
  service_tier: ['auto', 'default'],
  verbosity: [],
};

/** One prompt: its tokens, and its text if it was given as text. */
export interface Prompt {
  /** Of a text they are computed when they are first read, which may throw an `ApiError`. */
  readonly tokens: readonly number[] | Int32Array;
  readonly text: string | null;
}

/** Texts of more characters are accepted before their tokens are computed, if their bytes are fewer than the tokens that fit. */
const LONG_TEXT = 4096;
/** Bytes of a token of an ordinary text, for an estimate. */
const TOKEN_BYTES = 4;

/** A checked request for completions, of a prompt or of a chat. */
export interface Job {
  readonly kind: 'completion' | 'chat';
  readonly prompts: readonly Prompt[];
  readonly n: number;
  /** Tokens of all choices' prompts, estimated for texts whose tokens are not computed yet. */
  readonly promptTokens: number;
  readonly stream: boolean;
  readonly includeUsage: boolean;
  readonly echo: boolean;
  /** Number of most probable tokens listed for every token; null for no log-probabilities. */
  readonly logprobs: number | null;
  readonly returnTokenIds: boolean;
  readonly returnProgress: boolean;
  /** Fields of the body that no part of the server knows. */
  readonly unknown: readonly string[];
  /** The request of choice `index`; choices are numbered prompt by prompt. */
  request(index: number): HostRequest;
}

/** What bodies are checked against. */
export interface ServedModel {
  readonly id: string;
  readonly info: ModelInfo;
  readonly tokenizer: Tokenizer;
  /** The chat templates of the tokenizer, or the one that the server was given. */
  readonly chat: ChatTemplates | null;
  /** Checks response formats; the engine applies them. */
  readonly structured: StructuredOutput;
}

export function parseCompletion(body: unknown, model: ServedModel): Job {
  const { known, unknown } = check(completion, body, model);
  const prompts = promptsOf(known.prompt, model);
  const logprobs = known.logprobs ?? null;
  return jobOf('completion', known, prompts, model, {
    unknown,
    logprobs,
    echo: known.echo,
    maxNewTokens: known.max_tokens,
  });
}

export function parseChat(body: unknown, model: ServedModel): Job {
  const { known, unknown } = check(chat, body, model);
  if (known.top_logprobs !== undefined && !known.logprobs)
    throw new ApiError(400, 'top_logprobs needs logprobs: true', { param: 'top_logprobs' });
  const tokens = chatTokens(contents(known.messages), model);
  if (tokens.length === 0) throw new ApiError(400, 'the messages give an empty prompt', { param: 'messages' });
  const room = Math.min(model.info.maxContext, model.info.maxTokens) - tokens.length;
  const maxNewTokens = known.max_completion_tokens ?? known.max_tokens ?? Math.max(1, room);
  const logprobs = known.logprobs ? (known.top_logprobs ?? 0) : null;
  return jobOf('chat', known, [{ tokens, text: null }], model, { unknown, logprobs, echo: false, maxNewTokens });
}

interface Details {
  readonly unknown: readonly string[];
  readonly logprobs: number | null;
  readonly echo: boolean;
  readonly maxNewTokens: number;
}

type Sampling = z.infer<z.ZodObject<typeof sampling>>;

function jobOf(
  kind: Job['kind'],
  known: Sampling,
  prompts: readonly Prompt[],
  model: ServedModel,
  details: Details,
): Job {
  const { n, stream, temperature, top_p: topP, min_p: minP, repetition_penalty: repetitionPenalty } = known;
  const { unknown, logprobs, echo, maxNewTokens } = details;
  if (prompts.length * n > MOST_CHOICES)
    throw new ApiError(400, `${prompts.length * n} choices were asked for; at most ${MOST_CHOICES}`, { param: 'n' });
  const format = responseFormatOf(known);
  const most = Math.min(model.info.maxContext, model.info.maxTokens) - maxNewTokens;
  const isLater = ({ text }: Prompt) =>
    stream && !format && text !== null && text.length > LONG_TEXT && Buffer.byteLength(text) < most;
  const fitting = (prompt: Prompt) => {
    expectRoom(prompt.tokens.length, kind, model.info, maxNewTokens);
    return prompt;
  };
  for (const prompt of prompts) if (!isLater(prompt)) fitting(prompt);
  if (format) for (const { tokens } of prompts) expectDocument(format, tokens.length, model, maxNewTokens);
  const seed = known.seed ?? randomInt(2 ** 32);
  const topK = Math.max(0, known.top_k);
  const stop = typeof known.stop === 'string' ? [known.stop] : known.stop;
  const listed = logprobs === null ? {} : { logprobs };
  const sizeOf = (prompt: Prompt) =>
    isLater(prompt) ? Math.ceil((prompt.text ?? '').length / TOKEN_BYTES) : prompt.tokens.length;
  return {
    kind,
    prompts,
    n,
    promptTokens: n * prompts.reduce((sum, prompt) => sum + sizeOf(prompt), 0),
    stream,
    includeUsage: known.stream_options?.include_usage ?? false,
    echo,
    logprobs,
    returnTokenIds: known.return_token_ids,
    returnProgress: known.return_progress,
    unknown,
    request: (index) => ({
      prompt: fitting(prompts[Math.floor(index / n)]).tokens,
      maxNewTokens,
      minNewTokens: known.min_tokens,
      stop,
      ignoreSeparator: known.ignore_eos,
      cacheSalt: known.cache_salt,
      ...listed,
      ...(echo && logprobs !== null ? { promptLogprobs: logprobs } : {}),
      ...(format ? { responseFormat: format } : {}),
      // Choices of one prompt differ by their seeds.
      sampling: { temperature, topK, topP, minP, repetitionPenalty, seed: (seed + (index % n)) % 2 ** 53 },
    }),
  };
}

/** Refuses at once what can never be answered. */
function expectRoom(tokens: number, kind: Job['kind'], info: ModelInfo, maxNewTokens: number): void {
  const param = kind === 'chat' ? 'messages' : 'prompt';
  const most = Math.min(info.maxContext, info.maxTokens);
  if (tokens >= most)
    throw new ApiError(400, `the prompt has ${tokens} tokens; at most ${most - 1} fit`, {
      param,
      code: 'context_length_exceeded',
    });
  // Beyond the context a text ends by length; memory for all of it is reserved before it starts.
  if (Math.min(info.maxContext, tokens + maxNewTokens) > info.maxTokens)
    throw new ApiError(
      400,
      `the prompt has ${tokens} tokens and max_tokens is ${maxNewTokens}: memory is there for ${info.maxTokens} together`,
      { param: 'max_tokens', code: 'context_length_exceeded' },
    );
}

/** The form that the text must have; null for any. Such a text ends where its document ends, and nowhere else. */
function responseFormatOf(known: Sampling): ResponseFormat | null {
  const { response_format: format, stop, ignore_eos, min_tokens } = known;
  if (format.type === 'text') return null;
  const [other] = Object.entries({ stop: stop.length > 0, ignore_eos, min_tokens: min_tokens > 0 }).filter(
    ([, is]) => is,
  );
  if (other)
    throw new ApiError(400, `${other[0]} is not supported together with response_format`, {
      param: other[0],
      code: 'unsupported_parameter',
    });
  return format.type === 'json_object'
    ? format
    : { type: format.type, schema: format.json_schema.schema as JsonSchema };
}

/** Refuses a format that is not supported, or whose shortest document does not fit. */
function expectDocument(format: ResponseFormat, promptTokens: number, model: ServedModel, maxNewTokens: number): void {
  const budget = Math.min(maxNewTokens, model.info.maxContext - promptTokens);
  asBadRequest('response_format', () => model.structured.check(format, budget));
}

function promptsOf(prompt: z.infer<typeof completion>['prompt'], model: ServedModel): Prompt[] {
  if (typeof prompt === 'string') return [textPrompt(prompt, model)];
  if (prompt instanceof Int32Array || typeof prompt[0] === 'number')
    return [tokenPrompt(prompt as number[] | Int32Array, model)];
  return (prompt as (string | number[])[]).map((one) =>
    typeof one === 'string' ? textPrompt(one, model) : tokenPrompt(one, model),
  );
}

function textPrompt(text: string, model: ServedModel): Prompt {
  const { tokenizer, info } = model;
  let tokens: readonly number[] | null = null;
  return {
    text,
    get tokens() {
      tokens ??= asBadRequest('prompt', () => encodePrompt(text, tokenizer, info.vocabulary));
      return tokens;
    },
  };
}

function tokenPrompt(tokens: readonly number[] | Int32Array, { info }: ServedModel): Prompt {
  const wrong = tokenBeyond(tokens, info.vocabulary);
  if (wrong !== undefined)
    throw new ApiError(400, `${wrong} is not a token; the model has the tokens 0 to ${info.vocabulary - 1}`, {
      param: 'prompt',
    });
  return { tokens, text: null };
}

/** Messages with their parts joined. */
function contents(messages: readonly z.infer<typeof message>[]): ChatMessage[] {
  return messages.map(({ content, ...rest }) => ({
    ...rest,
    content: Array.isArray(content) ? content.map(({ text }) => text).join('') : (content ?? ''),
  }));
}

function chatTokens(
  messages: readonly ChatMessage[],
  { tokenizer, chat }: ServedModel,
  addGenerationPrompt = true,
): readonly number[] {
  if (!chat?.templates.has('default'))
    throw new ApiError(400, 'the model has no chat template: use /v1/completions, or start with --chat-template');
  return asBadRequest('messages', () => {
    const text = applyChatTemplate({ ...tokenizer, chat }, messages, { addGenerationPrompt });
    return Array.from(tokenizer.encode(text, { parseSpecial: true }));
  });
}

/** What the body caused is a bad request. */
function asBadRequest<T>(param: string, work: () => T): T {
  try {
    return work();
  } catch (error) {
    if (error instanceof UsageError) throw new ApiError(400, error.message, { param });
    throw error;
  }
}

/** Checks a body: types, parameters that are not supported, fields that are not known, the name of the model. */
function check<T extends { model?: string | undefined }>(
  schema: z.ZodType<T> & { readonly shape: object },
  body: unknown,
  model: ServedModel,
): { known: T; unknown: string[] } {
  const given = withoutNulls(body);
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    const value = given[name];
    if (value === undefined) continue;
    const shown = typeof value === 'object' ? JSON.stringify(value) : value;
    if (!neutral.includes(shown))
      throw new ApiError(400, `the parameter ${name} is not supported`, { param: name, code: 'unsupported_parameter' });
  }
  const parsed = schema.safeParse(given);
  if (!parsed.success) throw invalid(parsed.error);
  if (parsed.data.model !== undefined && parsed.data.model !== model.id)
    throw new ApiError(404, `there is no model ${JSON.stringify(parsed.data.model)}; this server has ${model.id}`, {
      param: 'model',
      code: 'model_not_found',
    });
  const unknown = Object.keys(given).filter((name) => !(name in schema.shape) && !(name in NEUTRAL));
  return { known: parsed.data, unknown };
}

/** The fields of a body; null means that a field is not given. */
function withoutNulls(body: unknown): Record<string, unknown> {
  if (typeof body !== 'object' || body === null || Array.isArray(body))
    throw new ApiError(400, 'the body must be a JSON object');
  return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null));
}

function invalid(error: z.ZodError): ApiError {
  const [issue] = error.issues;
  const path = issue.path.join('.');
  return new ApiError(400, `${path === '' ? 'body' : path}: ${issue.message}`, path === '' ? {} : { param: path });
}

const readingBody = z.strictObject({
  model: z.string().optional(),
  prompt: z.string().min(1).optional(),
  messages: z.array(message).min(1).optional(),
});

/** The tokens of a text, or of a chat with its last answer, that the reader view asks about. */
export function parseReading(body: unknown, model: ServedModel): readonly number[] {
  const parsed = readingBody.safeParse(body);
  if (!parsed.success) throw invalid(parsed.error);
  const { prompt, messages } = parsed.data;
  if ((prompt === undefined) === (messages === undefined)) throw new ApiError(400, 'give either prompt or messages');
  if (prompt !== undefined) return Array.from(textPrompt(prompt, model).tokens);
  return chatTokens(contents(messages ?? []), model, false);
}

const tokenizeBody = z.strictObject({ prompt: z.string(), model: z.string().optional() });
const detokenizeBody = z.strictObject({ tokens: z.array(z.int().min(0)), model: z.string().optional() });

export function tokenize(body: unknown, { tokenizer, info }: ServedModel): object {
  const parsed = tokenizeBody.safeParse(body);
  if (!parsed.success) throw invalid(parsed.error);
  const tokens = Array.from(asBadRequest('prompt', () => encodePrompt(parsed.data.prompt, tokenizer, info.vocabulary)));
  return { tokens, count: tokens.length, max_model_len: info.maxContext };
}

export function detokenize(body: unknown, { tokenizer, info }: ServedModel): object {
  const parsed = detokenizeBody.safeParse(body);
  if (!parsed.success) throw invalid(parsed.error);
  const wrong = parsed.data.tokens.find((id) => id >= Math.min(info.vocabulary, tokenizer.vocabSize));
  if (wrong !== undefined) throw new ApiError(400, `${wrong} is not a token`, { param: 'tokens' });
  return { prompt: tokenizer.decode(parsed.data.tokens) };
}
