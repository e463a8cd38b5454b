/** Requests to the engine, the events that answer them, and the refusals. */
import { TrefoilError, UsageError } from '../../errors.js';
import type { ResponseFormat } from '../structured/structured-output.js';
import { createSampler, type DeviceDraws, deviceDraws, type Sampler, type SamplingOptions } from './sampler.js';

/** Memory and time per token grow with the context; a longer one must be requested. */
export const DEFAULT_MAX_CONTEXT = 32_768;
export const DEFAULT_NEW_TOKENS = 128;

/** Restricts the next token of one request, for constrained decoding. */
export interface TokenMask {
  /** Sets the logits of forbidden tokens to -Infinity in place. */
  apply(logits: Float32Array): void;
  /** Called with every token that was drawn. */
  accept(token: number): void;
  /**
   * Called with a drawn token before `accept`. If the text could not end in time after it, forbids all such tokens in the
   * logits and returns true; then another token is drawn.
   */
  narrow?(token: number, logits: Float32Array): boolean;
  /** Whether the text is complete: the request ends without an end token. */
  readonly isComplete?: boolean;
  /** Whether `narrow` has forbidden tokens: the text ends by its length. */
  readonly isCut?: boolean;
  /** Whether the form of the text is fixed here: stop strings and the minimum do not count. */
  readonly isConstrained?: boolean;
}

/** One text to continue. */
export interface EngineRequest {
  /** Tokens of the prompt, at least one. */
  readonly prompt: readonly number[] | Int32Array;
  /** Maximum number of generated tokens; 0 reads the prompt only. Default 128. */
  readonly maxNewTokens?: number;
  /** Number of tokens before one that ends the text may be drawn. Default 0. */
  readonly minNewTokens?: number;
  /** How tokens are drawn. Default: temperature 1 from the whole vocabulary, seed 0. */
  readonly sampling?: SamplingOptions;
  /** Strings that end the text. They are not part of it. */
  readonly stop?: readonly string[];
  /** Treats the separator and other end tokens as ordinary tokens that do not end the text. */
  readonly ignoreSeparator?: boolean;
  /** Log-probabilities of each generated token and of this many most probable ones. */
  readonly logprobs?: number;
  /** The same for the tokens of the prompt; the first has none. Such a request does not read from the prefix cache. */
  readonly promptLogprobs?: number;
  /** Prefixes are shared only between requests with the same salt. Default ''. */
  readonly cacheSalt?: string;
  /**
   * The form of the text: any JSON object, a document of a JSON schema, or calls of tools. Documents and calls are always
   * whole: near `maxNewTokens` only tokens are drawn after which they can still end. Not together with `minNewTokens`,
   * `ignoreSeparator`, `mask` and, but for calls, `stop`.
   */
  readonly responseFormat?: ResponseFormat;
  /** Creates the mask of the request when it starts. */
  readonly mask?: () => TokenMask;
  /** Once aborted, the request ends with the finish reason `aborted` and its pages are freed before the next step. */
  readonly signal?: AbortSignal;
}

/** A token and its log-probability under the unmodified distribution of the model. */
export interface TokenLogprob {
  readonly token: number;
  readonly logprob: number;
}

/** The log-probability of a token and those of the most probable ones at its place, best first. */
export interface PositionLogprobs extends TokenLogprob {
  readonly top: readonly TokenLogprob[];
}

/**
 * Why a text ended. `separator`: the model ended its document. `stop`: a stop string, or the end of a structured text.
 * `length`: `maxNewTokens`. `context`: `maxContext`. `aborted`: the signal.
 */
export type FinishReason = 'separator' | 'stop' | 'length' | 'context' | 'aborted';

/** Cost of a request. Times in seconds. */
export interface RequestUsage {
  readonly promptTokens: number;
  /** Tokens of the prompt that came from the prefix cache. */
  readonly cachedTokens: number;
  /** Generated tokens, without the separator. */
  readonly newTokens: number;
  readonly queueSeconds: number;
  readonly prefillSeconds: number;
  readonly decodeSeconds: number;
}

/** An event of a request, in the order: `progress`*, `prompt`?, `token`*, `end`. */
export type EngineEvent =
  /** `processed` of `total` tokens of the prompt are read, `cached` of them from the prefix cache. */
  | { readonly type: 'progress'; readonly total: number; readonly cached: number; readonly processed: number }
  /** The prompt is read; log-probabilities of its tokens from the second on, if requested. */
  | { readonly type: 'prompt'; readonly logprobs: readonly PositionLogprobs[] }
  /** A generated token and the text that is final with it: whole code points, often empty inside a character. */
  | { readonly type: 'token'; readonly token: number; readonly text: string; readonly logprobs?: PositionLogprobs }
  /** The last event. `text` was held back until the end was certain. */
  | {
      readonly type: 'end';
      readonly text: string;
      readonly finishReason: FinishReason;
      /** The stop string that ended the text. */
      readonly stop?: string;
      readonly usage: RequestUsage;
    };

