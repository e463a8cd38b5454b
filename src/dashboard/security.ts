/** Who may talk to the dashboard: the Host check against DNS rebinding, the token, and the headers of every answer. */
import { randomBytes, timingSafeEqual } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import { isIP } from 'node:net';
import { hostname } from 'node:os';

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

export function isLoopback(host: string): boolean {
  return host === 'localhost' || host === '::1' || /^127\.\d+\.\d+\.\d+$/.test(host);
}

/**
 * Whether the Host header names this machine. A page of another site whose name was made to resolve to this address sends
 * its own name. Any port is accepted: a tunnel may use another one.
 */
export function isOwnHost(header: string | undefined, bound: string): boolean {
  if (header === undefined) return false;
  const name = /^(\[[0-9a-fA-F:.]+\]|[^:]*)(?::\d+)?$/
    .exec(header)?.[1]
    ?.replace(/^\[|\]$/g, '')
    .toLowerCase();
  if (name === undefined || name === '') return false;
  if (isLoopback(name) || name === bound.toLowerCase()) return true;
  // Bound to every address: an address cannot be rebound, a foreign name can.
  return isWildcard(bound) && (isIP(name) !== 0 || name === hostname().toLowerCase());
}

function isWildcard(bound: string): boolean {
  return bound === '0.0.0.0' || bound === '::';
}

const COOKIE = 'trefoil_token';

/** The token of a request's header. A cookie is not enough for writes: browsers attach it to foreign requests as well. */
export function hasTokenHeader(request: IncomingMessage, token: string): boolean {
  const given = /^Bearer (.+)$/.exec(request.headers.authorization ?? '')?.[1];
  return given !== undefined && isEqual(given, token);
}

export function hasTokenCookie(request: IncomingMessage, token: string): boolean {
  const cookies = (request.headers.cookie ?? '').split(/;\s*/);
  return cookies.some((cookie) => cookie.startsWith(`${COOKIE}=`) && isEqual(cookie.slice(COOKIE.length + 1), token));
}

export function tokenCookie(token: string): string {
  return `${COOKIE}=${token}; HttpOnly; SameSite=Strict; Path=/`;
}

/** In constant time. */
export function isEqual(a: string, b: string): boolean {
  const [x, y] = [Buffer.from(a), Buffer.from(b)];
  return x.length === y.length && timingSafeEqual(x, y);
}
