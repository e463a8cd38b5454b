// Builds the page into a folder that any file server can serve (default: artifacts/browser).
//   node examples/browser/build.mjs [FOLDER]
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { buildSync } from 'esbuild';

const here = dirname(fileURLToPath(import.meta.url));
const root = join(here, '..', '..');
export const KERNELS = ['kernels-fma.wasm', 'kernels.wasm', 'kernels.json'];

/** The files of the page without the kernels, by name. */
export function pageFiles() {
  const { outputFiles } = buildSync({
    entryPoints: ['page.tsx', 'worker.ts', 'page.css'].map((name) => join(here, name)),
    outdir: here,
    bundle: true,
    minify: true,
    write: false,
    format: 'esm',
    platform: 'browser',
    target: 'es2022',
    logLevel: 'error',
    jsx: 'automatic',
    jsxImportSource: 'preact',
    legalComments: 'none',
    alias: { 'trefoil/browser': join(root, 'src', 'exports', 'browser.ts') },
  });
  const files = new Map(outputFiles.map(({ path, contents }) => [path.slice(here.length + 1), contents]));
  const licences = ['preact', 'uplot', 'zod'].map((name) =>
    readFileSync(join(dirname(createRequire(import.meta.url).resolve(`${name}/package.json`)), 'LICENSE')),
  );
  return files.set('LICENSES.txt', Buffer.concat(licences));
}

/** Files that are copied as they are: name, and where each lies. */
export const COPIED = new Map([
  ['index.html', join(here, 'index.html')],
  ['favicon.svg', join(root, 'src', 'dashboard', 'web', 'favicon.svg')],
]);

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const folder = process.argv[2] ?? join(root, 'artifacts', 'browser');
  mkdirSync(folder, { recursive: true });
  for (const [name, content] of pageFiles()) writeFileSync(join(folder, name), content);
  for (const [name, path] of COPIED) copyFileSync(path, join(folder, name));
  for (const name of KERNELS) copyFileSync(join(root, 'src', 'device', 'wasm', name), join(folder, name));
  console.log(`built ${folder}: serve it with any file server, or run trefoil start --browser`);
}
