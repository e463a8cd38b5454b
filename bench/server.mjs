// Starts the server of this build for a measurement. Needs `npm run build`.
import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

const main = fileURLToPath(new URL('../dist/cli/main.js', import.meta.url));

/** `trefoil serve` with these words on a free port, once it listens; `stop` resolves with its exit code. */
export async function startServer(...words) {
  const server = spawn(process.execPath, [main, 'serve', '--port', '0', ...words.map(String)], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  const ended = new Promise((resolve) => server.once('exit', resolve));
  const url = await new Promise((resolve, reject) => {
    createInterface({ input: server.stdout }).on('line', (line) => {
      if (line.startsWith('listening on ')) resolve(line.slice('listening on '.length));
    });
    void ended.then(() => reject(new Error('the server did not start')));
  });
  return {
    url,
    pid: server.pid,
    stop() {
      server.kill('SIGTERM');
      return ended;
    },
  };
}
