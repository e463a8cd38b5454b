/**
 * Prebuilt kernels: which library is taken, which is ignored and why, and that it computes what compiled kernels do. Here the
 * compiler of this machine makes a library, of the kernels that the program calls; with TREFOIL_LONG=1 zig's clang makes that
 * of the package, and it computes all bits of `dev/bits.mjs`.
 */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  appendFileSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { root, runNode, trefoilMain } from '../../testing/cli.js';
import { compilerFlags, defaultCompilerOptions, findCompiler } from './compile.js';
import { PLATFORMS, type PrebuiltManifest, prebuiltKey } from './prebuilt.js';
import { CPU_FOLDER, kernelName, kernelSources } from './sources.js';

const platform = `${process.platform}-${process.arch}`;
const folder = mkdtempSync(join(tmpdir(), 'trefoil-prebuilt-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));
/** An installed package: a copy of dist/ with the kernels beside it in node_modules. */
const installed = join(folder, 'node_modules', 'trefoil');
const kernels = join(folder, 'node_modules', '@trefoil', platform);
const manifestPath = join(kernels, 'kernels.json');
const library = join(kernels, 'kernels.so');
let manifest: PrebuiltManifest;

const isLong = Boolean(process.env['TREFOIL_LONG']);
const CALLED = ['runtime.cpp', 'tensor/random', 'ops/linear', 'ops/sum'];

async function makeLibrary(): Promise<void> {
  if (isLong) {
    const options = { cwd: root, maxBuffer: 2 ** 26 };
    if (!process.env['ZIG']) await promisify(execFile)('npm', ['ci', '--prefix', 'packages/zig'], options);
    await promisify(execFile)(process.execPath, ['scripts/kernels.mjs', platform], options);
    for (const name of ['kernels.so', 'kernels.json'])
      cpSync(join(root, 'packages', platform, name), join(kernels, name));
    return;
  }
  const { command, version } = findCompiler(defaultCompilerOptions(process.env).candidates);
  const flags = compilerFlags().map((flag) => (flag === '-O3' ? '-O1' : flag)); // faster to compile, and the same bits
  const sources = kernelSources().filter((source) => CALLED.some((name) => kernelName(source).endsWith(name)));
  expect(sources).toHaveLength(CALLED.length);
  await promisify(execFile)(command, [`-I${CPU_FOLDER}`, ...flags, ...sources, '-o', library]);
  const sha256 = createHash('sha256').update(readFileSync(library)).digest('hex');
  writeFileSync(manifestPath, JSON.stringify({ key: prebuiltKey(platform), compiler: version, sha256 }));
}

interface Outcome {
  readonly kind?: string;
  readonly name?: string;
  readonly hash?: string;
  readonly sum?: number;
  readonly warning?: string | null;
  readonly error?: string;
}

/** Runs a program that uses the package, without a compiler unless `more` names one. */
async function use(more: Record<string, string> = {}): Promise<Outcome> {
  const program = `
    import { openDevice } from 'trefoil';
    import * as nn from 'trefoil/nn';
    import { chooseKernels } from './node_modules/trefoil/dist/device/kernel-choice.js';
    try {
      const device = openDevice('cpu', { threads: 2 });
      const tape = new nn.Tape(device);
      const x = tape.empty([64, 64]);
      nn.fillNormal(x, { seed: 1, stream: 0 });
      const sum = nn.sum(tape, nn.linear(tape, x, x)).item();
      console.log(JSON.stringify({ ...device.kernelSource, sum, warning: chooseKernels(process.env).warning }));
    } catch (error) {
      console.log(JSON.stringify({ error: error.message }));
    }`;
  writeFileSync(join(folder, 'program.mjs'), program);
  const env = { CXX: 'no-such-compiler', TREFOIL_CACHE: join(folder, 'cache'), TREFOIL_KERNELS: '', ...more };
  const { code, stdout, stderr } = await runNode([join(folder, 'program.mjs')], { cwd: folder, env });
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout);
}

const write = (part: object) => writeFileSync(manifestPath, JSON.stringify({ ...manifest, ...part }));

describe.skipIf(!(platform in PLATFORMS))('a prebuilt library', () => {
  beforeAll(async () => {
    trefoilMain();
    for (const path of [kernels, installed]) mkdirSync(path, { recursive: true });
    for (const name of readdirSync(join(root, 'node_modules')))
      if (name !== '.bin') symlinkSync(join(root, 'node_modules', name), join(folder, 'node_modules', name));
    for (const name of ['dist', 'package.json', 'configs'])
      cpSync(join(root, name), join(installed, name), { recursive: true });
    cpSync(join(root, 'packages', platform, 'package.json'), join(kernels, 'package.json'));
    await makeLibrary();
    manifest = JSON.parse(readFileSync(manifestPath, 'utf8'));
  });

  it('is taken where no kernels are compiled, and computes what compiled ones do', async () => {
    const found = await use();
    expect(found).toMatchObject({ kind: 'prebuilt', hash: manifest.key, isFused: true, warning: null });
    expect(found.name).toBe(`${manifest.compiler} in @trefoil/${platform}`);
    expect(existsSync(join(folder, 'cache'))).toBe(false); // nothing was compiled
    const { cache, candidates } = defaultCompilerOptions(process.env);
    const { command } = findCompiler(candidates);
    const own = { CXX: command, TREFOIL_CACHE: dirname(cache) };
    const native = await use({ ...own, TREFOIL_KERNELS: 'native' });
    expect(native).toMatchObject({ kind: 'native', sum: found.sum });
    // A compiler alone is no reason to compile.
    expect(await use({ CXX: command })).toMatchObject({ kind: 'prebuilt' });
  });

  it('is ignored if its key is not that of the sources, or it is damaged; then WebAssembly follows', async () => {
    const wish = { TREFOIL_KERNELS: 'prebuilt' };
    write({ key: '0123456789abcdef' });
    const other = await use();
    expect(other).toMatchObject({
      kind: 'wasm',
      warning: expect.stringMatching(/the package @trefoil\/\S+ is ignored: it was made from other sources.*no C\+\+/),
    });
    expect((await use(wish)).error).toMatch(/^TREFOIL_KERNELS=prebuilt: the package .* other sources .*; install/);
    write({});
    // A change of a kernel changes the key.
    const header = join(installed, 'dist', 'device', 'cpu', 'simd.h');
    const text = readFileSync(header);
    appendFileSync(header, '\n// changed\n');
    expect((await use()).warning).toContain('it was made from other sources');
    writeFileSync(header, text);
    const bytes = readFileSync(library);
    writeFileSync(library, bytes.subarray(0, bytes.length / 2));
    expect((await use()).warning).toContain('kernels.so is damaged');
    // The system refuses to load it.
    writeFileSync(library, 'no library');
    write({ sha256: createHash('sha256').update('no library').digest('hex') });
    expect((await use()).warning).toMatch(/^[^\n]*@trefoil\/\S+ is ignored: [^\n]+$/);
    writeFileSync(library, bytes);
    write({});
    expect(await use(wish)).toMatchObject({ kind: 'prebuilt', warning: null });
    rmSync(kernels, { recursive: true });
    expect((await use(wish)).error).toMatch(/^TREFOIL_KERNELS=prebuilt: the package @trefoil\/\S+ is not installed; /);
    expect((await use()).warning).toMatch(/^kernels run in WebAssembly, at about half the speed: there is no C\+\+ /);
  });
});

describe.skipIf(!isLong || !(platform in PLATFORMS))('the library of the package', () => {
  it('computes the bits of compiled kernels', async () => {
    const bits = (source: string) =>
      runNode([join(root, 'dev', 'bits.mjs')], { cwd: root, env: { TREFOIL_KERNELS: source } });
    const [prebuilt, native] = [await bits('prebuilt'), await bits('native')];
    expect(prebuilt.code, prebuilt.stderr).toBe(0);
    expect(prebuilt.stdout).toBe(native.stdout);
  });

  it('needs nothing but glibc 2.17', async () => {
    const { stdout } = await promisify(execFile)('objdump', ['-p', join(root, 'packages', platform, 'kernels.so')]);
    const needed = [...stdout.matchAll(/NEEDED +(\S+)/g)].map(([, name]) => name);
    expect(needed.filter((name) => !/^(libc|libm|libpthread|libdl|ld-linux[\w-]*)\.so/.test(name))).toEqual([]);
    const versions = [...stdout.matchAll(/GLIBC_2\.(\d+)/g)].map(([, minor]) => Number(minor));
    expect(Math.max(...versions)).toBeLessThanOrEqual(17);
  });
});
