import { createServer } from 'node:net';
import { STORE_PORTS } from '../train/ranks/store.js';

/**
 * A port with the store's ports behind it, of which none is in use. Below those that systems hand out on their own, so that
 * no other program of this machine is given one of them in the meantime.
 */
export async function freeStorePort(): Promise<number> {
  for (;;) {
    const port = 12_000 + Math.floor(Math.random() * 14_000);
    const all = Array.from({ length: STORE_PORTS + 2 }, (_, i) => port + i);
    if ((await Promise.all(all.map(isFree))).every(Boolean)) return port;
  }
}

function isFree(port: number): Promise<boolean> {
  return new Promise((resolve) => {
    const server = createServer().once('error', () => resolve(false)); // in use: another one is tried
    server.listen(port, '127.0.0.1', () => server.close(() => resolve(true)));
  });
}
