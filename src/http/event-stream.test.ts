/** A stream to a client that reads when the test says so, over a real socket. */
import { once } from 'node:events';
import { createServer, type IncomingMessage, request, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { EventStream, eventFrame } from './event-stream.js';

vi.setConfig({ testTimeout: 10_000 }); // a stream that never ends fails here

let server: Server;
let response: ServerResponse;
let client: IncomingMessage;
let stream: EventStream;

beforeEach(async () => {
  server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  const answered = once(request({ port, host: '127.0.0.1' }).end(), 'response');
  [, response] = (await once(server, 'request')) as [IncomingMessage, ServerResponse];
  stream = new EventStream(response, { 'x-more': 'yes' });
  stream.send(eventFrame('first'));
  [client] = (await answered) as [IncomingMessage];
});

afterEach(() => {
  server.close();
  server.closeAllConnections();
});

async function textOf(message: IncomingMessage): Promise<string> {
  let text = '';
  for await (const piece of message.setEncoding('utf8')) text += piece;
  return text;
}

it('sends headers and frames, and nothing after its end', async () => {
  expect(client.headers).toMatchObject({
    'content-type': 'text/event-stream',
    'cache-control': 'no-cache',
    'x-accel-buffering': 'no',
    'x-more': 'yes',
  });
  stream.send(eventFrame('{}', { event: 'rows', id: '4' }));
  stream.keepAlive(60);
  stream.keepAlive(0);
  stream.end();
  stream.send(eventFrame('late'));
  expect(await textOf(client)).toBe('data: first\n\nid: 4\nevent: rows\ndata: {}\n\n: keep-alive\n\n');
});

it('waits for a client that does not read, and ends when it has read all', async () => {
  const frame = eventFrame('x'.repeat(2 ** 20));
  let frames = 0;
  while (!stream.isWaiting && frames < 64) {
    stream.send(frame);
    frames += 1;
  }
  const written = response.writableLength;
  for (let i = 0; i < 8; i++) stream.send(frame);
  expect(response.writableLength).toBe(written);
  stream.end();
  expect((await textOf(client)).length).toBe('data: first\n\n'.length + (frames + 8) * frame.length);
});

it('disconnects a client that is too far behind', async () => {
  const closed = once(response, 'close');
  const frame = eventFrame('x'.repeat(2 ** 20));
  for (let i = 0; i < 256 && !response.destroyed; i++) stream.send(frame);
  await closed;
  expect(response.writableFinished).toBe(false);
});
