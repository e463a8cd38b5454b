/** The store with real processes: ranks meet, strangers stay out, and whoever is missing or lost is named. */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { connect, createServer, type Server } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { freeStorePort } from '../testing/store-port.js';
import { openStore, STORE_PORTS, type StoreOptions } from './store.js';
import { durationText, rankList } from './store-wire.js';

const folder = mkdtempSync(join(tmpdir(), 'trefoil-store-'));
const program = join(folder, 'member.mjs');
beforeAll(async () => {
  const source = fileURLToPath(new URL('./testing/member.ts', import.meta.url));
  await build({ entryPoints: [source], bundle: true, platform: 'node', format: 'esm', outfile: program });
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const children = new Set<ChildProcess>();
const servers = new Set<Server>();
afterEach(async () => {
  for (const child of children) child.kill('SIGKILL');
  children.clear();
  await Promise.all([...servers].map((server) => new Promise((resolve) => server.close(resolve))));
  servers.clear();
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
  /** Waits for a line of which `is` holds. */
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
    socket.on('error', () => {}); // whoever looked in is gone
    if (answer !== null) socket.write(answer);
  });
  servers.add(server);
  await new Promise<void>((resolve) => server.listen(port, '127.0.0.1', resolve));
}

/** A process that was just started takes its time. */
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

/** Longer than processes of a busy machine take to start. */
const base = { world: 3, runId: 'run-1', address: '127.0.0.1', timeoutMs: 90_000 };

describe('the store of ranks', () => {
  it('lets ranks meet, whoever comes first, and hands values round', async () => {
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

  it('has handed a value to everybody before rank 0 goes on, and may block', async () => {
    const port = await freeStorePort();
    const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank, block: rank === 0 ? 4000 : 0 }));
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([0, 0, 0]);
    const [first, ...others] = ranks.map(({ lines }) => lines.find(({ handed }) => handed !== undefined)!);
    for (const { handed, at } of others) {
      expect(handed).toBe('of rank 0');
      expect(at!).toBeLessThan(first.at! - 2000); // while rank 0 was deaf
    }
  });

  it('passes over ports that are taken: by a launcher, a silent program, another run', async () => {
    const port = await freeStorePort();
    await occupy(port, null); // MASTER_PORT itself, as torchrun does
    await occupy(port + 1, 'HTTP/1.1 400 Bad Request\r\n\r\n');
    const other = { ...base, world: 2, runId: 'another run', port: port + 1 };
    const others = [start({ ...other, rank: 0, stay: true }), start({ ...other, rank: 1, stay: true })];
    expect((await others[0].line(({ met }) => met !== undefined)).port).toBe(port + 2);
    const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank }));
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([0, 0, 0]);
    expect(ranks[2].lines[0].port).toBe(port + 3);
    expect(others.map(({ lines }) => lines.length)).toEqual([3, 3]); // the other run noticed nothing
  });

  it('names the ranks that do not come, to all that came', async () => {
    const port = await freeStorePort();
    // Only rank 0's limit decides; rank 2 is started first, so that it is there long before.
    const ranks = [2, 0].map((rank) =>
      start({ ...base, world: 4, ...(rank === 0 && { timeoutMs: 8000 }), port, rank, host: `node${rank}` }),
    );
    expect(await Promise.all(ranks.map(({ code }) => code))).toEqual([1, 1]);
    for (const { lines } of ranks)
      expect(lines).toEqual([
        {
          error:
            `rendezvous: ranks 1 and 3 of 4 did not come to port ${port + 1} of node0 within 8 s ` +
            '(NSA_PG_TIMEOUT_MIN); look at what they printed',
        },
      ]);
  });

  it('says what a rank tried when rank 0 is nowhere', async () => {
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

  it('refuses a rank of another size and a rank that is there already', async () => {
    const port = await freeStorePort();
    const first = [0, 1].map((rank) => start({ ...base, port, rank, host: `node${rank}` }));
    // Rank 1 is there as soon as a second one is refused; until then either may be the first.
    const twins = [first[1], start({ ...base, port, rank: 1, host: 'node1' })];
    const refused = await Promise.race(twins.map(({ line }) => line(({ error }) => error !== undefined)));
    expect(refused.error).toMatch(/^rendezvous: rank 1 is here already: process \d+ on node1$/);
    await expect(openStore({ ...base, port, rank: 2, world: 5 })).rejects.toThrow(
      'rendezvous: rank 2 was started as one of 5, rank 0 as one of 3',
    );
    const third = start({ ...base, port, rank: 2 });
    expect(await first[0].code).toBe(0); // the mistakes of others cost it nothing
    expect(await third.code).toBe(0);
  });

  it('keeps strangers out: no run id, no JSON, too much, too many', async () => {
    const port = await freeStorePort();
    const first = start({ ...base, port, rank: 0 });
    await listening(port + 1);
    await expect(openStore({ ...base, port, rank: 1, runId: 'guess', timeoutMs: 3000 })).rejects.toThrow(
      `port ${port + 1} belongs to another run (or the run ids differ)`,
    );
    const attack = (text: string) =>
      new Promise<string>((resolve) => {
        const socket = connect({ host: '127.0.0.1', port: port + 1 });
        let heard = '';
        socket.setEncoding('utf8').on('data', (chunk: string) => {
          heard += chunk;
        });
        socket.on('error', () => {}); // being thrown out is what is expected
        socket.on('close', () => resolve(heard.split('\n').slice(1).join('')));
        socket.write(text);
      });
    const hello = { rank: 1, world: 3, host: 'x', pid: 1, nonce: 'n', proof: 'p' };
    expect(await attack('GET / HTTP/1.1\r\n\r\n')).toBe('');
    expect(await attack('x'.repeat(100_000))).toBe('');
    expect(await attack(`${JSON.stringify({ ...hello, rank: { toString: 1 } })}\n`)).toBe('{"stranger":true}');
    expect(await attack(`${JSON.stringify(hello)}\n${JSON.stringify({ id: 1, op: 'get', key: 'id' })}\n`)).toBe(
      '{"stranger":true}',
    );
    const rest = [1, 2].map((rank) => start({ ...base, port, rank }));
    expect(await Promise.all([first, ...rest].map(({ code }) => code))).toEqual([0, 0, 0]);
  });

  it('names a rank that is killed, rank 0 as well, to everybody else within moments', async () => {
    for (const victim of [2, 0]) {
      const port = await freeStorePort();
      const ranks = [0, 1, 2].map((rank) => start({ ...base, port, rank, host: `node${rank}`, stay: true }));
      await Promise.all(ranks.map(({ line }) => line(({ handed }) => handed !== undefined)));
      const killed = performance.now();
      ranks[victim].child.kill('SIGKILL');
      const left = ranks.filter((_, rank) => rank !== victim);
      expect(await Promise.all(left.map(({ code }) => code))).toEqual([7, 7]);
      expect(performance.now() - killed).toBeLessThan(base.timeoutMs / 3); // at once, not when a wait has run out
      for (const { lines } of left) expect(lines.at(-1)).toEqual({ lost: `${victim}@node${victim}` });
    }
  });

  it('names who does not come to a gathering, and what nobody gave', async () => {
    const port = await freeStorePort();
    const options = { ...base, world: 2, port, timeoutMs: 2000 };
    const [zero, one] = await Promise.all([0, 1].map((rank) => openStore({ ...options, rank, host: `node${rank}` })));
    await expect(one.get('nothing')).rejects.toThrow('rank 1 waited 2 s for "nothing", which no rank has given');
    await expect(one.gather('devices', new Uint8Array(1))).rejects.toThrow(
      'rank 1 waited 2 s at "devices" for rank 0 (node0); look at what they printed',
    );
    await expect(zero.get('nothing')).rejects.toThrow('rank 0 waited');
    await expect(zero.handOut('id', new Uint8Array(1))).rejects.toThrow(
      'rank 0 waited 2 s at "id" for rank 1 (node1); look at what they printed',
    );
    const lost: number[] = [];
    zero.onLost(({ rank }) => lost.push(rank));
    one.close(); // orderly: nobody is lost
    await new Promise((resolve) => setTimeout(resolve, 100));
    zero.close();
    expect(lost).toEqual([]);
  });

  it('says plainly when no port is left', async () => {
    const port = await freeStorePort();
    for (let i = 1; i <= STORE_PORTS; i++) await occupy(port + i, null);
    await expect(openStore({ ...base, port, rank: 0 })).rejects.toThrow(
      `none of the ports ${port + 1} to ${port + STORE_PORTS} is free on the machine of rank 0; set MASTER_PORT`,
    );
  });

  it('puts ranks and times into words', () => {
    expect([[3], [1, 2], [0, 1, 5], Array.from({ length: 70 }, (_, i) => i)].map(rankList)).toEqual([
      'rank 3',
      'ranks 1 and 2',
      'ranks 0, 1 and 5',
      'ranks 0, 1, 2, 3, 4, 5, 6 and 63 more',
    ]);
    expect([500, 59_000, 90_000, 900_000].map(durationText)).toEqual(['0.5 s', '59 s', '1.5 min', '15 min']);
  });
});
