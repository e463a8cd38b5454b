/** Bodies of requests from bytes. */
import { randomUUID } from 'node:crypto';
import { HttpError } from '../http/error.js';

/** Below this number of bytes `JSON.parse` alone is as fast. */
const LARGE = 4096;
/** Stands for the tokens in the text that `JSON.parse` reads; no client can know it. */
const TOKENS = `tokens ${randomUUID()}`;
const [QUOTE, BACKSLASH, COMMA, COLON, ZERO] = Buffer.from('"\\,:0');
const [OPEN_LIST, CLOSE_LIST, OPEN_OBJECT, CLOSE_OBJECT] = Buffer.from('[]{}');
const SPACE = 0x20;

/** Objects and lists of a text, and how deep they may be in each other: each takes many times the memory of its bytes. */
const MAX_CONTAINERS = 2 ** 18;
const MAX_DEPTH = 512;

/**
 * The value of a JSON text in UTF-8. Throws an `HttpError` if it is not one. A list of tokens in the field `prompt` of a large object, up to
 * six digits each and at least one, is returned as an `Int32Array`: that is several times as fast as `JSON.parse`, which
 * otherwise takes most of the time until a request with a long prompt is accepted.
 *
 * Undefined for a text of more than `most` bytes, or more than `mostTokens` with such a list.
 */
export function parseBody(
  bytes: Buffer,
  most = Number.POSITIVE_INFINITY,
  mostTokens = Number.POSITIVE_INFINITY,
): unknown {
  if (bytes.length > mostTokens) return undefined;
  const prompt = bytes.length < LARGE ? null : findTokens(bytes);
  if (bytes.length - (prompt ? prompt.to - prompt.from : 0) > most) return undefined;
  if (prompt) {
    const { tokens, from, to } = prompt;
    const rest = [bytes.subarray(0, from), Buffer.from(JSON.stringify(TOKENS)), bytes.subarray(to)];
    const body = parseText(Buffer.concat(rest)) as { prompt?: unknown };
    if (body.prompt === TOKENS) return { ...body, prompt: tokens };
    // The field is given twice, and the last one counts.
  }
  return parseText(bytes);
}

function parseText(bytes: Buffer): unknown {
  expectShallow(bytes);
  try {
    return JSON.parse(new TextDecoder('utf-8', { fatal: true }).decode(bytes));
  } catch (error) {
    if (!(error instanceof SyntaxError || error instanceof TypeError)) throw error;
    throw new HttpError(400, 'the body is not JSON in UTF-8');
  }
}

function expectShallow(bytes: Buffer): void {
  let [count, depth] = [0, 0];
  for (let at = 0; at < bytes.length; ) {
    const byte = bytes[at];
    if (byte === QUOTE) {
      at = afterString(bytes, at);
      continue;
    }
    at += 1;
    if (byte === OPEN_LIST || byte === OPEN_OBJECT) {
      count += 1;
      depth += 1;
      if (depth > MAX_DEPTH) throw new HttpError(400, `the body is nested deeper than ${MAX_DEPTH} levels`);
      if (count > MAX_CONTAINERS)
        throw new HttpError(400, `the body has more than ${MAX_CONTAINERS} objects and lists`);
    } else if (byte === CLOSE_LIST || byte === CLOSE_OBJECT) depth -= 1;
  }
}

interface FoundTokens {
  readonly tokens: Int32Array;
  /** Bytes of the list. */
  readonly from: number;
  readonly to: number;
}

/** The list of tokens in the field `prompt` of the outermost object; null if the field is no such list or the text is not JSON. */
function findTokens(bytes: Buffer): FoundTokens | null {
  let at = afterSpace(bytes, 0);
  if (bytes[at] !== OPEN_OBJECT) return null;
  do {
    const key = afterSpace(bytes, at + 1);
    if (bytes[key] !== QUOTE) return null;
    const colon = afterSpace(bytes, afterString(bytes, key));
    if (bytes[colon] !== COLON) return null;
    const value = afterSpace(bytes, colon + 1);
    if (bytes[value] === OPEN_LIST && bytes.toString('latin1', key, key + 8) === '"prompt"')
      return readTokens(bytes, value);
    at = afterSpace(bytes, afterValue(bytes, value));
  } while (bytes[at] === COMMA);
  return null;
}

/** Tokens of the list that is being read, unless it may have more: not allocated for each body. */
const scratch = new Int32Array(2 ** 18);

/** Reads `[12,345]`, with spaces or without; null if it is not a list of tokens. */
function readTokens(bytes: Buffer, from: number): FoundTokens | null {
  const most = (bytes.length - from) >> 1; // a digit and a comma, or a bracket, each
  const tokens = most > scratch.length ? new Int32Array(most) : scratch;
  let count = 0;
  let at = from;
  let next: number;
  do {
    at += 1;
    if (bytes[at] <= SPACE) at = afterSpace(bytes, at);
    let token = bytes[at] - ZERO;
    if (!(token >= 0 && token <= 9)) return null;
    const isZero = token === 0;
    // Written out: the processor guesses the end of a number worse in a loop over its digits, which takes twice as long.
    let digit = bytes[++at] - ZERO;
    if (digit >= 0 && digit <= 9) {
      if (isZero) return null;
      token = 10 * token + digit;
      digit = bytes[++at] - ZERO;
      if (digit >= 0 && digit <= 9) {
        token = 10 * token + digit;
        digit = bytes[++at] - ZERO;
        if (digit >= 0 && digit <= 9) {
          token = 10 * token + digit;
          digit = bytes[++at] - ZERO;
          if (digit >= 0 && digit <= 9) {
            token = 10 * token + digit;
            digit = bytes[++at] - ZERO;
            if (digit >= 0 && digit <= 9) {
              token = 10 * token + digit;
              at += 1;
            }
          }
        }
      }
    }
    tokens[count++] = token;
    if (bytes[at] <= SPACE) at = afterSpace(bytes, at);
    next = bytes[at];
  } while (next === COMMA);
  return next === CLOSE_LIST ? { tokens: tokens.slice(0, count), from, to: at + 1 } : null;
}

/** The first byte from `at` on that is not white space of JSON. */
function afterSpace(bytes: Buffer, at: number): number {
  while (bytes[at] === SPACE || bytes[at] === 0x0a || bytes[at] === 0x0d || bytes[at] === 0x09) at++;
  return at;
}

/** The byte after the string that begins at `at`. */
function afterString(bytes: Buffer, at: number): number {
  let end = at + 1;
  while (end < bytes.length && bytes[end] !== QUOTE) end += bytes[end] === BACKSLASH ? 2 : 1;
  return end + 1;
}

/** The byte after the value that begins at `at`, if the text is JSON. */
function afterValue(bytes: Buffer, at: number): number {
  let depth = 0;
  while (at < bytes.length) {
    const byte = bytes[at];
    if (depth === 0 && (byte === COMMA || byte === CLOSE_OBJECT || byte === CLOSE_LIST)) break;
    if (byte === OPEN_LIST || byte === OPEN_OBJECT) depth += 1;
    else if (byte === CLOSE_LIST || byte === CLOSE_OBJECT) depth -= 1;
    at = byte === QUOTE ? afterString(bytes, at) : at + 1;
  }
  return at;
}
