/** Who may talk to the dashboard: the Host check against DNS rebinding, the token, and the headers of every answer. */
import { randomBytes } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import { isIP } from 'node:net';
import { hostname } from 'node:os';
import { hostName, isLoopback, type Keys } from '../http/access.js';

/** Nothing from elsewhere, nothing inline, no frames. */
const CONTENT_SECURITY_POLICY = [
  "default-src 'none'",
  "script-src 'self'",
  "style-src 'self'",
  "img-src 'self'",
  "connect-src 'self'",
  "base-uri 'none'",
  "form-action 'none'",
  "frame-ancestors 'none'",
].join('; ');

export const HEADERS: Readonly<Record<string, string>> = {
  'Content-Security-Policy': CONTENT_SECURITY_POLICY,
  'X-Content-Type-Options': 'nosniff',
  'Referrer-Policy': 'no-referrer',
  'Cross-Origin-Resource-Policy': 'same-origin',
  'Cross-Origin-Opener-Policy': 'same-origin',
  'Cache-Control': 'no-store',
};

export function newToken(): string {
  return randomBytes(18).toString('base64url');
}

/**
 * Whether the Host header names this machine. A page of another site whose name was made to resolve to this address sends
 * its own name. Any port is accepted: a tunnel may use another one.
 */
export function isOwnHost(header: string | undefined, bound: string): boolean {
  const name = hostName(header);
  if (name === '') return false;
  if (isLoopback(name) || name === bound.toLowerCase()) return true;
  // Bound to every address: an address cannot be rebound, a foreign name can.
  return isWildcard(bound) && (isIP(name) !== 0 || name === hostname().toLowerCase());
}

function isWildcard(bound: string): boolean {
  return bound === '0.0.0.0' || bound === '::';
}

const COOKIE = 'trefoil_token';

/**
 * Whether the browser has opened `/?token=…`. Not enough for writes: browsers attach it to foreign requests as well.
 */
export function hasTokenCookie(request: IncomingMessage, token: Keys): boolean {
  const cookies = (request.headers.cookie ?? '').split(/;\s*/);
  return cookies.some((cookie) => cookie.startsWith(`${COOKIE}=`) && token.has(cookie.slice(COOKIE.length + 1)));
}

export function tokenCookie(token: string): string {
  return `${COOKIE}=${token}; HttpOnly; SameSite=Strict; Path=/`;
}
