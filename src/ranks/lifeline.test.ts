import { once } from 'node:events';
import { connect, createServer } from 'node:net';
import { expect, test } from 'vitest';
import { holdLifeline, offerLifeline } from './lifeline.js';
import { Pulse } from './pulse.js';
import { openStore, storePorts } from './store.js';

const address = '127.0.0.1';
const addresses = [address];
const ports = storePorts(28_000 + (process.pid % 500) * 40);

const noPulse = new Pulse(1_000_000, () => {}); // pulse.test.ts has those that beat

function offered() {
  const gone: number[] = [];
  return { gone, lifeline: offerLifeline({ addresses, ports, world: 3 }, (rank) => void gone.push(rank), noPulse) };
}

/** A rank as bytes on a connection. */
async function rank(port: number, hello: object) {
  const socket = connect({ host: address, port });
  socket.on('error', () => {}).resume();
  await once(socket, 'connect');
  socket.write(`${JSON.stringify(hello)}\n`);
  return socket;
}

test('a rank that goes is told to rank 0 and to all others, once', async () => {
  const { gone, lifeline } = offered();
  const { port, token } = (await lifeline)!;
  const heard: number[] = [];
  void holdLifeline(2, { addresses, port, token }, (other) => void heard.push(other), noPulse);
  const second = await rank(port, { rank: 1, token });
  await new Promise((resolve) => setTimeout(resolve, 200)); // both have said who they are
  second.destroy();
  await expect.poll(() => [gone, heard]).toEqual([[1], [1]]);
});

test('strangers are sent away and nobody hears of them', async () => {
  const { gone, lifeline } = offered();
  const { port, token } = (await lifeline)!;
  for (const hello of [{ rank: 1, token: 'x'.repeat(token.length) }, { rank: 1 }, { token }, { rank: 'one', token }])
    await once(await rank(port, hello), 'close');
  expect(gone).toEqual([]);
});

test('the end of the connection that beats is not that of a rank', async () => {
  const { gone, lifeline } = offered();
  const { port, token } = (await lifeline)!;
  const held = await rank(port, { rank: 1, token });
  const beats = await rank(port, { rank: 1, token, pulse: true });
  beats.write('{"missed":null}\n');
  await new Promise((resolve) => setTimeout(resolve, 200)); // it has said who it is, and has been heard
  expect(beats.closed).toBe(false);
  beats.destroy();
  await new Promise((resolve) => setTimeout(resolve, 200));
  expect(gone).toEqual([]);
  held.destroy();
  await expect.poll(() => gone).toEqual([1]);
});

test('the end of rank 0 is heard as well, but not that of one that was never there', async () => {
  const heard: number[] = [];
  const hear = (other: number) => void heard.push(other);
  const server = createServer((socket) => {
    socket.write('{"lifeline":true}\n');
    socket.once('data', () => socket.destroy());
  });
  server.listen(0, address);
  await once(server, 'listening');
  const { port } = server.address() as { port: number };
  void holdLifeline(1, { addresses, port, token: '' }, hear, noPulse);
  await expect.poll(() => heard).toEqual([0]);
  server.close();
  await once(server, 'close');
  void holdLifeline(1, { addresses, port, token: '' }, hear, noPulse);
  await new Promise((resolve) => setTimeout(resolve, 300));
  expect(heard).toEqual([0]);
});

test('addresses at which there is nobody, or another program, are passed over', async ({ skip }) => {
  if (process.platform !== 'linux') return skip('only on Linux all of 127/8 is this machine');
  const { gone, lifeline } = offered();
  const { port, token } = (await lifeline)!;
  const other = createServer((socket) => socket.end('{"hello":"there"}\n'));
  other.listen(port, '127.0.0.2');
  await once(other, 'listening');
  const heard: number[] = [];
  const wrong = ['127.0.0.3', '127.0.0.2'];
  void holdLifeline(2, { addresses: [...wrong, address], port, token }, (rank) => void heard.push(rank), noPulse);
  await new Promise((resolve) => setTimeout(resolve, 500)); // it has found its way
  (await rank(port, { rank: 1, token })).end();
  await expect.poll(() => [gone, heard]).toEqual([[1], [1]]);
  other.close();
});

test('a rank of another run, which looks for its store there, is told at once that it is none', async () => {
  const { port } = (await offered().lifeline)!;
  const run = { rank: 1, world: 2, runId: 'another', address, port: port - 1, timeoutMs: 1000 };
  await expect(openStore(run)).rejects.toThrow(`port ${port} belongs to another program`);
});

test('without a free port there is none', async () => {
  expect(await offerLifeline({ addresses, ports: [], world: 2 }, () => {}, noPulse)).toBeNull();
});
