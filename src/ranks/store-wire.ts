/** What goes over the store's connections: one JSON value a line, and proofs that both ends belong to the same run. */
import { createHmac, timingSafeEqual } from 'node:crypto';
import type { Socket } from 'node:net';

/** Changes when ranks of two versions could not understand each other. */
export const PROTOCOL = 2;

export interface Member {
  readonly rank: number;
  readonly host: string;
  readonly pid: number;
}

/** The server's first line. */
export interface Greeting {
  readonly trefoil: typeof PROTOCOL;
  readonly nonce: string;
}

export interface Hello extends Member {
  readonly world: number;
  readonly nonce: string;
  readonly proof: string;
}

/** `stranger` is told to whoever cannot prove the run id, and nothing else is. */
export type Welcome = { readonly proof: string } | { readonly stranger: true } | { readonly refused: string };

export type Request = { readonly id: number; readonly key: string; readonly seconds: number } & (
  | { readonly op: 'set'; readonly value: string }
  | { readonly op: 'get' }
  | { readonly op: 'gather'; readonly value: string }
);

export type Reply =
  | { readonly value: string }
  | { readonly values: readonly string[] }
  /** Time ran out; for a gathering, before these ranks had come. */
  | { readonly missing: readonly number[] };

/** What the server says without being asked. */
export type Notice =
  | { readonly complete: readonly Member[] }
  | { readonly failed: string }
  | { readonly lost: Member }
  | { readonly bye: true };

export type ServerLine = Notice | ({ readonly id: number } & Reply);
export type ClientLine = Request | { readonly got: string } | { readonly bye: true };

/** Both nonces are in it, so a proof is good for one connection. */
export function proof(runId: string, role: 'server' | 'client', server: string, client: string, rank: number): string {
  return createHmac('sha256', runId).update(`trefoil ${PROTOCOL} ${role} ${server} ${client} ${rank}`).digest('hex');
}

export function isProof(expected: string, given: unknown): boolean {
  if (typeof given !== 'string' || given.length !== expected.length) return false;
  return timingSafeEqual(Buffer.from(expected), Buffer.from(given));
}

export function isLoopback(address: string): boolean {
  return address === 'localhost' || address === '::1' || address.startsWith('127.');
}

export function sendLine(socket: Socket, value: object): void {
  if (!socket.destroyed) socket.write(`${JSON.stringify(value)}\n`);
}

/** Calls `take` with every line's value. A line that is too long or no JSON object ends the connection. */
export function readLines(socket: Socket, longest: () => number, take: (value: Record<string, unknown>) => void): void {
  let pieces = '';
  socket.setEncoding('utf8');
  socket.on('data', (chunk: string) => {
    pieces += chunk;
    for (let end = pieces.indexOf('\n'); end >= 0; end = pieces.indexOf('\n')) {
      const line = pieces.slice(0, end);
      pieces = pieces.slice(end + 1);
      const value = line.length <= longest() ? parseObject(line) : null;
      if (value === null) {
        socket.destroy();
        return;
      }
      take(value);
      if (socket.destroyed) return;
    }
    if (pieces.length > longest()) socket.destroy();
  });
}

function parseObject(line: string): Record<string, unknown> | null {
  try {
    const value: unknown = JSON.parse(line);
    return typeof value === 'object' && value !== null ? (value as Record<string, unknown>) : null;
  } catch (error) {
    if (error instanceof SyntaxError) return null; // not one of ours: whoever reads ends the connection
    throw error;
  }
}

/** "rank 3", "ranks 1 and 2", "ranks 0, 1 and 2", "ranks 0, 1, 2 and 61 more". */
export function rankList(ranks: readonly number[]): string {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  const shown = ranks.length > 8 ? ranks.slice(0, 7) : ranks.slice(0, -1);
  const last = ranks.length > 8 ? `${ranks.length - 7} more` : `${ranks.at(-1)}`;
  return `ranks ${shown.join(', ')} and ${last}`;
}

export function durationText(ms: number): string {
  return ms >= 60_000 ? `${+(ms / 60_000).toFixed(1)} min` : `${+(ms / 1000).toFixed(1)} s`;
}
