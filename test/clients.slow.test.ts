/** The official clients, each in its default way, against a server with random weights (bench/clients.mjs). */
import { execFile } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, expect, it } from 'vitest';
import { TEMPLATES } from '../src/data/testing/chat-templates.js';
import { createTokenizer } from '../src/data/tokenizer.js';
import { tinyConfig, tinyModel } from '../src/infer/testing/tiny-model.js';
import { LocalHost } from '../src/serve/host.js';
import { startServer } from '../src/serve/server.js';

const root = join(import.meta.dirname, '..');
const config = tinyConfig();
const source = { config, model: tinyModel(config), tokenizer: createTokenizer('byte') };
const close: (() => Promise<void>)[] = [];
afterAll(async () => {
  for (const one of close) await one();
  source.model.free();
});

async function serve(chatTemplate: string): Promise<string> {
  const host = new LocalHost(source, { cacheBytes: 2 ** 27, prefixCacheBytes: 2 ** 24, maxContext: 8000 });
  const server = await startServer(host, { id: 'tiny', port: 0, chatTemplate });
  close.push(async () => {
    await server.drain(0);
    await host.close();
  });
  return server.url;
}

/** The clients take 270 MB; they are installed by the first run where npm has its registry. */
async function missing(): Promise<string | null> {
  if (existsSync(join(root, '.trefoil/clients/package.json'))) return null;
  const ping = promisify(execFile)('npm', ['ping'], { timeout: 20_000 });
  return ping.then(
    () => null,
    () => 'the npm registry is not reachable: run `node bench/clients.mjs --url URL` once where it is',
  );
}

const reason = await missing();
if (reason !== null) console.log(`skipped: clients (${reason})`);

it.skipIf(reason !== null)(
  'the official clients work in their default way',
  async () => {
    const words = [
      '--url',
      await serve(TEMPLATES.qwen25),
      '--reasoning-url',
      await serve(TEMPLATES.reasoner),
      '--json',
    ];
    const run = promisify(execFile)(process.execPath, ['bench/clients.mjs', ...words], { cwd: root });
    const { stdout } = await run.catch((error: { stdout: string }) => error);
    const rows = JSON.parse(stdout) as { client: string; feature: string; failure: string | null }[];
    expect(rows.filter(({ failure }) => failure !== null)).toEqual([]);
    expect(rows).toHaveLength(7 * 9);
  },
  600_000,
);
