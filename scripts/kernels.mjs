// Builds the kernels in WebAssembly that are in the tree and the package: src/device/wasm/kernels-fma.wasm and kernels.wasm.
//
//   npm run kernels -- wasm
//
// Needs clang 19 with wasm-ld and libc++ for wasm32 (Debian: apt-get install clang-19 lld-19 libc++-19-dev-wasm32 wasi-libc).
// kernels.json holds the hash of the sources, which a test compares: run this after a change of a kernel.
import { execFile, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { availableParallelism, tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';

const root = fileURLToPath(new URL('..', import.meta.url));
const source = join(root, 'src');
const folder = join(source, 'device', 'wasm');
const COMPILER = process.env.CXX || 'clang++-19';
const LINKER = process.env.WASM_LD || 'wasm-ld-19';
const FLAGS = [
  '--target=wasm32-wasi',
  '-std=c++17',
  '-O3',
  '-msimd128',
  '-mbulk-memory',
  '-matomics',
  '-fno-exceptions',
  '-fno-rtti',
  '-fvisibility=hidden',
  '-fno-math-errno',
  '-fno-trapping-math',
  '-ffp-contract=off',
];
const FILES = { 'kernels-fma.wasm': ['-mrelaxed-simd'], 'kernels.wasm': [] };
const LINK = [
  '--no-entry',
  '--shared-memory',
  '--import-memory',
  `--initial-memory=${20 * 65536}`,
  `--max-memory=${2 ** 32}`,
  '--stack-first',
  '-z',
  `stack-size=${2 ** 20}`,
  '--gc-sections',
  '--strip-all',
  ...['__stack_pointer', '__tls_size', '__tls_align', '__wasm_init_tls'].map((name) => `--export=${name}`),
];

const all = readdirSync(source, { recursive: true, encoding: 'utf8' })
  .map((name) => name.replaceAll('\\', '/'))
  .filter((name) => !/(^|\/)testing\//.test(name))
  .sort();
// Ranks need MPI, which is native.
const kernels = all.filter((name) => /(^|\/)cpu\.cpp$/.test(name) && name !== 'device/mpi/cpu.cpp');
const sources = ['device/wasm/runtime.cpp', ...kernels];

/** The hash of all that determines the files, except the compiler. */
export function sourcesKey() {
  const hash = createHash('sha256').update(JSON.stringify([FLAGS, FILES, LINK]));
  for (const name of [...sources, ...all.filter((name) => /\.h$/.test(name))])
    hash.update(`\0${name}\0`).update(readFileSync(join(source, name)));
  return hash.digest('hex').slice(0, 32);
}

/** Names of the functions that JavaScript calls: those that begin a line, as all that are extern "C" do. */
function exportedNames() {
  const functions = /^(?:extern "C" )?(?:void|void\*|int32_t|int32_t\*|double) (\w+)\(/gm;
  return sources.flatMap((name) =>
    [...readFileSync(join(source, name), 'utf8').matchAll(functions)].map(([, one]) => one),
  );
}

async function build() {
  const work = mkdtempSync(join(tmpdir(), 'trefoil-wasm-'));
  try {
    for (const [file, more] of Object.entries(FILES)) {
      const waiting = [...sources];
      const objects = sources.map((name) => join(work, `${file}-${name.replaceAll('/', '_')}.o`));
      const compileNext = async () => {
        for (let name = waiting.shift(); name !== undefined; name = waiting.shift()) {
          const object = objects[sources.indexOf(name)];
          // Relative names: the path of the checkout is not in the result.
          const words = [...FLAGS, ...more, '-Isrc/device/cpu', '-c', relative(root, join(source, name)), '-o', object];
          await promisify(execFile)(COMPILER, words, { cwd: root });
        }
      };
      await Promise.all(Array.from({ length: availableParallelism() }, compileNext));
      const names = exportedNames().map((name) => `--export-if-defined=${name}`);
      await promisify(execFile)(LINKER, [...LINK, ...names, ...objects, '-o', join(folder, file)]);
      console.log(`${file}: ${(readFileSync(join(folder, file)).length / 1000).toFixed(0)} kB`);
    }
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
  const compiler = spawnSync(COMPILER, ['--version'], { encoding: 'utf8' }).stdout.split('\n')[0];
  writeFileSync(join(folder, 'kernels.json'), `${JSON.stringify({ key: sourcesKey(), compiler }, null, 2)}\n`);
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  if (process.argv[2] !== 'wasm') {
    console.error('usage: npm run kernels -- wasm');
    process.exit(2);
  }
  try {
    await build();
  } catch (error) {
    console.error(`the kernels could not be built: ${error.stderr || error.message}`);
    process.exit(1);
  }
}
