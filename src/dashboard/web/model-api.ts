/** Requests to the model behind the playground: the OpenAI API of `trefoil serve`, and live traces. */
import type { TraceReaders, TraceText, TraceToken } from '../../evaluate/trace-view.js';
import { ApiError } from './api.js';

/** Features of the server: `runs`, `model`, and `key` if requests to the model need one. */
export const parts: ReadonlySet<string> = new Set(
  document.querySelector<HTMLMetaElement>('meta[name="trefoil-parts"]')?.content.split(' ') ?? [],
);

export interface ModelCard {
  readonly id: string;
  readonly max_model_len: number;
  readonly parameters: number;
  readonly has_chat_template: boolean;
}

export interface Alternative {
  readonly text: string;
  readonly probability: number;
}

export interface GeneratedToken {
  readonly text: string;
  readonly probability: number;
  /** The most probable tokens at this place, best first. */
  readonly alternatives: readonly Alternative[];
}

/** A call of a tool; its arguments are JSON. */
export interface ToolCall {
  readonly id: string;
  readonly type: 'function';
  readonly function: { readonly name: string; readonly arguments: string };
}

export interface ChatMessage {
  readonly role: 'system' | 'user' | 'assistant' | 'tool';
  readonly content: string;
  readonly tool_calls?: readonly ToolCall[];
  /** The call that a result belongs to. */
  readonly tool_call_id?: string;
}

/** A request for text; exactly one of `prompt` and `messages` is set. */
export interface GenerationRequest {
  readonly prompt?: string;
  readonly messages?: readonly ChatMessage[];
  readonly [parameter: string]: unknown;
}

export interface GenerationListener {
  onProgress(processed: number, total: number): void;
  onTokens(tokens: readonly GeneratedToken[]): void;
  /** Reasoning, and calls of tools, as far as they are written. */
  onOthers(reasoning: string, calls: readonly ToolCall[]): void;
  onEnd(finish: string): void;
}

const ALTERNATIVES = 6;

async function send(path: string, key: string, body?: object, signal?: AbortSignal): Promise<Response> {
  const headers: Record<string, string> = key === '' ? {} : { Authorization: `Bearer ${key}` };
  if (body) headers['Content-Type'] = 'application/json';
  const response = await fetch(path, {
    headers,
    method: body ? 'POST' : 'GET',
    signal: signal ?? null,
    ...(body ? { body: JSON.stringify(body) } : {}),
  });
  if (response.ok) return response;
  const answer: unknown = await response.json().catch(() => null);
  throw new ApiError(messageOf(answer) ?? `the server answered ${response.status}`);
}

/** The model server answers `{error: {message}}`, the dashboard `{error}`. */
function messageOf(answer: unknown): string | undefined {
  const error = (answer as { error?: unknown } | null)?.error;
  const message = typeof error === 'string' ? error : (error as { message?: unknown } | undefined)?.message;
  return typeof message === 'string' ? message : undefined;
}

/** The values of the `data:` lines of a stream. Throws an error that the stream reports. */
async function* events(response: Response): AsyncGenerator<Record<string, unknown>> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n');
    rest = lines.pop() ?? '';
    for (const line of lines) {
      if (!line.startsWith('data: ') || line === 'data: [DONE]') continue;
      const event = JSON.parse(line.slice('data: '.length)) as Record<string, unknown>;
      const message = messageOf(event);
      if (message !== undefined) throw new ApiError(message);
      yield event;
    }
  }
}

export async function loadCard(key: string): Promise<ModelCard> {
  const { data } = (await (await send('/v1/models', key)).json()) as { data: ModelCard[] };
  return data[0];
}

interface Listed {
  readonly token: string;
  readonly logprob: number;
}

/** The first delta of a call has its id and name, those after it pieces of the arguments. */
interface CallDelta {
  readonly index: number;
  readonly id?: string;
  readonly function: { readonly name?: string; readonly arguments: string };
}

