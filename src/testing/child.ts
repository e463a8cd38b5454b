/** Other processes for tests: a program bundled from text, started, waited for. */
import { spawn } from 'node:child_process';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { build } from 'esbuild';

/** Bundles `program` (TypeScript) to `file`; its imports are relative to `folder`. Returns `file`. */
export async function buildChild(file: string, folder: string, program: string): Promise<string> {
  await build({
    stdin: { contents: program, resolveDir: folder, loader: 'ts' },
    bundle: true,
    platform: 'node',
    format: 'esm',
    outfile: file,
    // koffi finds its native part beside itself: loaded from where it is, by an address that works from any folder.
    plugins: [
      {
        name: 'koffi',
        setup({ onResolve }) {
          const { href } = pathToFileURL(createRequire(import.meta.url).resolve('koffi'));
          onResolve({ filter: /^koffi$|\/koffi\.js$/ }, () => ({ path: href, external: true }));
        },
      },
    ],
  });
  return file;
}

export interface ChildResult {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
  readonly output: string;
  readonly errors: string;
}

/** Starts the program. One that writes `ready` to stderr and waits for its input is released by `go`. */
export function startChild(file: string, words: readonly string[], environment: Record<string, string> = {}) {
  const child = spawn(process.execPath, [file, ...words], { env: { ...process.env, ...environment } });
  let output = '';
  let errors = '';
  let isReady = () => {};
  const ready = new Promise<void>((resolve) => {
    isReady = resolve;
  });
  child.stdout.on('data', (chunk) => {
    output += chunk;
  });
  child.stderr.on('data', (chunk) => {
    errors += chunk;
    if (!errors.startsWith('ready')) return;
    errors = errors.slice('ready'.length);
    isReady();
  });
  const done = new Promise<ChildResult>((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code, signal) => {
      isReady();
      resolve({ code, signal, output, errors });
    });
  });
  return { ready, go: () => child.stdin.end('go\n'), done };
}
