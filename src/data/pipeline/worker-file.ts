/** The program of the worker threads: compiled beside this file, or bundled on first use if Trefoil runs from sources. */

import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

let bundled: Promise<URL> | undefined;

export function workerFile(): Promise<URL> {
  const compiled = new URL('./worker.js', import.meta.url);
  if (existsSync(compiled)) return Promise.resolve(compiled);
  // Node 20 cannot load TypeScript in a thread. All threads of a process share one bundle.
  bundled ??= bundle(fileURLToPath(new URL('./worker.ts', import.meta.url)));
  return bundled;
}

async function bundle(source: string): Promise<URL> {
  const { build } = await import('esbuild');
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-worker-'));
  process.once('exit', () => rmSync(folder, { recursive: true, force: true }));
  const outfile = join(folder, 'worker.mjs');
  await build({ entryPoints: [source], bundle: true, platform: 'node', format: 'esm', outfile, logLevel: 'error' });
  return pathToFileURL(outfile);
}
