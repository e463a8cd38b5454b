/** Between chat completions and another protocol: its requests as chat bodies, and chat answers in its form. */
import type { HttpError } from '../../http/error.js';

/** Protocols whose requests become chats. */
export type Protocol = 'responses' | 'messages';

/** A call in a chat answer, or a piece of one in a stream. */
interface ChatCall {
  readonly index?: number;
  readonly id?: string;
  readonly function: { readonly name?: string; readonly arguments: string };
}

/** A message of a chat, or a delta of it in a stream. */
export interface ChatPart {
  readonly content?: string | null;
  readonly reasoning_content?: string;
  readonly tool_calls?: readonly ChatCall[];
}

/** The one choice of a chat answer, or of a chunk of it. */
export interface ChatChoice {
  readonly delta?: ChatPart;
  readonly message?: ChatPart;
  readonly finish_reason: string | null;
  /** The stop string that ended it. */
  readonly stop_reason?: string;
}

export interface ChatUsage {
  readonly prompt_tokens: number;
  readonly completion_tokens: number;
  readonly total_tokens: number;
  readonly prompt_tokens_details: { readonly cached_tokens: number };
  /** Where the answer may reason. */
  readonly completion_tokens_details?: { readonly reasoning_tokens: number };
}

/** Facts about a request that its answer repeats. */
export interface TranslatedRequest {
  readonly id: string;
  readonly model: string;
  /** Seconds since 1970. */
  readonly created: number;
  readonly promptTokens: number;
  /** JSON of an object of the fields that the answer repeats. Made before the HTTP thread has it, as it may be large. */
  readonly echoed: string;
}

/** Writes one answer in the form of a protocol. */
export interface Translation {
  /** Frames of a stream before the first token. */
  begin(): string;
  chunk(choice: ChatChoice): string;
  /** Frames after the last chunk. */
  end(usage: ChatUsage): string;
  /** Frames of a stream that fails. */
  fail(error: HttpError): string;
  /** JSON of a whole answer. */
  whole(choice: ChatChoice, usage: ChatUsage): string;
}

/** A request of a protocol as a chat. */
export interface TranslatedBody {
  readonly body: Readonly<Record<string, unknown>>;
  /** Fields of the request that the answer repeats. */
  readonly echoed: Readonly<Record<string, unknown>>;
  /** Fields that were not understood. */
  readonly unknown: readonly string[];
}

type Fields = Readonly<Record<string, unknown>>;

/** The members of `given` with these names. */
export function picked(given: Fields, names: readonly string[]): Record<string, unknown> {
  return Object.fromEntries(names.flatMap((name) => (Object.hasOwn(given, name) ? [[name, given[name]]] : [])));
}

export function isObject(value: unknown): value is Fields {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

/** Parameters of this server that its other protocols pass on. */
export const PASSED = [
  ...['model', 'stream', 'temperature', 'top_p', 'user', 'metadata', 'seed', 'top_k', 'min_p', 'repetition_penalty'],
  ...['frequency_penalty', 'presence_penalty', 'logit_bias', 'cache_salt', 'chat_template_kwargs', 'stream_options'],
];
