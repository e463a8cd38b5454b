/**
 * Runs command lines in one process, one after the other, as they arrive, and reports each: exit code, output, processor
 * time. The test that started it ends it when a command hangs. usage: node child.mjs DIST
 */

import { Writable } from 'node:stream';
import { pathToFileURL } from 'node:url';

const dist = pathToFileURL(`${process.argv[2]}/`);
const { main } = await import(new URL('cli/program.js', dist).href);
const { createIo } = await import(new URL('cli/shared/io.js', dist).href);

class Sink extends Writable {
  text = '';
  _write(chunk, _encoding, done) {
    this.text += chunk.toString();
    done();
  }
}

process.on('message', async ({ lines, env }) => {
  const results = [];
  for (const words of lines) {
    const [stdout, stderr] = [new Sink(), new Sink()];
    const before = process.cpuUsage();
    const started = performance.now();
    let code;
    try {
      code = await main(words, createIo(stdout, stderr, { ...process.env, ...env }));
    } catch (error) {
      code = `thrown: ${error}`;
    }
    const { user, system } = process.cpuUsage(before);
    const cut = (text) => text.slice(0, 20_000);
    results.push({
      code,
      stdout: cut(stdout.text),
      stderr: cut(stderr.text),
      cpu: (user + system) / 1e6,
      seconds: (performance.now() - started) / 1000,
    });
  }
  process.send(results);
});
process.send('ready');
