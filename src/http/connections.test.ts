/** A server whose connections are all taken, over real sockets. */
import { once } from 'node:events';
import { get, type IncomingMessage, type ServerResponse } from 'node:http';
import { connect, type Socket } from 'node:net';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type Listening, listen } from './listen.js';

let listening: Listening;
let waiting: ServerResponse[];
let sockets: Socket[];

beforeEach(async () => {
  [waiting, sockets] = [[], []];
  const handle = ({ url }: IncomingMessage, response: ServerResponse) => {
    if (url === '/wait') waiting.push(response);
    else response.end('ok');
  };
  listening = await listen(handle, '127.0.0.1', 0, { isEssential: ({ url }) => url === '/health' });
});

afterEach(() => {
  for (const socket of sockets) socket.destroy();
  listening.server.close();
  listening.server.closeAllConnections();
});

async function open(count: number, text: string): Promise<void> {
  const port = Number(new URL(listening.url).port);
  for (let i = 0; i < count; i++) {
    const socket = connect(port, '127.0.0.1');
    socket.on('error', () => {}); // the server may close it
    sockets.push(socket);
    await once(socket, 'connect');
    if (text !== '') socket.write(text);
  }
}

async function status(path: string): Promise<number | undefined> {
  const [response] = (await once(get(listening.url + path, { agent: false }), 'response')) as [IncomingMessage];
  response.resume();
  return response.statusCode;
}

const head = 'HTTP/1.1\r\nhost: localhost\r\n';

describe('with all connections taken', () => {
  it.each([
    ['without a request', ''],
    ['with half a head', `GET /a ${head}`],
    ['with half a body', `POST /a ${head}content-length: 9\r\n\r\nx`],
    ['with answers that were read', `GET /a ${head}\r\n`],
  ])('by clients %s, others are answered', async (_, text) => {
    await open(1300, text);
    expect(await status('/a')).toBe(200);
    expect(await status('/health')).toBe(200);
  });

  it('by requests that are being answered, only the essential ones are', async () => {
    await open(1024, `GET /wait ${head}\r\n`);
    await expect.poll(() => waiting.length).toBe(1024);
    expect(await status('/a')).toBe(503);
    for (let i = 0; i < 3; i++) expect(await status('/health')).toBe(200);
    await open(300, ''); // idle ones do not take the reserved room
    expect(await status('/health')).toBe(200);
    for (const response of waiting.slice(0, 10)) response.end();
    await expect.poll(() => status('/a')).toBe(200);
    expect(waiting.filter(({ destroyed, writableEnded }) => destroyed && !writableEnded)).toEqual([]);
  });
});
