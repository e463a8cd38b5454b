/** Who may talk to a server: addresses of this machine, and keys compared in constant time. */
import { createHash, timingSafeEqual } from 'node:crypto';
import type { IncomingMessage } from 'node:http';
import { isIPv4 } from 'node:net';

/** Whether only programs on this machine can reach the address. */
export function isLoopback(host: string): boolean {
  return host === 'localhost' || host === '::1' || (isIPv4(host) && host.startsWith('127.'));
}

/** The name in a Host header, `NAME`, `NAME:PORT` or `[IPV6]:PORT`, in lower case; empty for any other text. */
export function hostName(header: string | undefined): string {
  const [, ipv6, name] = /^(?:\[([0-9a-f:.]+)\]|([^:[\]]*))(?::\d+)?$/i.exec(header ?? '') ?? [];
  return (ipv6 ?? name ?? '').toLowerCase();
}

/** The key of `Authorization: Bearer KEY`, or of `X-Api-Key: KEY`; empty without one. */
export function bearerKey({ headers }: IncomingMessage): string {
  const other = headers['x-api-key'];
  return /^bearer +(\S+)$/i.exec(headers.authorization ?? '')?.[1] ?? (typeof other === 'string' ? other : '');
}

/** Accepted keys. */
export class Keys {
  readonly #digests: readonly Buffer[];

  constructor(keys: readonly string[]) {
    this.#digests = keys.map(digest);
  }

  get isEmpty(): boolean {
    return this.#digests.length === 0;
  }

  /** Compares all keys, each in constant time: the time tells nothing about them. */
  has(key: string): boolean {
    const given = digest(key);
    return this.#digests.map((known) => timingSafeEqual(known, given)).includes(true);
  }
}

/** Keys of all lengths become one length, which the comparison needs. */
function digest(key: string): Buffer {
  return createHash('sha256').update(key).digest();
}
