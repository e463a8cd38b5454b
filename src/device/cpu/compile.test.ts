/** The kernel cache under everything that goes wrong on real machines: races, damage, bad disks, bad compilers. */
import { execFile, spawnSync } from 'node:child_process';
import {
  cpSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { homedir, tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import koffi from 'koffi';
import { afterAll, beforeEach, describe, expect, it, type TestContext } from 'vitest';
import { UsageError } from '../../errors.js';
import { buildChild, startChild } from '../../testing/child.js';
import { compilerFlags, defaultCompilerOptions, findCompiler, KernelCompiler } from './compile.js';
import { CpuDevice } from './cpu.js';

const { candidates } = defaultCompilerOptions(process.env);
const root = mkdtempSync(join(tmpdir(), 'trefoil-compile-'));
const mounted: string[] = [];
afterAll(() => {
  for (const disk of mounted) spawnSync('umount', ['-l', disk]);
  rmSync(root, { recursive: true, force: true });
});

let folder: string;
let cache: string;
let source: string;
beforeEach(() => {
  folder = mkdtempSync(join(root, 'test-'));
  cache = join(folder, 'cache');
  source = join(folder, 'tiny.cpp');
  writeFileSync(source, 'extern "C" int answer() { return 42; }\n');
});

const compiler = (into = cache, flags: string[] = []) => new KernelCompiler({ cache: into, candidates, flags });

let copies = 0;
/** Loads a copy: a test that damages a library which this process has loaded would crash the process. */
function answer(library: string): number {
  const copy = join(folder, `copy-${copies++}.so`);
  cpSync(library, copy);
  return koffi.load(copy).func('answer', 'int', [])() as number;
}

/** The one error a person sees: usage, exit code 2, one line. */
function refusal(action: () => unknown): string {
  try {
    action();
  } catch (error) {
    expect(error).toBeInstanceOf(UsageError);
    const { message, exitCode } = error as UsageError;
    expect(exitCode).toBe(2);
    expect(message).not.toContain('\n');
    return message;
  }
  throw new Error('nothing was refused');
}

/** A small disk of its own, or a skipped test with the reason. */
function mountDisk(context: TestContext, options: string): string {
  const disk = mkdtempSync(join(root, 'disk-'));
  const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', options, 'tmpfs', disk], { encoding: 'utf8' });
  if (mount.status !== 0) {
    const reason = `cannot mount a tmpfs: ${mount.error?.message ?? mount.stderr.trim()}`;
    console.warn(`skipped: ${reason}`);
    context.skip(reason);
  }
  mounted.push(disk);
  return disk;
}

const remount = (disk: string, mode: 'ro' | 'rw') =>
  expect(spawnSync('mount', ['-o', `remount,${mode}`, disk]).status).toBe(0);

describe('the kernel cache', () => {
  it('compiles a source once, for any number of compilers', () => {
    const library = compiler().library(source);
    expect(answer(library)).toBe(42);
    const { mtimeMs } = statSync(library);
    expect(compiler().library(source)).toBe(library);
    expect(statSync(library).mtimeMs).toBe(mtimeMs);
    expect(readdirSync(cache)).toHaveLength(1);
  });

  it('keeps another entry for another source, other flags and another header', async () => {
    const first = compiler().library(source);
    const flagged = compiler(cache, ['-DSOMETHING']).library(source);
    writeFileSync(source, 'extern "C" int answer() { return 43; }\n');
    const edited = compiler().library(source);
    expect(new Set([first, flagged, edited]).size).toBe(3);
    expect([first, flagged, edited].map(answer)).toEqual([42, 42, 43]);

    // The headers of a compiler are those beside its code: a bundle in another folder has its own.
    writeFileSync(join(folder, 'answer.h'), '#define ANSWER 7\n');
    writeFileSync(source, '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n');
    const child = await buildChild(join(folder, 'child.mjs'), import.meta.dirname, COMPILE);
    const before = await startChild(child, [cache, source]).done;
    writeFileSync(join(folder, 'answer.h'), '#define ANSWER 8\n');
    const after = await startChild(child, [cache, source]).done;
    expect([before, after].map(({ output }) => answer(output.trim()))).toEqual([7, 8]);
  });

  it('keeps another entry when a header that a header includes is another', () => {
    mkdirSync(join(folder, 'deep'), { recursive: true });
    writeFileSync(join(folder, 'deep', 'outer.h'), '#include "inner.h"\n');
    writeFileSync(source, '#include "deep/outer.h"\nextern "C" int answer() { return INNER; }\n');
    const libraries = [7, 8].map((value) => {
      writeFileSync(join(folder, 'deep', 'inner.h'), `#define INNER ${value}\n`);
      return compiler().library(source);
    });
    expect(libraries.map(answer)).toEqual([7, 8]);
  });

  const damages: [string, (library: string) => void][] = [
    ['truncated', (library) => truncateSync(library, Math.floor(statSync(library).size / 2))],
    ['emptied', (library) => truncateSync(library, 0)],
    [
      'changed in one bit',
      (library) => {
        const bytes = readFileSync(library);
        bytes[Math.floor(bytes.length / 3)] ^= 1;
        writeFileSync(library, bytes);
      },
    ],
    ['replaced by something else', (library) => writeFileSync(library, 'not a library')],
  ];
  it.each(damages)('rebuilds an entry that was %s, and never hands it out', (_, damage) => {
    const library = compiler().library(source);
    const whole = readFileSync(library);
    damage(library);
    const rebuilt = compiler().library(source);
    expect(readFileSync(rebuilt).equals(whole)).toBe(true);
    expect(readdirSync(cache)).toHaveLength(1);
    expect(answer(rebuilt)).toBe(42);
  });

  it('serves two processes that compile the same kernel at once', async () => {
    writeFileSync(source, '#include <map>\n#include <regex>\nextern "C" int answer() { return 42; }\n'); // slow enough
    const child = await buildChild(join(folder, 'child.mjs'), import.meta.dirname, COMPILE);
    for (const damaged of [false, true]) {
      if (damaged) truncateSync(join(cache, readdirSync(cache)[0]), 100);
      const children = [startChild(child, [cache, source, 'wait']), startChild(child, [cache, source, 'wait'])];
      await Promise.all(children.map(({ ready }) => ready));
      for (const { go } of children) go();
      const results = await Promise.all(children.map(({ done }) => done));
      for (const { code, errors } of results) expect([code, errors]).toEqual([0, '']);
      const [entry, ...others] = readdirSync(cache);
      expect(others).toEqual([]);
      expect(results.map(({ output }) => output.trim())).toEqual([join(cache, entry), join(cache, entry)]);
      expect(answer(join(cache, entry))).toBe(42);
    }
  });

  it('is where the environment says, and empty variables say nothing', () => {
    const cacheOf = (environment: Record<string, string>) => defaultCompilerOptions(environment).cache;
    expect(cacheOf({ TREFOIL_CACHE: '/a', XDG_CACHE_HOME: '/b' })).toBe('/a/kernels');
    expect(cacheOf({ XDG_CACHE_HOME: '/b' })).toBe('/b/trefoil/kernels');
    expect(cacheOf({ TREFOIL_CACHE: '', XDG_CACHE_HOME: '' })).toBe(join(homedir(), '.cache/trefoil/kernels'));
    expect(defaultCompilerOptions({ CXX: 'clang++' }).candidates).toEqual(['clang++']);
    expect(defaultCompilerOptions({ CXX: '' }).candidates).toEqual(['g++', 'clang++', 'c++']);
  });
});

describe('a cache that cannot be used', () => {
  const remedy = 'set TREFOIL_CACHE to a folder that can be written';

  it('has a file in its way', () => {
    writeFileSync(cache, '');
    expect(refusal(() => compiler(join(cache, 'kernels')).library(source))).toBe(
      `the kernel cache ${join(cache, 'kernels')} cannot be used (ENOTDIR): ${remedy}`,
    );
    expect(refusal(() => compiler().library(source))).toContain(remedy);
  });

  it('is read-only: what it holds is used, what it lacks is refused', (context) => {
    const disk = mountDisk(context, 'size=1m');
    const library = compiler(disk).library(source);
    remount(disk, 'ro');
    expect(compiler(disk).library(source)).toBe(library);
    const message = `the kernel cache ${disk} cannot be written: ${remedy}`;
    expect(refusal(() => compiler(disk, ['-DOTHER']).library(source))).toBe(message);
    remount(disk, 'rw');
    truncateSync(library, 100);
    remount(disk, 'ro');
    expect(refusal(() => compiler(disk).library(source))).toBe(message); // damaged, and cannot be replaced
  });

  it('is on a full disk', (context) => {
    const disk = mountDisk(context, 'size=64k');
    writeFileSync(join(disk, 'filler'), new Uint8Array(60 * 1024));
    expect(refusal(() => compiler(disk).library(source))).toBe(
      `the kernel cache ${disk} is on a full disk: free some space or ${remedy}`,
    );
    expect(readdirSync(disk)).toEqual(['filler']); // nothing half-written stays behind
    rmSync(join(disk, 'filler'));
    expect(answer(compiler(disk).library(source))).toBe(42);
  });

  it('is on a disk from which nothing may be run', (context) => {
    const disk = mountDisk(context, 'size=8m,noexec');
    const message = refusal(() => new CpuDevice({ compiler: { cache: disk, candidates } }));
    expect(message).toMatch(/^a compiled kernel cannot be loaded \(.+\): set TREFOIL_CACHE to a folder from which/);
  });
});

describe('a compiler', () => {
  it('that is missing is named, with what to install', () => {
    const missing = new KernelCompiler({ cache, candidates: ['no-such-compiler', 'no-such-either'] });
    expect(refusal(() => missing.library(source))).toBe(
      'no C++ compiler found (tried no-such-compiler, no-such-either): install one (Debian: apt-get install g++; ' +
        'macOS: xcode-select --install) or name it in the environment variable CXX',
    );
    expect(() => readdirSync(cache)).toThrow('ENOENT'); // nothing created
  });

  it('that reports an error is quoted by its first one', () => {
    writeFileSync(source, 'extern "C" int answer() { return missing_name; }\nint also_wrong = "text";\n');
    const message = refusal(() => compiler().library(source));
    expect(message).toContain(`${compiler().compiler.command} could not compile ${source}: `);
    expect(message).toContain('missing_name');
    expect(message).toContain('(try another compiler with CXX=clang++)');
    expect(readdirSync(cache)).toEqual([]);
  });

  it('that dies is named too', () => {
    const dying = join(folder, 'dying');
    writeFileSync(dying, '#!/bin/sh\n[ "$1" = --version ] && echo dying 1.0 && exit 0\nkill -9 $$\n', { mode: 0o755 });
    const message = refusal(() => new KernelCompiler({ cache, candidates: [dying] }).library(source));
    expect(message).toContain(`${dying} could not compile ${source}: it was ended by SIGKILL`);
  });

  it('is the first candidate that answers, and part of the key', () => {
    expect(findCompiler(['no-such-compiler', ...candidates]).command).toBe(findCompiler(candidates).command);
    const other = join(folder, 'other');
    const { command } = findCompiler(candidates);
    writeFileSync(other, `#!/bin/sh\nexec ${command} "$@"\n`, { mode: 0o755 });
    compiler().library(source);
    new KernelCompiler({ cache, candidates: [other] }).library(source);
    const keys = readdirSync(cache).map((name) => name.split('.')[0]);
    expect(new Set(keys).size).toBe(2);
  });

  it('accepts every kernel without a warning', async () => {
    const sources = join(import.meta.dirname, '../..');
    const kernels = readdirSync(sources, { recursive: true, encoding: 'utf8' }).filter((name) => name.endsWith('.cpp'));
    expect(kernels.length).toBeGreaterThan(10);
    const flags = [...compilerFlags().filter((flag) => flag !== '-O3'), '-Wall', '-Wextra', '-fsyntax-only'];
    const { command } = findCompiler(candidates);
    const all = kernels.map((name) => join(sources, name));
    // Not waited for in place: the test runner gives up on a worker that it has not heard from for a minute.
    const check = promisify(execFile)(command, [`-I${import.meta.dirname}`, ...flags, ...all], { maxBuffer: 2 ** 26 });
    const { stderr } = await check.catch((error: { stderr: string }) => error); // its errors are what is looked at
    expect(stderr.split('\n').filter((line) => /warning|error/.test(line) && !/unused/.test(line))).toEqual([]);
  });
});

/** Prints the path of a compiled library; with a third argument it first waits for a line on its input. */
const COMPILE = `
  import { once } from 'node:events';
  import { defaultCompilerOptions, KernelCompiler } from './compile.js';
  const [cache, source, wait] = process.argv.slice(2);
  const compiler = new KernelCompiler({ cache, candidates: defaultCompilerOptions(process.env).candidates });
  compiler.compiler; // found before the race begins
  if (wait) {
    process.stderr.write('ready');
    await once(process.stdin, 'data');
    process.stdin.destroy();
  }
  console.log(compiler.library(source));`;