interface Choice {
  readonly text?: string;
  readonly delta?: {
    readonly content?: string;
    readonly reasoning_content?: string;
    readonly tool_calls?: readonly CallDelta[];
  };
  readonly finish_reason: string | null;
  readonly logprobs: {
    /** Set for a chat. */
    readonly content?: readonly (Listed & { readonly top_logprobs: readonly Listed[] })[];
    /** Set for a completion. */
    readonly tokens?: readonly string[];
    readonly token_logprobs?: readonly number[];
    readonly top_logprobs?: readonly Readonly<Record<string, number>>[];
  } | null;
}

/** Streams a completion or the answer of a chat. */
export async function generate(
  request: GenerationRequest,
  key: string,
  signal: AbortSignal,
  listener: GenerationListener,
): Promise<void> {
  const isChat = request.messages !== undefined;
  const logprobs = isChat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES };
  const path = isChat ? '/v1/chat/completions' : '/v1/completions';
  const response = await send(path, key, { ...request, ...logprobs, stream: true, return_progress: true }, signal);
  const calls: ToolCall[] = [];
  let reasoning = '';
  for await (const event of events(response)) {
    const progress = event['prompt_progress'] as { processed: number; total: number } | undefined;
    if (progress) listener.onProgress(progress.processed, progress.total);
    for (const choice of event['choices'] as Choice[]) {
      const { reasoning_content: thought = '', tool_calls: pieces = [] } = choice.delta ?? {};
      reasoning += thought;
      for (const { index, id = '', function: of } of pieces) {
        const before = calls[index] ?? { id, type: 'function', function: { name: of.name ?? '', arguments: '' } };
        const text = before.function.arguments + of.arguments;
        calls[index] = { ...before, function: { ...before.function, arguments: text } };
      }
      if (thought !== '' || pieces.length > 0) listener.onOthers(reasoning, [...calls]);
      const tokens = tokensOf(choice);
      if (tokens.length > 0) listener.onTokens(tokens);
      if (choice.finish_reason) listener.onEnd(choice.finish_reason);
    }
  }
}

function tokensOf({ text, delta, logprobs }: Choice): GeneratedToken[] {
  const content = logprobs?.content ?? completionEntries(logprobs);
  const all = text ?? delta?.content ?? '';
  if (content.length === 0) return all === '' ? [] : [{ text: all, probability: Number.NaN, alternatives: [] }];
  const texts = textsOf(
    all,
    content.map(({ token }) => token),
  );
  return content.map(({ logprob, top_logprobs: top }, i) => ({
    text: texts[i],
    probability: Math.exp(logprob),
    alternatives: [...top]
      .sort((a, b) => b.logprob - a.logprob)
      .slice(0, ALTERNATIVES)
      .map((one) => ({ text: one.token, probability: Math.exp(one.logprob) })),
  }));
}

function completionEntries(logprobs: Choice['logprobs']) {
  return (logprobs?.tokens ?? []).map((token, i) => ({
    token,
    logprob: logprobs!.token_logprobs![i],
    top_logprobs: Object.entries(logprobs!.top_logprobs![i]).map(([name, logprob]) => ({ token: name, logprob })),
  }));
}

/**
 * The part of a text that each token wrote. Names of tokens are not always their text: a token may be a part of a character,
 * and text that may begin a stop string comes later. Then the last token gets all of it.
 */
function textsOf(text: string, names: readonly string[]): string[] {
  if (names.join('') === text) return [...names];
  return names.map((_, i) => (i === names.length - 1 ? text : ''));
}

/** Reads a text on the model; returns the id of its trace. */
export async function readText(
  request: GenerationRequest,
  key: string,
  onProgress: (done: number, layers: number | null) => void,
): Promise<string> {
  for await (const event of events(await send('/reader', key, request))) {
    const progress = event['progress'] as { done: number; layers: number | null } | undefined;
    if (progress) onProgress(progress.done, progress.layers);
    if (typeof event['trace'] === 'string') return event['trace'];
  }
  throw new ApiError('the server ended without a trace');
}

/** Fetches which blocks the model read, for the reader. */
export function liveTrace(id: string, key: string) {
  const get = async <Value>(...rest: (string | number)[]) =>
    (await (await send(['/reader', id, ...rest].join('/'), key)).json()) as Value;
  return {
    key: `live/${id}`,
    text: () => get<TraceText>(),
    token: (index: number) => get<TraceToken>('token', index),
    readers: (block: number) => get<TraceReaders>('block', block),
  };
}