/** Why the engine refuses a request. `too_large`: it can never fit. `busy`: the queue is full. `closed`: the engine ended. */
export type RefusalReason = 'too_large' | 'busy' | 'closed';

/** A request that the engine does not accept. */
export class RequestRefused extends TrefoilError {
  readonly reason: RefusalReason;

  constructor(reason: RefusalReason, message: string) {
    super(message);
    this.reason = reason;
  }
}

/** A request with its defaults. */
export interface CheckedRequest {
  readonly prompt: readonly number[] | Int32Array;
  readonly maxNewTokens: number;
  readonly minNewTokens: number;
  readonly sample: Sampler;
  /** The same draws for a GPU; null if it cannot make them. */
  readonly draws: DeviceDraws | null;
  /** Whether the sampler needs to know how often each token was drawn. */
  readonly countsTokens: boolean;
  readonly stop: readonly string[];
  readonly ignoreSeparator: boolean;
  readonly logprobs: number | null;
  readonly promptLogprobs: number | null;
  readonly cacheSalt: string;
  readonly mask: (() => TokenMask) | null;
}

/** Throws a `UsageError` that names the wrong value. */
export function checkRequest(request: EngineRequest, vocabulary: number): CheckedRequest {
  const { prompt, stop = [], maxNewTokens = DEFAULT_NEW_TOKENS, minNewTokens = 0 } = request;
  if (prompt.length === 0) throw new UsageError('prompt: at least one token is needed; begin with the separator');
  const wrong = tokenBeyond(prompt, vocabulary);
  if (wrong !== undefined)
    throw new UsageError(`prompt: ${wrong} is not a token; the model has the tokens 0 to ${vocabulary - 1}`);
  expectCount('maxNewTokens', maxNewTokens);
  expectCount('minNewTokens', minNewTokens);
  if (stop.includes('')) throw new UsageError('stop: an empty text would stop at once; give at least one character');
  if (request.responseFormat) expectStructured(request);
  const { frequencyPenalty = 0, presencePenalty = 0, logitBias = {} } = request.sampling ?? {};
  const unknown = Object.keys(logitBias).find((name) => !(Number(name) < vocabulary));
  if (unknown !== undefined)
    throw new UsageError(`logit-bias: ${unknown} is not a token; the model has the tokens 0 to ${vocabulary - 1}`);
  for (const name of ['logprobs', 'promptLogprobs'] as const)
    if (request[name] !== undefined) expectCount(name, request[name]);
  return {
    prompt,
    maxNewTokens,
    minNewTokens,
    stop,
    sample: createSampler(request.sampling),
    draws: deviceDraws(request.sampling),
    countsTokens: frequencyPenalty !== 0 || presencePenalty !== 0,
    ignoreSeparator: request.ignoreSeparator ?? false,
    logprobs: request.logprobs ?? null,
    promptLogprobs: request.promptLogprobs ?? null,
    cacheSalt: request.cacheSalt ?? '',
    mask: request.mask ?? null,
  };
}

/** The first of the values that is not an integer from 0 to `vocabulary` - 1; undefined if all are. */
export function tokenBeyond(values: readonly number[] | Int32Array, vocabulary: number): number | undefined {
  // A loop of its own for typed numbers: one for both kinds is ten times as slow.
  if (values instanceof Int32Array) {
    const { length } = values;
    for (let i = 0; i < length; i++) if (values[i] < 0 || values[i] >= vocabulary) return values[i];
    return undefined;
  }
  return values.find((value) => !(Number.isInteger(value) && value >= 0 && value < vocabulary));
}

/** A structured text ends where its document ends, and nowhere else. */
function expectStructured(request: EngineRequest): void {
  const { stop = [], minNewTokens = 0, ignoreSeparator = false, mask, responseFormat } = request;
  const stops = stop.length > 0 && responseFormat?.type !== 'tool_calls';
  const [other] = Object.entries({ stop: stops, minNewTokens: minNewTokens > 0, ignoreSeparator, mask })
    .filter(([, isGiven]) => isGiven)
    .map(([name]) => name);
  if (other !== undefined) throw new UsageError(`${other}: not supported together with responseFormat`);
}

function expectCount(name: string, value: number): void {
  if (!Number.isSafeInteger(value) || value < 0)
    throw new UsageError(`${name}: ${value} is not allowed; use an integer of at least 0`);
}
