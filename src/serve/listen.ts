/** Binding a server to its address, with errors that name the flag and the remedy. */
import type { Server } from 'node:net';
import { UsageError } from '../errors.js';
import { errorCode } from '../files.js';

const LAST_PORT = 65_535;

/** Resolves when the server accepts connections. Throws a `UsageError` if it cannot. */
export function listen(server: Server, host: string, port: number): Promise<void> {
  if (port > LAST_PORT) throw new UsageError(`--port ${port}: the last port is ${LAST_PORT}`);
  return new Promise((resolve, reject) => {
    server.once('error', (error) => {
      const code = errorCode(error);
      const reasons: Record<string, string> = {
        EADDRINUSE: `--port ${port}: the port is in use; choose another, or 0 for a free one`,
        EACCES: `--port ${port}: permission denied; choose a port above 1023`,
        EADDRNOTAVAIL: `--host ${host}: not an address of this machine; 0.0.0.0 stands for all of them`,
        ENOTFOUND: `--host ${host}: there is no such host; give an address of this machine, or 0.0.0.0 for all of them`,
      };
      reject(new UsageError(reasons[code ?? ''] ?? `--host ${host} --port ${port}: cannot listen (${error.message})`));
    });
    server.listen(port, host, resolve);
  });
}
