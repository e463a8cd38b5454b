// Builds kernels that need no compiler where they run.
//
//   npm run kernels -- wasm
//
// The two files in the tree and the package: src/device/wasm/kernels-fma.wasm and kernels.wasm. Needs clang 19 with wasm-ld
// and libc++ for wasm32 (Debian: apt-get install clang-19 lld-19 libc++-19-dev-wasm32 wasi-libc). kernels.json holds the hash
// of the sources, which a test compares: run this after a change of a kernel.
//
//   npm ci --prefix packages/zig && npm run kernels -- linux-x64     (or linux-arm64)
//
// The library of a package, packages/linux-x64/kernels.so, and its kernels.json. It is not in the tree: a release builds it.
// The compiler is zig's clang, at the version and hash of packages/zig/package-lock.json, on Linux on x86-64; ZIG names
// another. Needs `npm run build`: the sources are those in dist/.
import { execFile, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
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

async function buildWasm() {
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

/** Most of the time goes to zig's libc++, which ZIG_GLOBAL_CACHE_DIR keeps. */
async function buildLibrary(platform) {
  const { prebuiltFlags, prebuiltKey } = await import('../dist/device/cpu/prebuilt.js');
  const packages = join(root, 'packages', 'zig', 'node_modules', '@zigc');
  const zig = process.env.ZIG || join(packages, 'linux-x64', 'bin', 'zig');
  if (!existsSync(zig)) throw new Error('there is no zig: run `npm ci --prefix packages/zig`, or name it in ZIG');
  const target = join(root, 'packages', platform);
  const work = mkdtempSync(join(tmpdir(), 'trefoil-kernels-'));
  try {
    const env = {
      ZIG_GLOBAL_CACHE_DIR: join(work, 'global'),
      ...process.env,
      ...(process.env.ZIG ? {} : { ZIG_LIB_DIR: join(packages, 'lib') }),
      ZIG_LOCAL_CACHE_DIR: join(work, 'local'),
    };
    const run = (words) => promisify(execFile)(zig, words, { cwd: join(root, 'dist'), env, maxBuffer: 2 ** 26 });
    const [version, { stdout: clang }] = [await run(['version']), await run(['c++', '--version'])];
    const names = ['device/cpu/runtime.cpp', ...all.filter((name) => /(^|\/)cpu\.cpp$/.test(name))];
    const library = join(work, 'kernels.so');
    await run(['c++', ...prebuiltFlags(platform), '-Idevice/cpu', ...names, '-o', library]);
    const bytes = readFileSync(library);
    const manifest = {
      key: prebuiltKey(platform),
      compiler: `${clang.split('\n')[0]} (zig ${version.stdout.trim()})`,
      sha256: createHash('sha256').update(bytes).digest('hex'),
    };
    writeFileSync(join(target, 'kernels.so'), bytes);
    writeFileSync(join(target, 'kernels.json'), `${JSON.stringify(manifest, null, 2)}\n`);
    console.log(`packages/${platform}/kernels.so: ${(bytes.length / 1000).toFixed(0)} kB, sha256 ${manifest.sha256}`);
  } finally {
    rmSync(work, { recursive: true, force: true });
  }
}

const TARGETS = {
  wasm: buildWasm,
  'linux-x64': () => buildLibrary('linux-x64'),
  'linux-arm64': () => buildLibrary('linux-arm64'),
};

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const target = TARGETS[process.argv[2]];
  if (!target) {
    console.error(`usage: npm run kernels -- ${Object.keys(TARGETS).join('|')}`);
    process.exit(2);
  }
  try {
    await target();
  } catch (error) {
    console.error(`the kernels could not be built: ${error.stderr || error.message}`);
    process.exit(1);
  }
}
