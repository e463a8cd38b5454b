import { once } from 'node:events';
import { createServer, type Socket } from 'node:net';
import { afterEach, beforeAll, expect, test } from 'vitest';
import { freeStorePort } from '../../testing/store-port.js';
import { Channel, connectTo, type Line, listen } from './channel.js';
import { holdLifeline, offerLifeline } from './lifeline.js';
import { Pulse } from './pulse.js';
import { openStore, storePorts } from './store.js';
import { startAttack } from './testing/attack.js';

const address = '127.0.0.1';
const addresses = [address];
const key = 'the key of this run';
let ports: number[];
beforeAll(async () => {
  ports = storePorts(await freeStorePort());
});
const open: Channel[] = [];
afterEach(() => {
  for (const { socket } of open.splice(0)) socket.destroy();
});

const noPulse = new Pulse(1_000_000, () => {}); // pulse.test.ts tests heartbeats

/** Rank 0 of three, and the ranks that it notices as gone. */
async function offer() {
  const gone: number[] = [];
  const options = { addresses, ports, world: 3, key };
  const lifeline = (await offerLifeline(options, (rank) => void gone.push(rank), noPulse))!;
  return { gone, port: lifeline.port };
}

/** A connection with this hello; a failure if it is not admitted. */
async function connected(port: number, hello: object, secret = key) {
  const found = await connectTo({ host: address, port, service: 'lifeline', key: secret, hello, timeoutMs: 60_000 });
  if (!(found instanceof Channel)) return found;
  open.push(found);
  return found;
}

async function admitted(port: number, hello: object): Promise<Channel> {
  const found = await connected(port, hello);
  expect(found).toBeInstanceOf(Channel);
  return found as Channel;
}

test('a rank that exits is reported to rank 0 and to all others, once', async () => {
  const { gone, port } = await offer();
  const heard: number[] = [];
  await holdLifeline(2, { addresses, port, key }, (other) => void heard.push(other), noPulse);
  (await admitted(port, { rank: 1 })).socket.destroy();
  await expect.poll(() => [gone, heard]).toEqual([[1], [1]]);
});

test('strangers, unknown ranks and a second connection of a rank are not admitted', async () => {
  const { gone, port } = await offer();
  expect(await connected(port, { rank: 1 }, 'another key')).toHaveProperty('failure');
  for (const rank of [0, 3, -1, 1.5, 'one', null])
    expect(await connected(port, { rank })).toEqual({ refusal: expect.stringContaining('world size') });
  await admitted(port, { rank: 1 });
  expect(await connected(port, { rank: 1 })).toEqual({ refusal: 'rank 1 has already connected' });
  expect(gone).toEqual([]);
});

test('a flood neither ends a lifeline nor keeps a rank out', async () => {
  const { gone, port } = await offer();
  await admitted(port, { rank: 1 });
  const attack = await startAttack(port);
  try {
    const heard: number[] = [];
    await holdLifeline(2, { addresses: Array(20).fill(address), port, key }, (rank) => void heard.push(rank), noPulse);
    expect([gone, heard]).toEqual([[], []]);
    open[0].socket.destroy();
    await expect.poll(() => [gone, heard]).toEqual([[1], [1]]);
  } finally {
    attack.stop();
  }
});

test('the port is closed when every rank has both connections', async () => {
  const { gone, port } = await offer();
  for (const rank of [1, 2]) {
    await admitted(port, { rank });
    await admitted(port, { rank, pulse: true });
  }
  expect(await connected(port, { rank: 1 })).toEqual({ failure: expect.stringContaining('ECONNREFUSED') });
  open[0].socket.destroy();
  await expect.poll(() => gone).toEqual([1]);
});

test('the end of the heartbeat connection is not the end of a rank', async () => {
  const { gone, port } = await offer();
  const held = await admitted(port, { rank: 1 });
  const beats = await admitted(port, { rank: 1, pulse: true });
  beats.send({ missed: null });
  await new Promise((resolve) => setTimeout(resolve, 200));
  expect(beats.socket.closed).toBe(false);
  beats.socket.destroy();
  await new Promise((resolve) => setTimeout(resolve, 200));
  expect(gone).toEqual([]);
  held.socket.destroy();
  await expect.poll(() => gone).toEqual([1]);
});

test('the end of rank 0 is noticed, but not that of a server without the key or of a closed port', async () => {
  const heard: number[] = [];
  const hear = (other: number) => void heard.push(other);
  const stranger = createServer((socket) => {
    socket.on('error', () => {}); // the client closes the connection
    socket.write('{"trefoil":3,"service":"lifeline","nonce":"n"}\n');
    socket.once('data', () => socket.end('{"refusal":"","proof":"p"}\n{"gone":2}\n'));
  });
  stranger.listen(0, address);
  await once(stranger, 'listening');
  const lifeline = { addresses, port: (stranger.address() as { port: number }).port, key };
  await holdLifeline(1, lifeline, hear, noPulse);
  stranger.close();
  await once(stranger, 'close');
  await holdLifeline(1, lifeline, hear, noPulse);
  await new Promise((resolve) => setTimeout(resolve, 200));
  expect(heard).toEqual([]);
  const sockets: Socket[] = [];
  const admit = (_: Line, socket: Socket) => {
    sockets.push(socket);
    return { onLine: () => {}, onClose: () => {} };
  };
  const first = (await listen({ service: 'lifeline', key, ports, address, expected: 2, admit }))!;
  await holdLifeline(1, { addresses, port: first.port, key }, hear, noPulse);
  first.close();
  expect(heard).toEqual([]);
  for (const socket of sockets) socket.destroy();
  await expect.poll(() => heard).toEqual([0]);
});

test('addresses without a server, or with another program, are skipped', async ({ skip }) => {
  if (process.platform !== 'linux') return skip('only on Linux do all addresses of 127/8 belong to this machine');
  const { gone, port } = await offer();
  const other = createServer((socket) => socket.end('{"hello":"there"}\n'));
  other.listen(port, '127.0.0.2');
  await once(other, 'listening');
  const heard: number[] = [];
  const wrong = ['127.0.0.3', '127.0.0.2'];
  await holdLifeline(2, { addresses: [...wrong, address], port, key }, (rank) => void heard.push(rank), noPulse);
  (await admitted(port, { rank: 1 })).socket.end();
  await expect.poll(() => [gone, heard]).toEqual([[1], [1]]);
  other.close();
});

test('a rank of another run that looks for its store there moves on at once', async () => {
  const { port } = await offer();
  const run = { rank: 1, world: 2, key: 'another', address, port: port - 1, timeoutMs: 3000 };
  await expect(openStore(run)).rejects.toThrow(`port ${port} belongs to another program`);
});

test('without a free port there is no lifeline', async () => {
  expect(await offerLifeline({ addresses, ports: [], world: 2, key }, () => {}, noPulse)).toBeNull();
});
