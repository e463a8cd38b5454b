/** The kernel cache under everything that goes wrong on real machines: races, damage, bad disks, compilers, other users. */
import { execFile, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import {
  chmodSync,
  chownSync,
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { availableParallelism, homedir, tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { promisify } from 'node:util';
import koffi from 'koffi';
import { afterAll, beforeEach, describe, expect, it, type TestContext } from 'vitest';
import { UsageError } from '../../errors.js';
import { buildChild, startChild } from '../../testing/child.js';
import { compilerFlags, defaultCompilerOptions, findCompiler, KernelCompiler, processorIdentity } from './compile.js';
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
  const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', `mode=755,${options}`, 'tmpfs', disk], { encoding: 'utf8' });
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

  it('keeps another entry when an indirectly included header changes', () => {
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
  it.each(damages)('rebuilds an entry that was %s, and never returns it', (_, damage) => {
    const library = compiler().library(source);
    const whole = readFileSync(library);
    damage(library);
    const rebuilt = compiler().library(source);
    expect(readFileSync(rebuilt).equals(whole)).toBe(true);
    expect(readdirSync(cache)).toHaveLength(1);
    expect(answer(rebuilt)).toBe(42);
  });

  it('supports two processes that compile the same kernel at once', async () => {
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

  it('is in the folder of the environment; empty variables count as unset', () => {
    const cacheOf = (environment: Record<string, string>) => defaultCompilerOptions(environment).cache;
    expect(cacheOf({ TREFOIL_CACHE: '/a', XDG_CACHE_HOME: '/b' })).toBe('/a/kernels');
    expect(cacheOf({ XDG_CACHE_HOME: '/b' })).toBe('/b/trefoil/kernels');
    expect(cacheOf({ TREFOIL_CACHE: '', XDG_CACHE_HOME: '' })).toBe(join(homedir(), '.cache/trefoil/kernels'));
    expect(defaultCompilerOptions({ CXX: 'clang++' }).candidates).toEqual(['clang++']);
    expect(defaultCompilerOptions({ CXX: '' }).candidates).toEqual(['g++', 'clang++', 'c++']);
  });
});

describe('without a compiler', () => {
  const none = (target?: string) =>
    new KernelCompiler({ cache, candidates: ['no-such-compiler'], ...(target && { target }) });

  it('the kernels of a warm cache are used, whatever compiled them', () => {
    const library = compiler().library(source);
    expect(none().library(source)).toBe(library);
    expect(answer(none().library(source))).toBe(42);
  });

  it('a kernel that the cache lacks is refused, and a damaged one too', () => {
    const library = compiler().library(source);
    truncateSync(library, 100);
    expect(refusal(() => none().library(source))).toContain('no C++ compiler found (tried no-such-compiler)');
  });

  it('a cache for a named architecture does not depend on the processor it was filled on', () => {
    const target = process.arch === 'x64' ? 'x86-64' : 'armv8-a';
    const library = new KernelCompiler({ cache, candidates, target }).library(source);
    expect(none(target).library(source)).toBe(library);
    expect(refusal(() => none().library(source))).toContain('no C++ compiler found');
    expect(compilerFlags(target)).toContain(`-march=${target}`);
    expect(defaultCompilerOptions({ TREFOIL_MARCH: target }).target).toBe(target);
  });

  it('an architecture is a name, and one that the processor can run', (context) => {
    expect(refusal(() => defaultCompilerOptions({ TREFOIL_MARCH: '-o /x' }))).toContain('TREFOIL_MARCH: "-o /x"');
    if (/\bavx512f\b/.test(processorIdentity()) || process.arch !== 'x64')
      return context.skip('this processor has AVX-512, or is not an x86-64');
    expect(refusal(() => defaultCompilerOptions({ TREFOIL_MARCH: 'x86-64-v4' }))).toContain('needs avx512f');
  });
});

describe('a cache that another user could have written', () => {
  it.each([
    ['a folder', 0o775, () => cache],
    ['a folder', 0o757, () => cache],
    ['a file', 0o666, () => join(cache, readdirSync(cache)[0])],
    ['a file', 0o620, () => join(cache, readdirSync(cache)[0])],
  ])('%s with mode %o is refused with the command that fixes it', (_, mode, path) => {
    compiler().library(source);
    chmodSync(path(), mode);
    const message = refusal(() => compiler().library(source));
    expect(message).toContain(`the kernel cache ${path()} can be written by other users`);
    expect(message).toContain(`chmod go-w ${path()}`);
    chmodSync(path(), mode & ~0o022);
    expect(answer(compiler().library(source))).toBe(42);
  });

  it('is not written to either', () => {
    mkdirSync(cache);
    chmodSync(cache, 0o777);
    expect(refusal(() => compiler().library(source))).toContain('can be written by other users');
    expect(readdirSync(cache)).toEqual([]);
  });

  it('is refused when it belongs to another user', (context) => {
    if (process.getuid?.() !== 0) return context.skip('only root can give a file to another user');
    const library = compiler().library(source);
    for (const path of [cache, library]) {
      chownSync(path, 4711, 4711);
      expect(refusal(() => compiler().library(source))).toContain(`${path} belongs to another user (uid 4711)`);
      chownSync(path, 0, 0);
    }
  });

  it('is created so that the group cannot write, whatever the umask', () => {
    const before = process.umask(0o002);
    try {
      const library = compiler().library(source);
      for (const path of [cache, library]) expect(statSync(path).mode & 0o022).toBe(0);
      expect(compiler().library(source)).toBe(library);
    } finally {
      process.umask(before);
    }
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
  it('that is missing is named with the remedy', () => {
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

  it('that is killed is named', () => {
    const dying = join(folder, 'dying');
    writeFileSync(dying, '#!/bin/sh\n[ "$1" = --version ] && echo dying 1.0 && exit 0\nkill -9 $$\n', { mode: 0o755 });
    const message = refusal(() => new KernelCompiler({ cache, candidates: [dying] }).library(source));
    expect(message).toContain(`${dying} could not compile ${source}: it was killed by SIGKILL`);
  });

  it('reports its progress with counts', () => {
    const events: unknown[] = [];
    const progress = {
      begin: (...event: unknown[]) => void events.push(event),
      end: () => void events.push('end'),
    };
    const reporting = new KernelCompiler({ cache, candidates, progress });
    reporting.library(source);
    reporting.library(source);
    const [, , total] = events[0] as [string, number, number];
    expect(total).toBeGreaterThan(15); // the package's own kernels, none of which is in this cache
    const other = join(folder, 'other.cpp');
    writeFileSync(other, 'extern "C" int answer() { return 44; }\n');
    reporting.library(other);
    expect(events).toEqual([[source, 0, total], 'end', [other, 1, total], 'end']);
  });

  it('compiles all kernels of the package, as many at once as there are cores', async () => {
    const log = join(folder, 'log');
    const fake = join(folder, 'fake');
    const together = Math.min(2, availableParallelism());
    // The first does not end before a second has begun.
    const wait = `while [ $(grep -c begin ${log}) -lt ${together} ]; do sleep 0.05; done`;
    const body = `echo begin >> ${log}\n${wait}\nfor last; do :; done\necho "$*" > "$last"\necho end >> ${log}`;
    writeFileSync(fake, `#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\n${body}\n`, { mode: 0o755 });
    const events: unknown[] = [];
    const progress = { begin: (...event: unknown[]) => void events.push(event), end: () => void events.push('end') };
    const all = new KernelCompiler({ cache, candidates: [fake], progress });
    expect(all.isCold).toBe(true);
    const count = await all.compileAll();
    expect(all.isCold).toBe(false);
    expect(readdirSync(cache)).toHaveLength(count);
    expect(events.map((event) => (event === 'end' ? event : (event as unknown[]).slice(1)))).toEqual([
      ...Array.from({ length: count }, (_, i) => [i, count]),
      'end',
    ]);
    let [running, most] = [0, 0];
    for (const line of readFileSync(log, 'utf8').trim().split('\n')) {
      running += line === 'begin' ? 1 : -1;
      most = Math.max(most, running);
    }
    expect(most).toBeGreaterThanOrEqual(together);
    expect(most).toBeLessThanOrEqual(availableParallelism());
    expect(await all.compileAll((kernel) => kernel.startsWith('ops/attention/'))).toBeLessThan(count);
    expect(await all.compileAll()).toBe(count);
    expect(readFileSync(log, 'utf8').match(/begin/g)).toHaveLength(count); // the second time nothing was missing
  });

  it('that fails on one of all kernels is reported, and no other one is begun', async () => {
    const failing = join(folder, 'failing');
    const log = join(folder, 'log');
    const script = `[ "$1" = --version ] && echo failing 1.0 && exit 0\necho begin >> ${log}\necho "error: no" >&2\nexit 1`;
    writeFileSync(failing, `#!/bin/sh\n${script}\n`, { mode: 0o755 });
    const all = new KernelCompiler({ cache, candidates: [failing] });
    await expect(all.compileAll()).rejects.toThrow('.cpp: error: no (try another compiler with CXX=clang++)');
    const begun = () => readFileSync(log, 'utf8').match(/begin/g)!.length;
    expect(begun()).toBeLessThanOrEqual(availableParallelism());
  });

  it('that is interrupted by Ctrl-C is reported as such', async () => {
    const slow = join(folder, 'slow');
    const begun = join(folder, 'begun');
    const script = `[ "$1" = --version ] && echo slow 1.0 && exit 0\ntouch ${begun}\nexec sleep 600\n`;
    writeFileSync(slow, `#!/bin/sh\n${script}`, { mode: 0o755 });
    const child = await buildChild(join(folder, 'child.mjs'), import.meta.dirname, INTERRUPTED);
    const started = spawn(process.execPath, [child, cache, source, slow], {
      detached: true, // its own process group, like a command in a terminal
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    let output = '';
    started.stdout.setEncoding('utf8').on('data', (text: string) => {
      output += text;
    });
    const closed = once(started, 'close');
    await expect.poll(() => existsSync(begun)).toBe(true);
    process.kill(-started.pid!, 'SIGINT');
    await closed;
    expect(output).toBe(
      `compiling\n4: interrupted (SIGINT) while compiling ${relative(join(folder, '../..'), source)}; kernels compiled before are kept, ` +
        'so the next start continues here\n',
    );
    expect(readdirSync(cache)).toEqual([]);
  });

  it('is the first candidate that answers, and part of the name', () => {
    expect(findCompiler(['no-such-compiler', ...candidates]).command).toBe(findCompiler(candidates).command);
    const other = join(folder, 'other');
    const { command } = findCompiler(candidates);
    writeFileSync(other, `#!/bin/sh\nexec ${command} "$@"\n`, { mode: 0o755 });
    compiler().library(source);
    new KernelCompiler({ cache, candidates: [other] }).library(source);
    const names = readdirSync(cache).map((name) => name.split('.'));
    expect(new Set(names.map(([key]) => key)).size).toBe(1);
    expect(new Set(names.map(([, identity]) => identity)).size).toBe(2);
  });

  it('accepts every kernel without a warning', async () => {
    const sources = join(import.meta.dirname, '../..');
    const kernels = readdirSync(sources, { recursive: true, encoding: 'utf8' }).filter(
      (name) => name.endsWith('.cpp') && !name.startsWith('device/wasm'), // which only clang compiles
    );
    expect(kernels.length).toBeGreaterThan(10);
    const flags = [...compilerFlags().filter((flag) => flag !== '-O3'), '-Wall', '-Wextra', '-fsyntax-only'];
    const { command } = findCompiler(candidates);
    const all = kernels.map((name) => join(sources, name));
    // Asynchronous: the test runner ends a worker that is blocked for a minute.
    const check = promisify(execFile)(command, [`-I${import.meta.dirname}`, ...flags, ...all], { maxBuffer: 2 ** 26 });
    const { stderr } = await check.catch((error: { stderr: string }) => error); // its errors are what is looked at
    expect(stderr.split('\n').filter((line) => /warning|error/.test(line) && !/unused/.test(line))).toEqual([]);
  });
});

/** A command with a handler of SIGINT, as training has, that prints how the compilation ended. */
const INTERRUPTED = `
  import { KernelCompiler } from './compile.js';
  const [cache, source, compiler] = process.argv.slice(2);
  process.on('SIGINT', () => {});
  const progress = { begin: () => console.log('compiling'), end: () => {} };
  try {
    new KernelCompiler({ cache, candidates: [compiler], progress }).library(source);
  } catch (error) {
    console.log(error.exitCode + ': ' + error.message);
  }`;

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
