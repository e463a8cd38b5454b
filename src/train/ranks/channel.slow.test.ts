/** Handshakes as a stranger would try them: without the key, with a recording, with garbage, in thousands. */
import { once } from 'node:events';
import { connect, createServer, type Socket } from 'node:net';
import { afterEach, expect, test } from 'vitest';
import { Channel, type Connected, connectTo, type Line, listen } from './channel.js';
import { startAttack } from './testing/attack.js';

const host = '127.0.0.1';
const key = 'the key of this run';
const closers: (() => void)[] = [];
afterEach(() => {
  for (const close of closers.splice(0)) close();
});

/** A listening rank 0 that records every admitted hello and every line. */
async function serve(refusal = '') {
  const hellos: Line[] = [];
  const lines: Line[] = [];
  const admit = (hello: Line) => {
    hellos.push(hello);
    return refusal || { onLine: (line: Line) => void lines.push(line), onClose: () => {} };
  };
  const listener = (await listen({ service: 'store', key, ports: [0], address: host, expected: 2, admit }))!;
  closers.push(() => listener.close());
  return { port: listener.port, hellos, lines, listener };
}

const join = (port: number, secret = key, hello: object = { rank: 1 }): Promise<Connected> =>
  connectTo({ host, port, service: 'store', key: secret, hello, timeoutMs: 3000 });

function expectChannel(connected: Connected): Channel {
  expect(connected).toBeInstanceOf(Channel);
  closers.push(() => (connected as Channel).socket.destroy());
  return connected as Channel;
}

/** Sends bytes; resolves with what was received when the server closes the connection. */
function sendRaw(port: number, bytes: string | Buffer): Promise<string> {
  return new Promise((resolve) => {
    const socket = connect({ host, port });
    let received = '';
    socket.setEncoding('utf8').on('data', (text: string) => {
      received += text;
    });
    socket.on('error', () => {}); // being disconnected is expected
    socket.on('close', () => resolve(received));
    socket.write(bytes);
  });
}

test('a client with the key is admitted, and its lines arrive', async () => {
  const { port, hellos, lines } = await serve();
  const channel = expectChannel(await join(port));
  channel.send({ text: 'hello' });
  await expect.poll(() => lines).toEqual([{ text: 'hello' }]);
  expect(hellos).toEqual([{ rank: 1 }]);
});

test('a refusal is reported with its reason', async () => {
  const { port } = await serve('rank 1 has already joined');
  expect(await join(port)).toEqual({ refusal: 'rank 1 has already joined' });
});

test('a client with another key is not admitted', async () => {
  const { port, hellos } = await serve();
  expect(await join(port, 'another key')).toEqual({
    failure: `port ${port} belongs to another run, or the ranks have different secrets`,
  });
  expect(hellos).toEqual([]);
});

/** Forwards one connection to `port` and records what the client sent. */
async function recordingProxy(port: number) {
  const sent: Buffer[] = [];
  const server = createServer((client) => {
    const upstream = connect({ host, port });
    client.on('data', (bytes) => sent.push(bytes));
    client.pipe(upstream).pipe(client);
    for (const socket of [client, upstream]) socket.on('error', () => {}); // the test closes both
  });
  server.listen(0, host);
  await once(server, 'listening');
  closers.push(() => server.close());
  return { port: (server.address() as { port: number }).port, sent: () => Buffer.concat(sent) };
}

test('a recorded handshake cannot be replayed, and the key is never sent', async () => {
  const { port, hellos } = await serve();
  const proxy = await recordingProxy(port);
  expectChannel(await join(proxy.port));
  expect(hellos).toHaveLength(1);
  const recording = proxy.sent();
  expect(recording.toString()).toContain('"proof"');
  expect(recording.toString()).not.toContain(key);
  const received = await sendRaw(port, recording);
  expect(received.trim().split('\n')).toHaveLength(1); // the greeting, no answer
  expect(hellos).toHaveLength(1);
});

