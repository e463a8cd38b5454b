/** The hub to ask, and the token for it. */
import type { Environment } from '../environment.js';
import { UsageError } from '../errors.js';
import type { HttpOptions } from './http.js';

const DEFAULT_ENDPOINT = 'https://huggingface.co';

export interface HubAccess {
  readonly endpoint: string;
  readonly credential: HttpOptions['credential'];
}

/** HF_ENDPOINT and HF_TOKEN, checked. */
export function hubAccess(environment: Environment): HubAccess {
  const given = environment['HF_ENDPOINT']?.trim() || DEFAULT_ENDPOINT;
  let url: URL;
  try {
    url = new URL(given);
  } catch {
    throw new UsageError('HF_ENDPOINT: not a URL; give something like https://huggingface.co');
  }
  if (url.protocol !== 'https:' && url.protocol !== 'http:')
    throw new UsageError('HF_ENDPOINT: must begin with https:// or http://');
  // A password in a URL would appear in messages and in process lists.
  if (url.username !== '' || url.password !== '')
    throw new UsageError('HF_ENDPOINT: must not hold a user or password; put a token in HF_TOKEN');
  const token = environment['HF_TOKEN']?.trim();
  return { endpoint: given.replace(/\/+$/, ''), credential: token ? { origin: url.origin, token } : undefined };
}
