/** Bodies of requests: checked, with the defaults of the OpenAI API, turned into requests to the engine. */
import { randomInt } from 'node:crypto';
import { type AnswerForm, HERMES, opensReasoning } from '../data/answer-form.js';
import { applyChatTemplate, type ChatMessage } from '../data/chat.js';
import { prepareChat, type ToolDescription } from '../data/chat-tools.js';
import { templateForm } from '../data/template-form.js';
import { type ChatTemplates, createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { isBuiltInTokenizer } from '../data/tokenizers/built-in.js';
import { UsageError } from '../errors.js';
import { HttpError } from '../http/error.js';
import { tokenBeyond } from '../infer/engine/request.js';
import type { SamplingOptions } from '../infer/engine/sampler.js';
import { encodePrompt, longestText, refusalOf } from '../infer/prompt.js';
import type { JsonSchema } from '../infer/structured/schema.js';
import { type ResponseFormat, StructuredOutput } from '../infer/structured/structured-output.js';
import type * as z from '../zod.js';
import {
  chat,
  check,
  completion,
  detokenizeBody,
  invalid,
  MAX_UNKNOWN,
  type message,
  readingBody,
  type sampling,
  tokenizeBody,
  type tool,
  withoutNulls,
} from './fields.js';
import type { HostRequest, ModelInfo } from './host.js';
import { chatOfMessages } from './protocols/messages.js';
import { chatOfResponses } from './protocols/responses.js';
import type { Protocol } from './protocols/translation.js';

/** Choices of one request: prompts times `n`. */
const MAX_CHOICES = 256;
/** Entries of one answer: tokens that it lists, times the probabilities at each. An entry takes about 40 bytes of JSON. */
const MAX_LISTED = 2 ** 21;

/** Characters of a request that its answer repeats, a stream three times: well below what a client may leave unread. */
const MAX_ECHOED = 2 ** 22;

/** Tokens of a text that the reader view takes. */
const MAX_READ = 65_536;

/** One prompt: its tokens, and its text if the answer repeats it. */
export interface Prompt {
  readonly tokens: readonly number[] | Int32Array;
  readonly text: string | null;
}

/** Texts of more characters are accepted before their tokens are computed, if their bytes are fewer than the tokens that fit. */
export const LONG_TEXT = 4096;
/** Bytes of a token of an ordinary text, for an estimate. */
const TOKEN_BYTES = 4;

/** A checked request for completions, of a prompt or of a chat, without its prompts. Plain data. */
export interface Job {
  readonly kind: 'completion' | 'chat';
  /** The protocol of a chat that is not the one of chat completions, with JSON of the fields that the answer repeats. */
  readonly translated: { readonly protocol: Protocol; readonly echoed: string } | null;
  readonly n: number;
  /** Prompts times `n`. */
  readonly choices: number;
  /** Tokens of all choices' prompts, estimated for texts whose tokens are not computed yet. */
  readonly promptTokens: number;
  /** Entries that the answer may list: tokens times the probabilities at each. */
  readonly listed: number;
  readonly stream: boolean;
  readonly includeUsage: boolean;
  readonly echo: boolean;
  /** Number of most probable tokens listed for every token; null for no log-probabilities. */
  readonly logprobs: number | null;
  readonly returnTokenIds: boolean;
  readonly returnProgress: boolean;
  /** How the text is taken apart; null if all of it is the answer. */
  readonly answer: AnswerForm | null;
  /** Said once in the log of the server. */
  readonly note: string | null;
  /** Fields of the body that no part of the server knows, at most 20. */
  readonly unknown: readonly string[];
  /** The request of the first choice, but for its prompt. */
  readonly request: Omit<HostRequest, 'prompt'>;
}

/** The request of choice `index`; choices are numbered prompt by prompt. */
export function requestOf({ n, request }: Job, prompts: readonly Prompt[], index: number): HostRequest {
  const { sampling = {} } = request;
  // Choices of one prompt differ by their seeds.
  const seed = ((sampling.seed ?? 0) + (index % n)) % 2 ** 53;
  return { ...request, prompt: prompts[Math.floor(index / n)].tokens, sampling: { ...sampling, seed } };
}

/** A job and its prompts. */
export interface ParsedJob {
  readonly job: Job;
  readonly prompts: readonly Prompt[];
}

/** The results of reading a body, by its kind. */
export interface ParsedValues {
  readonly completion: ParsedJob;
  readonly chat: ParsedJob;
  readonly responses: ParsedJob;
  readonly messages: ParsedJob;
  /** JSON of the number of tokens of a body of `messages`. */
  readonly count: Uint8Array;
  /** The tokens of a text, or of a chat with its last answer, that the reader view asks about. */
  readonly reading: readonly number[];
  /** JSON of the answer. */
  readonly tokenize: Uint8Array;
  readonly detokenize: Uint8Array;
}

type Parsers = {
  readonly [Kind in keyof ParsedValues]: (
    body: unknown,
    model: ServedModel,
    onAccepted: OnAccepted,
  ) => ParsedValues[Kind];
};

/** How bodies are read, by kind. They throw an `HttpError` that says what is wrong. */
export const PARSERS: Parsers = {
  completion: parseCompletion,
  chat: parseChat,
  responses: (body, model) => parseTranslated('responses', body, model),
  messages: (body, model) => parseTranslated('messages', body, model),
  count: (body, model) => {
    const { job } = parseTranslated('messages', { ...withoutNulls(body), max_tokens: undefined }, model);
    return Buffer.from(JSON.stringify({ input_tokens: job.promptTokens }));
  },
  reading: parseReading,
  tokenize: (body, model) => Buffer.from(JSON.stringify(tokenize(body, model))),
  detokenize: (body, model) => Buffer.from(JSON.stringify(detokenize(body, model))),
};

/** Called with a job that is accepted before the tokens of its texts are computed. */
export type OnAccepted = (job: Job) => void;

/** The model that bodies are checked against. */
export interface ServedModel {
  readonly id: string;
  readonly info: ModelInfo;
  readonly tokenizer: Tokenizer;
  /** The chat templates of the tokenizer, or the one that the server was given. */
  readonly chat: ChatTemplates | null;
  /** Checks response formats; the engine applies them. */
  readonly structured: StructuredOutput;
}

/** The model that a server describes with `info`. `chatTemplate` replaces the template of the model's tokenizer. */
export function servedModel(id: string, info: ModelInfo, chatTemplate?: string): ServedModel {
  const tokenizer = createTokenizer(info.tokenizer);
  const chat =
    chatTemplate === undefined
      ? (tokenizer.chat ?? null)
      : { templates: new Map([['default', chatTemplate]]), variables: tokenizer.chat?.variables ?? {} };
  return { id, info, tokenizer, chat, structured: new StructuredOutput(tokenizer, info.vocabulary, []) };
}

export function parseCompletion(body: unknown, model: ServedModel, onAccepted: OnAccepted = () => {}): ParsedJob {
  const { known, unknown } = check(completion, body, model);
  const prompts = promptsOf(known.prompt, model);
  const logprobs = known.logprobs ?? null;
  const format = responseFormatOf(known);
  const details = {
    unknown,
    logprobs,
    echo: known.echo,
    maxNewTokens: known.max_tokens,
    format,
    answer: null,
    note: null,
  };
  return jobOf('completion', known, prompts, model, details, onAccepted);
}

export function parseChat(body: unknown, model: ServedModel): ParsedJob {
  const { known, unknown } = check(chat, body, model);
  if (known.top_logprobs !== undefined && !known.logprobs)
    throw new HttpError(400, 'top_logprobs needs logprobs: true', { param: 'top_logprobs' });
  const tools = toolsOf(known);
  const { tokens, answer, note } = renderedChat(known, tools, model);
  if (tokens.length === 0) throw new HttpError(400, 'the messages give an empty prompt', { param: 'messages' });
  const room = longestText(model.info) - tokens.length;
  const maxNewTokens = known.max_completion_tokens ?? known.max_tokens ?? Math.max(1, room);
  const logprobs = known.logprobs ? (known.top_logprobs ?? 0) : null;
  const format = tools.length > 0 ? toolFormat(known, tools, answer) : responseFormatOf(known);
  const isConstrained =
    format !== null && (format.type !== 'tool_calls' || format.isRequired || format.document !== null);
  const reasoning = isConstrained && answer.reasoning !== 'open' ? null : answer.reasoning;
  const details = {
    ...{ unknown, logprobs, note, maxNewTokens, echo: false },
    format: format && withReasoning(format, reasoning),
    answer: answer.calls || reasoning ? { ...answer, reasoning } : null,
  };
  return jobOf('chat', known, [{ tokens, text: null }], model, details);
}

/** A body of another protocol as a chat. */
function parseTranslated(protocol: Protocol, body: unknown, model: ServedModel): ParsedJob {
  const translate = protocol === 'responses' ? chatOfResponses : chatOfMessages;
  const { body: chatBody, echoed: repeated, unknown } = translate(withoutNulls(body));
  const { job, prompts } = parseChat(chatBody, model);
  const echoed = JSON.stringify(repeated);
  if (echoed.length > MAX_ECHOED)
    throw new HttpError(400, `instructions and tools have more than ${MAX_ECHOED} characters`, { param: 'tools' });
  const all = [...unknown, ...job.unknown].slice(0, MAX_UNKNOWN);
  return { job: { ...job, unknown: all, includeUsage: false, translated: { protocol, echoed } }, prompts };
}

/** The tools that may be called. */
function toolsOf({ tools, tool_choice: choice }: z.infer<typeof chat>): readonly z.infer<typeof tool>[] {
  const names = new Set(tools.map(({ function: { name } }) => name));
  if (names.size < tools.length) {
    const seen = new Set<string>();
    const i = tools.findIndex(({ function: { name } }) => seen.size === seen.add(name).size);
    throw new HttpError(400, `tools.${i}.function.name: another tool has this name`, { param: 'tools' });
  }
  const [needs, wanted] = typeof choice === 'string' ? [choice === 'required', null] : [true, choice.function.name];
  const wrong =
    needs && tools.length === 0
      ? 'needs at least one tool in tools'
      : wanted !== null && !names.has(wanted)
        ? 'tools has no function of this name'
        : null;
  if (wrong !== null) throw new HttpError(400, `tool_choice: ${wrong}`, { param: 'tool_choice' });
  return choice === 'none' ? [] : tools;
}

/** The prompt of a chat, and the form of its answer. */
function renderedChat(known: z.infer<typeof chat>, tools: readonly z.infer<typeof tool>[], model: ServedModel) {
  const form = templateForm(templatesOf(model));
  const described = tools.map(({ function: of, ...rest }) => ({ ...rest, function: withoutNulls(of) }));
  const prepared = asBadRequest('messages', () =>
    prepareChat(form, contents(known.messages), described as unknown as ToolDescription[]),
  );
  const effort = known.reasoning_effort === undefined ? {} : { reasoning_effort: known.reasoning_effort };
  const variables = { ...known.chat_template_kwargs, ...effort, tools: prepared.tools };
  const { text, tokens } = chatTokens(prepared.messages, model, true, variables);
  const calls = tools.length > 0 ? (form.calls ?? HERMES) : null;
  const reasoning = opensReasoning(text) ? ('open' as const) : form.mayReason ? ('possible' as const) : null;
  const note = calls && form.hasOtherCalls ? OTHER_CALLS : null;
  return { tokens, note, answer: { calls, reasoning } };
}

const OTHER_CALLS =
  'the chat template writes calls of tools in a form that is not JSON: tools are described and called in the Hermes form';

function toolFormat(
  known: z.infer<typeof chat>,
  tools: readonly z.infer<typeof tool>[],
  form: AnswerForm,
): Extract<ResponseFormat, { type: 'tool_calls' }> {
  const { tool_choice: choice, parallel_tool_calls: isParallel, ignore_eos, min_tokens } = known;
  const [other] = Object.entries({ ignore_eos, min_tokens: min_tokens > 0 }).filter(([, is]) => is);
  if (other) throw unsupportedWith(other[0], 'tools');
  const isRequired = choice !== 'auto';
  const format = isRequired ? null : responseFormatOf(known);
  if (format && form.calls?.isFirst)
    throw new HttpError(
      400,
      "response_format is not supported together with tools for this model, whose calls could be such documents: set tool_choice to 'required' or 'none'",
      { param: 'response_format', code: 'unsupported_parameter' },
    );
  const document = format === null ? null : format.type === 'json_schema' ? format.schema : { type: 'object' };
  const callable = tools
    .map(({ function: { name, parameters } }, i) => ({
      name,
      schema: (parameters ?? { type: 'object', additionalProperties: false }) as JsonSchema,
      place: `tools.${i}`,
    }))
    .filter(({ name }) => typeof choice === 'string' || choice.function.name === name);
  return { type: 'tool_calls', form, tools: callable, isRequired, isParallel, document: document as JsonSchema | null };
}

function withReasoning(format: ResponseFormat, reasoning: AnswerForm['reasoning']): ResponseFormat {
  if (format.type === 'tool_calls') return { ...format, form: { ...format.form, reasoning } };
  return reasoning === 'open' ? { ...format, afterReasoning: true } : format;
}

interface Details {
  readonly unknown: readonly string[];
  readonly logprobs: number | null;
  readonly echo: boolean;
  readonly maxNewTokens: number;
  readonly format: ResponseFormat | null;
  readonly answer: AnswerForm | null;
  readonly note: string | null;
}

type Sampling = z.infer<z.ZodObject<typeof sampling>>;

function jobOf(
  kind: Job['kind'],
  known: Sampling,
  prompts: readonly Prompt[],
  model: ServedModel,
  { unknown, logprobs, echo, maxNewTokens, format, answer, note }: Details,
  onAccepted: OnAccepted = () => {},
): ParsedJob {
  const { n, stream, temperature, top_p: topP, min_p: minP, logit_bias: logitBias } = known;
  const beyond = Object.keys(logitBias).find((token) => Number(token) >= model.info.vocabulary);
  if (beyond !== undefined)
    throw new HttpError(400, `logit_bias: ${beyond} is not a token; the model has ${model.info.vocabulary}`, {
      param: 'logit_bias',
    });
  const choices = prompts.length * n;
  expectChoices(choices);
  const most = longestText(model.info) - maxNewTokens;
  const isLater = ({ text }: Prompt) =>
    stream && !format && text !== null && text.length > LONG_TEXT && Buffer.byteLength(text) < most;
  const seed = known.seed ?? randomInt(2 ** 32);
  const topK = Math.max(0, known.top_k);
  const penalties = {
    repetitionPenalty: known.repetition_penalty,
    frequencyPenalty: known.frequency_penalty,
    presencePenalty: known.presence_penalty,
    logitBias,
  };
  const sampling: Required<SamplingOptions> = { temperature, topK, topP, minP, ...penalties, seed };
  const request = {
    maxNewTokens,
    minNewTokens: known.min_tokens,
    stop: typeof known.stop === 'string' ? [known.stop] : known.stop,
    ignoreSeparator: known.ignore_eos,
    cacheSalt: known.cache_salt,
    ...(logprobs === null ? {} : { logprobs }),
    ...(echo && logprobs !== null ? { promptLogprobs: logprobs } : {}),
    ...(format ? { responseFormat: format } : {}),
    sampling,
  };
  const job = (promptTokens: number): Job => {
    const positions = (echo || known.return_token_ids ? promptTokens : 0) + choices * newTokens(model, maxNewTokens);
    const isListed = echo || logprobs !== null || known.return_token_ids;
    return {
      ...{ kind, translated: null, n, choices, promptTokens, stream, echo, logprobs, answer, note, unknown, request },
      listed: isListed ? positions * (1 + (logprobs ?? 0)) : 0,
      includeUsage: known.stream_options?.include_usage ?? false,
      returnTokenIds: known.return_token_ids,
      returnProgress: known.return_progress,
    };
  };
  const tokensOf = (sizeOf: (prompt: Prompt) => number) => n * prompts.reduce((sum, one) => sum + sizeOf(one), 0);
  const size = (one: Prompt) => one.tokens.length;
  if (prompts.some(isLater)) {
    const rest = prompts.filter((one) => !isLater(one));
    expectPrompts(rest, kind, model, format, maxNewTokens);
    const accepted = job(
      tokensOf((one) => (isLater(one) ? Math.ceil((one.text ?? '').length / TOKEN_BYTES) : size(one))),
    );
    expectListed(accepted);
    onAccepted(accepted);
  }
  expectPrompts(prompts, kind, model, format, maxNewTokens);
  const checked = job(tokensOf(size));
  expectListed(checked);
  return { job: checked, prompts: prompts.map(({ tokens, text }) => ({ tokens, text: echo ? text : null })) };
}

function expectChoices(choices: number): void {
  if (choices > MAX_CHOICES)
    throw new HttpError(400, `${choices} choices were asked for; at most ${MAX_CHOICES}`, { param: 'n' });
}

/** Most tokens of a choice's text. */
function newTokens({ info }: ServedModel, maxNewTokens: number): number {
  return Math.min(maxNewTokens, longestText(info));
}

function expectPrompts(
  prompts: readonly Prompt[],
  kind: Job['kind'],
  model: ServedModel,
  format: ResponseFormat | null,
  maxNewTokens: number,
): void {
  for (const prompt of prompts) {
    const least = fewestTokens(prompt, model.tokenizer);
    if (least > 0) expectRoom({ length: least, atLeast: true, maxNewTokens }, kind, model.info);
    expectRoom({ length: prompt.tokens.length, maxNewTokens }, kind, model.info);
  }
  if (format) for (const { tokens } of prompts) expectDocument(format, tokens.length, model, maxNewTokens);
}

/** Bytes of the longest token of tokenizers that keep every byte of a text. */
const longestTokens = new Map<string, number>();

/** A lower bound of the tokens of a text that is so long that computing them takes time; 0 for other prompts. */
function fewestTokens({ text }: Prompt, { name, tokenBytes, vocabSize }: Tokenizer): number {
  if (text === null || text.length <= LONG_TEXT || !tokenBytes || !isBuiltInTokenizer(name)) return 0;
  let longest = longestTokens.get(name);
  if (longest === undefined) {
    longest = 1;
    for (let id = 0; id < vocabSize; id++) longest = Math.max(longest, tokenBytes(id)?.length ?? 0);
    longestTokens.set(name, longest);
  }
  return Math.ceil(Buffer.byteLength(text) / longest);
}

/** Refuses an answer that is too large to be kept in memory. */
function expectListed({ listed, logprobs }: Job): void {
  if (listed <= MAX_LISTED) return;
  const param = logprobs === null ? 'n' : 'logprobs';
  throw new HttpError(
    400,
    `the answer may list ${listed} tokens and log-probabilities; at most ${MAX_LISTED}: lower max_tokens, n or logprobs`,
    { param, code: 'answer_too_large' },
  );
}

/** Refuses at once what can never be answered. */
function expectRoom(tokens: Parameters<typeof refusalOf>[0], kind: Job['kind'], info: ModelInfo): void {
  const refusal = refusalOf(tokens, info);
  if (!refusal) return;
  const prompt = kind === 'chat' ? 'messages' : 'prompt';
  throw new HttpError(400, refusal.message, {
    param: refusal.isPrompt ? prompt : 'max_tokens',
    code: 'context_length_exceeded',
  });
}

/** The form that the text must have; null for any. Such a text ends where its document ends, and nowhere else. */
function responseFormatOf(known: Sampling): ResponseFormat | null {
  const { response_format: format, stop, ignore_eos, min_tokens } = known;
  if (format.type === 'text') return null;
  const [other] = Object.entries({ stop: stop.length > 0, ignore_eos, min_tokens: min_tokens > 0 }).filter(
    ([, is]) => is,
  );
  if (other) throw unsupportedWith(other[0], 'response_format');
  return format.type === 'json_object'
    ? format
    : { type: format.type, schema: format.json_schema.schema as JsonSchema };
}

function unsupportedWith(param: string, other: string): HttpError {
  const code = 'unsupported_parameter';
  return new HttpError(400, `${param} is not supported together with ${other}`, { param, code });
}

/** Refuses a response format or tools whose schemas are not supported, or whose shortest document does not fit. */
function expectDocument(format: ResponseFormat, promptTokens: number, model: ServedModel, maxNewTokens: number): void {
  const budget = Math.min(maxNewTokens, model.info.maxContext - promptTokens);
  asBadRequest(format.type === 'tool_calls' ? 'tools' : 'response_format', () =>
    model.structured.check(format, budget),
  );
}

function promptsOf(prompt: z.infer<typeof completion>['prompt'], model: ServedModel): Prompt[] {
  if (typeof prompt === 'string') return [textPrompt(prompt, model)];
  if (prompt instanceof Int32Array || typeof prompt[0] === 'number')
    return [tokenPrompt(prompt as number[] | Int32Array, model)];
  expectChoices(prompt.length);
  return (prompt as (string | number[])[]).map((one) =>
    typeof one === 'string' ? textPrompt(one, model) : tokenPrompt(one, model),
  );
}

function textPrompt(text: string, model: ServedModel): Prompt {
  const { tokenizer, info } = model;
  let tokens: Int32Array | null = null;
  return {
    text,
    get tokens() {
      tokens ??= asBadRequest('prompt', () => Int32Array.from(encodePrompt(text, tokenizer, info.vocabulary)));
      return tokens;
    },
  };
}

function tokenPrompt(tokens: readonly number[] | Int32Array, { info }: ServedModel): Prompt {
  const wrong = tokenBeyond(tokens, info.vocabulary);
  if (wrong !== undefined)
    throw new HttpError(400, `${wrong} is not a token; the model has the tokens 0 to ${info.vocabulary - 1}`, {
      param: 'prompt',
    });
  return { tokens, text: null };
}

/** Messages with their parts joined. The role `developer` is what OpenAI calls the system of some models. */
function contents(messages: readonly z.infer<typeof message>[]): ChatMessage[] {
  return messages.map(({ content, role, ...rest }) => ({
    ...rest,
    role: role === 'developer' ? 'system' : role,
    content: Array.isArray(content) ? content.map(({ text }) => text).join('') : (content ?? ''),
  }));
}

function templatesOf({ chat }: ServedModel): ChatTemplates {
  if (chat?.templates.has('default')) return chat;
  throw new HttpError(400, 'the model has no chat template: use /v1/completions, or start with --chat-template');
}

function chatTokens(
  messages: readonly ChatMessage[],
  model: ServedModel,
  addGenerationPrompt: boolean,
  variables: Readonly<Record<string, unknown>> = {},
): { text: string; tokens: readonly number[] } {
  const { tokenizer, info } = model;
  const chat = templatesOf(model);
  return asBadRequest('messages', () => {
    const text = applyChatTemplate({ ...tokenizer, chat }, messages, { addGenerationPrompt, variables });
    expectRoom({ length: fewestTokens({ text, tokens: [] }, tokenizer), atLeast: true, maxNewTokens: 0 }, 'chat', info);
    return { text, tokens: Array.from(tokenizer.encode(text, { parseSpecial: true })) };
  });
}

/** Reports an error that the body caused as a bad request. */
function asBadRequest<T>(param: string, work: () => T): T {
  try {
    return work();
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    // A message about one of the tools begins with its place.
    const at = /^tools\.\d+|^messages\.\d+[\w.]*/.exec(error.message)?.[0] ?? param;
    throw new HttpError(400, error.message, { param: at });
  }
}

/** The tokens of a text, or of a chat with its last answer, that the reader view asks about. */
export function parseReading(body: unknown, model: ServedModel): readonly number[] {
  const parsed = readingBody.safeParse(body);
  if (!parsed.success) throw invalid(parsed.error);
  const { prompt, messages } = parsed.data;
  if ((prompt === undefined) === (messages === undefined)) throw new HttpError(400, 'give either prompt or messages');
  const { tokens } =
    prompt === undefined ? chatTokens(contents(messages ?? []), model, false) : textPrompt(prompt, model);
  // Here, not on the HTTP thread: a list of 16 million tokens would keep it busy.
  const most = Math.min(MAX_READ, model.info.maxContext);
  if (tokens.length < 2 || tokens.length > most)
    throw new HttpError(400, `the text has ${tokens.length} tokens; the reader takes 2 to ${most}`, {
      param: 'prompt',
      code: 'context_length_exceeded',
    });
  return Array.from(tokens);
}

export function tokenize(body: unknown, { tokenizer, info }: ServedModel): object {
  const parsed = tokenizeBody.safeParse(body);
  if (!parsed.success) throw invalid(parsed.error);
  const tokens = Array.from(asBadRequest('prompt', () => encodePrompt(parsed.data.prompt, tokenizer, info.vocabulary)));
  return { tokens, count: tokens.length, max_model_len: longestText(info) };
}

export function detokenize(body: unknown, { tokenizer, info }: ServedModel): object {
  const parsed = detokenizeBody.safeParse(body);
  if (!parsed.success) throw invalid(parsed.error);
  const wrong = parsed.data.tokens.find((id) => id >= Math.min(info.vocabulary, tokenizer.vocabSize));
  if (wrong !== undefined) throw new HttpError(400, `${wrong} is not a token`, { param: 'tokens' });
  return { prompt: tokenizer.decode(parsed.data.tokens) };
}