test('a proof for one hello does not authenticate another', async () => {
  const { port, hellos } = await serve();
  const server = createServer((client) => {
    const upstream = connect({ host, port });
    upstream.pipe(client);
    client.on('data', (bytes) => upstream.write(bytes.toString().replace('\\"rank\\":1', '\\"rank\\":2')));
    for (const socket of [client, upstream]) socket.on('error', () => {}); // the test closes both
  });
  server.listen(0, host);
  await once(server, 'listening');
  closers.push(() => server.close());
  expect(await join((server.address() as { port: number }).port)).toHaveProperty('failure');
  expect(hellos).toEqual([]);
});

test('a server without the key is not trusted, whatever it answers', async () => {
  const answers = ['', '{"refusal":"","proof":"x"}\n', '{"refusal":"stop","proof":""}\n', `${'y'.repeat(10_000)}\n`];
  for (const answer of answers) {
    const server = createServer((socket: Socket) => {
      socket.on('error', () => {}); // the client closes the connection
      socket.write('{"trefoil":3,"service":"store","nonce":"n"}\n');
      socket.once('data', () => socket.end(answer));
    });
    server.listen(0, host);
    await once(server, 'listening');
    closers.push(() => server.close());
    expect(await join((server.address() as { port: number }).port)).toHaveProperty('failure');
  }
});

test.each([
  ['garbage', Buffer.from([0, 255, 254, 10, 3])],
  ['an HTTP request', 'GET / HTTP/1.1\r\n\r\n'],
  ['a line that is too long', 'x'.repeat(5000)],
  ['JSON that is not an object', 'null\n'],
  ['a hello of wrong types', '{"nonce":{"toString":1},"hello":[],"proof":7}\n'],
])('%s ends the connection', async (_, bytes) => {
  const { port, hellos } = await serve();
  expect((await sendRaw(port, bytes)).trim().split('\n')).toHaveLength(1);
  expect(hellos).toEqual([]);
});

test('half a line is dropped after the time limit of the handshake', async () => {
  const { port } = await serve();
  const started = performance.now();
  await sendRaw(port, '{"nonce":"n",');
  expect(performance.now() - started).toBeGreaterThan(8000);
});

test('a rank is admitted during a flood, and an admitted one keeps its connection', async () => {
  const { port, hellos, lines } = await serve();
  const before = expectChannel(await join(port));
  const attack = await startAttack(port);
  try {
    let during = await join(port, key, { rank: 2 });
    while (!(during instanceof Channel)) during = await join(port, key, { rank: 2 }); // as ranks do; the test's limit ends it
    expectChannel(during);
    before.send({ still: 'here' });
    await expect.poll(() => lines).toEqual([{ still: 'here' }]);
    expect(hellos).toEqual([{ rank: 1 }, { rank: 2 }]);
    expect(attack.opened()).toBeGreaterThanOrEqual(1000);
  } finally {
    attack.stop();
  }
});

test('strangers hold at most a fixed number of connections', async () => {
  const { port } = await serve();
  const sockets = Array.from({ length: 200 }, () =>
    connect({ host, port })
      .on('error', () => {})
      .resume(),
  );
  closers.push(() => sockets.forEach((socket) => void socket.destroy()));
  const open = () => sockets.filter((socket) => socket.readyState === 'open').length;
  await expect.poll(open).toBe(66); // 64 and the 2 expected
});

test('closing the listener keeps admitted connections', async () => {
  const { port, lines, listener } = await serve();
  const channel = expectChannel(await join(port));
  const stranger = connect({ host, port }).resume();
  await once(stranger, 'connect');
  await once(stranger, 'data');
  listener.close();
  await once(stranger, 'close');
  expect(await join(port)).toEqual({ failure: expect.stringContaining('ECONNREFUSED') });
  channel.send({ still: 'here' });
  await expect.poll(() => lines).toEqual([{ still: 'here' }]);
});
