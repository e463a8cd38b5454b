// Builds dist/: TypeScript to JavaScript, and the kernel sources beside it (they are compiled on the machine they run on).
//   --quiet  prints nothing
//   --quick  JavaScript without type declarations, in a tenth of the time, unless a complete build is there
import { spawnSync } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { buildSync } from 'esbuild';
import { COPIED, pageFiles } from '../examples/browser/build.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const quiet = process.argv.includes('--quiet');
const tsc = join(dirname(createRequire(import.meta.url).resolve('typescript/package.json')), 'bin', 'tsc');

/** Only what differs, and whole: a program that runs from dist/ meanwhile may be compiling this very kernel. */
function replace(path, content) {
  if (existsSync(path) && readFileSync(path).equals(content)) return;
  mkdirSync(dirname(path), { recursive: true });
  const aside = `${path}.tmp-${process.pid}`;
  writeFileSync(aside, content);
  renameSync(aside, path);
}

// Kernel sources and kernels in WebAssembly, plain JavaScript, and figures that a module reads.
const BESIDE = /\.(cpp|h|cu|cuh|json|wasm|mjs)$/;
const sources = [];
for (const entry of readdirSync(join(root, 'src'), { recursive: true, withFileTypes: true })) {
  const from = join(entry.parentPath ?? entry.path, entry.name);
  if (!entry.isFile() || /[\\/](testing|dashboard[\\/]web)[\\/]/.test(from)) continue;
  if (/(?<!\.test)\.ts$/.test(from)) sources.push(from);
  if (BESIDE.test(entry.name)) replace(join(root, 'dist', from.slice(join(root, 'src').length)), readFileSync(from));
}
// The pages of the dashboard and of reports: a script each and one style sheet, without any external request.
const web = join(root, 'src', 'dashboard', 'web');
const { outputFiles } = buildSync({
  entryPoints: ['app.tsx', 'report.tsx', 'app.css'].map((name) => join(web, name)),
  outdir: join(root, 'dist', 'dashboard', 'web'),
  bundle: true,
  minify: true,
  write: false,
  format: 'esm',
  target: 'es2022',
  logLevel: 'error',
  jsx: 'automatic',
  jsxImportSource: 'preact',
  legalComments: 'none',
});
const pages = new Map(outputFiles.map(({ path, contents }) => [path, Buffer.from(contents)]));
for (const name of ['index.html', 'favicon.svg'])
  pages.set(join(root, 'dist', 'dashboard', 'web', name), readFileSync(join(web, name)));
const licences = ['preact', 'uplot'].map((name) =>
  readFileSync(join(dirname(createRequire(import.meta.url).resolve(`${name}/package.json`)), 'LICENSE')),
);
pages.set(join(root, 'dist', 'dashboard', 'web', 'LICENSES.txt'), Buffer.concat(licences));
// The page that trains in a tab; `trefoil start --browser` serves it with the kernels of dist/device/wasm.
for (const [name, content] of pageFiles()) pages.set(join(root, 'dist', 'page', name), Buffer.from(content));
for (const [name, path] of COPIED) pages.set(join(root, 'dist', 'page', name), readFileSync(path));
for (const [path, content] of pages) replace(path, content);
// Outputs of renamed and deleted sources would be shipped for ever.
for (const entry of readdirSync(join(root, 'dist'), { recursive: true, withFileTypes: true })) {
  const path = join(entry.parentPath ?? entry.path, entry.name);
  const source = join(root, 'src', path.slice(join(root, 'dist').length)).replace(/(\.d\.ts|\.js|\.js\.map)$/, '.ts');
  if (entry.isFile() && entry.name !== '.tsbuildinfo' && !existsSync(source) && !pages.has(path)) rmSync(path);
}
// The compiler's own record of a complete build: it then writes only what has changed.
const isComplete = existsSync(join(root, 'dist', '.tsbuildinfo'));
if (process.argv.includes('--quick') && !isComplete) {
  const { outputFiles } = buildSync({
    entryPoints: sources,
    outbase: join(root, 'src'),
    outdir: join(root, 'dist'),
    tsconfig: join(root, 'tsconfig.json'),
    format: 'esm',
    sourcemap: true,
    write: false,
    logLevel: 'error',
  });
  for (const { path, contents } of outputFiles) replace(path, Buffer.from(contents));
} else {
  const compiled = spawnSync(process.execPath, [tsc, '-p', 'tsconfig.build.json'], { cwd: root, stdio: 'inherit' });
  if (compiled.status !== 0) process.exit(compiled.status ?? 1);
}
// zod in one file (src/zod.ts): reading its 75 is a tenth of the processor time of a short command.
const licence = readFileSync(
  createRequire(import.meta.url)
    .resolve('zod/package.json')
    .replace('package.json', 'LICENSE'),
);
const [zod] = buildSync({
  entryPoints: [join(root, 'src', 'zod.ts')],
  bundle: true,
  minifySyntax: true,
  minifyWhitespace: true,
  write: false,
  format: 'esm',
  platform: 'neutral',
  target: 'es2022',
  logLevel: 'error',
  banner: { js: `/*! zod\n${licence}*/` },
}).outputFiles;
replace(join(root, 'dist', 'zod.js'), Buffer.from(zod.contents));
const main = join(root, 'dist', 'cli', 'main.js');
if (existsSync(main)) chmodSync(main, 0o755);
if (!quiet) console.log('built dist/');
