/** The store with real processes: ranks join, strangers do not, and missing or lost ranks are named. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { connect, createServer, type Server } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { freeStorePort } from '../../testing/store-port.js';
import { openStore, STORE_PORTS, type StoreOptions } from './store.js';
import { durationText, rankList } from './store-server.js';
import { startAttack } from './testing/attack.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-store-'));
const program = join(folder, 'member.mjs');
beforeAll(async () => {
  const source = fileURLToPath(new URL('./testing/member.ts', import.meta.url));
  await build({ entryPoints: [source], bundle: true, platform: 'node', format: 'esm', outfile: program });
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const children = new Set<ChildProcess>();
const servers = new Set<Server>();
afterAll(() => {
  for (const child of children) child.kill('SIGKILL');
  for (const server of servers) server.close();
});

interface Said {
  readonly met?: string[];
  readonly port?: number;
  readonly id?: number[];
  readonly names?: string[];
  readonly handed?: string;
  readonly at?: number;
  readonly lost?: string;
  readonly error?: string;
}

interface Rank {
  readonly child: ChildProcess;
  readonly lines: Said[];
  /** Waits for a line that satisfies `is`. */
  line(is: (said: Said) => boolean): Promise<Said>;
  readonly code: Promise<number | null>;
}

function start(options: StoreOptions & { stay?: boolean; block?: number }): Rank {
  const child = spawn(process.execPath, [program, JSON.stringify(options)], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.add(child);
  const lines: Said[] = [];
  let check = () => {};
  let rest = '';
  child.stdout!.setEncoding('utf8').on('data', (text: string) => {
    rest += text;
    const parts = rest.split('\n');
    rest = parts.pop()!;
    lines.push(...parts.map((part) => JSON.parse(part) as Said));
    check();
  });
  const code = new Promise<number | null>((resolve) => child.once('close', (status) => resolve(status)));
  const line = (is: (said: Said) => boolean) =>
    new Promise<Said>((resolve, reject) => {
      const outer = check;
      check = () => {
        outer();
        const found = lines.find(is);
        if (found) resolve(found);
      };
      check();
      void code.then(() => reject(new Error(`ended, having said ${JSON.stringify(lines)}`)));
    });
  return { child, lines, line, code };
}

async function occupy(port: number, answer: string | null): Promise<void> {
  const server = createServer((socket) => {
    socket.on('error', () => {}); // the rank that tried this port has closed the connection
    socket.resume(); // with unread data it would never close
    if (answer !== null) socket.write(answer);
  });
  servers.add(server);
  await new Promise<void>((resolve) => server.listen(port, '127.0.0.1', resolve));
}

/** Waits until a process listens on this port. */
async function listening(port: number): Promise<void> {
  for (;;) {
    const isOpen = await new Promise<boolean>((resolve) => {
      const socket = connect({ host: '127.0.0.1', port });
      socket.on('connect', () => resolve(true)).on('error', () => resolve(false));
      socket.on('connect', () => socket.destroy());
    });
    if (isOpen) return;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** Longer than processes take to start on a busy machine. */
const base = { world: 3, key: 'key of run 1', address: '127.0.0.1', timeoutMs: 90_000 };

// Concurrent: all of them mostly wait.
describe.concurrent('a store that waits', () => {
  it('has handed a value to every rank before rank 0 continues and may block', async () => {
    const port = await freeStorePort();
    const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank, block: rank === 0 ? 8000 : 0 }));
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([0, 0, 0]);
    const [first, ...others] = ranks.map(({ lines }) => lines.find(({ handed }) => handed !== undefined)!);
    for (const { handed, at } of others) {
      expect(handed).toBe('of rank 0');
      expect(at!).toBeLessThan(first.at! - 2000); // while rank 0 was blocked
    }
  });

  it('names the ranks that do not connect, to all that did', async () => {
    const port = await freeStorePort();
    // Only rank 0's limit counts; rank 2 is started first, so that it has joined long before.
    const ranks = [2, 0].map((rank) =>
      start({ ...base, world: 4, ...(rank === 0 && { timeoutMs: 8000 }), port, rank, host: `node${rank}` }),
    );
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([1, 1]);
    for (const { lines } of ranks)
      expect(lines).toEqual([
        {
          error:
            `rendezvous: ranks 1 and 3 of 4 did not connect to port ${port + 1} of node0 within 8 s ` +
            '(NSA_PG_TIMEOUT_MIN); check their output',
        },
      ]);
  });

  it('reports what a rank tried when rank 0 does not answer', async () => {
    const port = await freeStorePort();
    const options = { ...base, port, rank: 1, timeoutMs: 2000 };
    await expect(openStore(options)).rejects.toThrow(
      new RegExp(
        `rank 1 did not find rank 0 at 127.0.0.1, ports ${port + 1} to ${port + 16}, within 2 s.*ECONNREFUSED`,
      ),
    );
    await occupy(port + 3, `${JSON.stringify({ trefoil: 99, nonce: 'x' })}\n`);
    await expect(openStore(options)).rejects.toThrow(`port ${port + 3} belongs to another version of trefoil`);
    await expect(openStore({ ...options, address: 'no-such-host.invalid' })).rejects.toThrow('no-such-host.invalid');
  });

  it('names the ranks missing at a gather, and a key that was not set', async () => {
    const port = await freeStorePort();
    const options = { ...base, world: 2, port, timeoutMs: 3000 };
    const [zero, one] = await Promise.all([0, 1].map((rank) => openStore({ ...options, rank, host: `node${rank}` })));
    await expect(one.get('nothing')).rejects.toThrow('rank 1 waited 3 s for "nothing", which no rank has set');
    await expect(one.gather('devices', new Uint8Array(1))).rejects.toThrow(
      'rank 1 waited 3 s at "devices" for rank 0 (node0); check their output',
    );
    await expect(zero.get('nothing')).rejects.toThrow('rank 0 waited');
    await expect(zero.handOut('id', new Uint8Array(1))).rejects.toThrow(
      'rank 0 waited 3 s at "id" for rank 1 (node1); check their output',
    );
    const lost: number[] = [];
    zero.onLost(({ rank }) => lost.push(rank));
    one.close(); // a regular exit: no rank is lost
    await new Promise((resolve) => setTimeout(resolve, 100));
    zero.close();
    expect(lost).toEqual([]);
  });
});

