/** A stranger who floods a port: silent connections, garbage, half lines, and hellos with wrong proofs. */
import { randomBytes } from 'node:crypto';
import { connect, type Socket } from 'node:net';

const AT_ONCE = 1000;

const HELLO = JSON.stringify({ nonce: 'n', hello: '{"rank":1}', proof: '0'.repeat(64) });
const PAYLOADS: readonly (Buffer | string)[] = [
  '',
  randomBytes(2000),
  'x'.repeat(100_000),
  'GET / HTTP/1.1\r\n\r\n',
  '{"rank":1,',
  '[1,2]\n',
  'null\n',
  `${HELLO}\n`,
  `${HELLO}\n{"id":1,"op":"get","key":"id"}\n`,
];

/** Resolves when 1,000 connections have been attempted; each that is closed is replaced until `stop`. */
export async function startAttack(port: number): Promise<{ opened: () => number; stop: () => void }> {
  const sockets = new Set<Socket>();
  let opened = 0;
  let isStopped = false;
  const attempt = () =>
    new Promise<void>((resolve) => {
      const socket = connect({ host: '127.0.0.1', port });
      sockets.add(socket);
      socket.on('error', () => {}); // being disconnected is expected
      socket.on('connect', () => {
        opened += 1;
        socket.write(PAYLOADS[opened % PAYLOADS.length]);
        resolve();
      });
      socket.on('close', () => {
        resolve();
        sockets.delete(socket);
        if (!isStopped) setTimeout(() => isStopped || void attempt(), 20);
      });
      socket.resume();
    });
  await Promise.all(Array.from({ length: AT_ONCE }, attempt));
  const stop = () => {
    isStopped = true;
    for (const socket of sockets) socket.destroy();
  };
  return { opened: () => opened, stop };
}
