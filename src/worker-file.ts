/** The program of a worker thread: a compiled module of the package, or, when Trefoil runs from its sources, a bundle. */
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

const bundles = new Map<string, Promise<URL>>();

/** `module` is the URL of the compiled module (`./name.js`). Bundles are built once per process. */
export function workerFile(module: URL): Promise<URL> {
  if (existsSync(module)) return Promise.resolve(module);
  const known = bundles.get(module.href);
  if (known) return known;
  const bundle = buildBundle(fileURLToPath(module).replace(/\.js$/, '.ts'));
  bundles.set(module.href, bundle);
  return bundle;
}

async function buildBundle(source: string): Promise<URL> {
  const { build } = await import('esbuild');
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-worker-'));
  process.once('exit', () => rmSync(folder, { recursive: true, force: true }));
  const outfile = join(folder, `${basename(source, '.ts')}.mjs`);
  await build({
    entryPoints: [source],
    bundle: true,
    platform: 'node',
    format: 'esm',
    outfile,
    logLevel: 'error',
    // Modules that are loaded when they are needed are found from the sources, not from the bundle's folder.
    define: { 'import.meta.url': JSON.stringify(pathToFileURL(source).href) },
  });
  return pathToFileURL(outfile);
}