describe('the store of ranks', () => {
  it('joins ranks in any order and exchanges values', async () => {
    const port = await freeStorePort();
    const later = [1, 2].map((rank) => start({ ...base, port, rank, host: `node${rank}` }));
    await new Promise((resolve) => setTimeout(resolve, 300));
    const ranks = [start({ ...base, port, rank: 0, host: 'node0' }), ...later];
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([0, 0, 0]);
    for (const { lines } of ranks)
      expect(lines).toEqual([
        { met: ['0@node0', '1@node1', '2@node2'], port: port + 1 },
        { id: [128, 255, 128], names: ['rank 0', 'rank 1', 'rank 2'] },
        { handed: 'of rank 0', at: expect.any(Number) },
      ]);
  });

  it('skips ports that are in use by a launcher, another program or another run', async () => {
    const port = await freeStorePort();
    await occupy(port, null); // MASTER_PORT itself, as torchrun does
    await occupy(port + 1, 'HTTP/1.1 400 Bad Request\r\n\r\n');
    const other = { ...base, world: 2, key: 'key of another run', port: port + 1 };
    const first = start({ ...other, rank: 0 });
    await listening(port + 2);
    const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank }));
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([0, 0, 0]);
    expect(ranks[2].lines[0].port).toBe(port + 3);
    const second = start({ ...other, rank: 1 });
    expect([await first.code, await second.code]).toEqual([0, 0]); // the other run was not disturbed
  });

  it('refuses a rank with another world size and a rank that has already joined', async () => {
    const port = await freeStorePort();
    const first = [0, 1].map((rank) => start({ ...base, port, rank, host: `node${rank}` }));
    // Either of the two may be the first; the other is refused.
    const twins = [first[1], start({ ...base, port, rank: 1, host: 'node1' })];
    const refused = await Promise.race(twins.map(({ line }) => line(({ error }) => error !== undefined)));
    expect(refused.error).toMatch(/^rendezvous: rank 1 has already joined: process \d+ on node1$/);
    await expect(openStore({ ...base, port, rank: 2, world: 5 })).rejects.toThrow(
      'rendezvous: rank 2 was started with world size 5, rank 0 with world size 3',
    );
    const third = start({ ...base, port, rank: 2 });
    expect(await first[0].code).toBe(0); // refused ranks do not disturb it
    expect(await third.code).toBe(0);
  });

  it('closes its port when all ranks have joined', async () => {
    const port = await freeStorePort();
    const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank, stay: true }));
    await Promise.all(ranks.map(({ line }) => line(({ handed }) => handed !== undefined)));
    const attempt = connect({ host: '127.0.0.1', port: port + 1 });
    await expect(once(attempt, 'connect')).rejects.toThrow('ECONNREFUSED');
  });

  it('joins its ranks while strangers attack: garbage, half lines, 1,000 connections, a wrong key', async () => {
    const port = await freeStorePort();
    const first = start({ ...base, port, rank: 0 });
    await listening(port + 1);
    await expect(openStore({ ...base, port, rank: 1, key: 'a guess', timeoutMs: 3000 })).rejects.toThrow(
      `port ${port + 1} belongs to another run, or the ranks have different secrets`,
    );
    const attack = await startAttack(port + 1);
    try {
      const rest = [1, 2].map((rank) => start({ ...base, port, rank }));
      expect(await Promise.all([first, ...rest].map(({ code }) => code))).toEqual([0, 0, 0]);
      expect(attack.opened()).toBeGreaterThan(1000);
    } finally {
      attack.stop();
    }
  });

  it('ignores a refusal from a server that does not know the key', async () => {
    const port = await freeStorePort();
    const greeting = { trefoil: 3, service: 'store', nonce: 'n' };
    await occupy(port + 1, `${JSON.stringify(greeting)}\n${JSON.stringify({ refusal: 'go away', proof: 'p' })}\n`);
    const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank }));
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([0, 0, 0]);
  });

  it('names a killed rank, also rank 0, to all others at once', async () => {
    for (const victim of [2, 0]) {
      const port = await freeStorePort();
      const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank, host: `node${rank}`, stay: true }));
      await Promise.all(ranks.map(({ line }) => line(({ handed }) => handed !== undefined)));
      const killed = performance.now();
      ranks[victim].child.kill('SIGKILL');
      const left = ranks.filter((_, rank) => rank !== victim);
      expect(await Promise.all(left.map(({ code }) => code))).toEqual([7, 7]);
      expect(performance.now() - killed).toBeLessThan(base.timeoutMs / 3); // not only after a time-out
      for (const { lines } of left) expect(lines.at(-1)).toEqual({ lost: `${victim}@node${victim}` });
    }
  });

  it('reports that no port is free', async () => {
    const port = await freeStorePort();
    for (let i = 1; i <= STORE_PORTS; i++) await occupy(port + i, null);
    await expect(openStore({ ...base, port, rank: 0 })).rejects.toThrow(
      `none of the ports ${port + 1} to ${port + STORE_PORTS} is free on the machine of rank 0; set MASTER_PORT`,
    );
  });

  it('formats lists of ranks and durations', () => {
    expect([[3], [1, 2], [0, 1, 5], Array.from({ length: 70 }, (_, i) => i)].map(rankList)).toEqual([
      'rank 3',
      'ranks 1 and 2',
      'ranks 0, 1 and 5',
      'ranks 0, 1, 2, 3, 4, 5, 6 and 63 more',
    ]);
    expect([500, 59_000, 90_000, 900_000].map(durationText)).toEqual(['0.5 s', '59 s', '1.5 min', '15 min']);
  });
});
