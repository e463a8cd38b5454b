/**
 * The rules of the house: imports between the rooms (folders of src/) point downward, operations live in folders,
 * the device room knows no operation, and texts use plain technical English.
 */
import { execFileSync } from 'node:child_process';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { dirname, join, normalize, relative } from 'node:path';
import { gzipSync } from 'node:zlib';
import { build } from 'esbuild';
import { describe, expect, it } from 'vitest';

const root = join(import.meta.dirname, '..');
const tracked = execFileSync('git', ['ls-files'], { cwd: root, encoding: 'utf8' }).trim().split('\n');
const files = tracked.filter((path) => existsSync(join(root, path)));
const read = (path: string) => readFileSync(join(root, path), 'utf8');

/** Rooms from the bottom up. A room may import rooms of lower levels. */
const LEVELS: readonly (readonly string[])[] = [
  ['root'], // modules beside the rooms: errors, folders and the like
  ['device', 'hub'],
  ['tensor'],
  ['ops'],
  ['config'],
  ['data', 'run', 'http'],
  ['model'],
  ['exchange'],
  ['infer'],
  ['evaluate', 'train', 'verify'],
  ['bench', 'browser', 'plan', 'serve', 'watch'],
  ['dashboard'],
  ['cli', 'index', 'exports'],
];

const roomOf = (path: string) => {
  const [, name] = path.split('/');
  return name === 'index.ts' ? 'index' : name.endsWith('.ts') ? 'root' : name;
};
const level = (room: string) => LEVELS.findIndex((rooms) => rooms.includes(room));
const isProduction = (path: string) =>
  /^src\/.*\.ts$/.test(path) && !/\.test\.ts$/.test(path) && !/(^|\/)testing\//.test(path);

/** `from -> to` of every import between rooms, with an example. */
function importsBetweenRooms(): Map<string, string> {
  const found = new Map<string, string>();
  for (const path of files.filter(isProduction))
    for (const [, specifier] of read(path).matchAll(/\b(?:from|import)\s*\(?\s*'(\.[^']*)'/g)) {
      const target = relative(root, normalize(join(root, dirname(path), specifier)));
      if (!target.startsWith('src/')) continue;
      const [from, to] = [roomOf(path), roomOf(target.replace(/\.js$/, '.ts'))];
      if (from !== to) found.set(`${from} -> ${to}`, `${path} imports ${specifier}`);
    }
  return found;
}

describe('rooms', () => {
  it('all have a level', () => {
    const rooms = new Set(files.filter(isProduction).map(roomOf));
    expect([...rooms].filter((room) => level(room) < 0)).toEqual([]);
  });

  it('import only rooms below them', () => {
    const wrong = [...importsBetweenRooms()].filter(([pair]) => {
      const [from, to] = pair.split(' -> ');
      return level(to) >= level(from);
    });
    expect(wrong).toEqual([]);
  });
});

/** Modules that a module loads, not those it only takes types from. */
function loadedModules(path: string): string[] {
  const imports = read(path).matchAll(/^(?:import|export) (?!type\b)([^;]*? from )?'(\.[^']*)\.js'/gm);
  const isTypeOnly = (names = '') => {
    const list = /^\{([^}]*)\} from $/.exec(names)?.[1];
    return list?.split(',').every((name) => /^\s*(type\s|$)/.test(name)) ?? false;
  };
  return [...imports]
    .filter(([, names]) => !isTypeOnly(names))
    .map(([, , specifier]) => relative(root, normalize(join(root, dirname(path), `${specifier}.ts`))));
}

describe('modules', () => {
  it('do not load each other in a cycle', () => {
    const modules = new Map(files.filter(isProduction).map((path) => [path, loadedModules(path)]));
    // Modules whose imports are all known to be free of cycles are removed until only cycles, and their importers, are left.
    for (let before = -1; before !== modules.size; ) {
      before = modules.size;
      for (const [path, loaded] of modules) if (!loaded.some((other) => modules.has(other))) modules.delete(path);
    }
    expect([...modules.keys()]).toEqual([]);
  });
});

describe('trefoil/browser', () => {
  it('bundles without a module of Node, in at most 200 kB', async () => {
    const { outputFiles, metafile } = await build({
      entryPoints: [join(root, 'src/exports/browser.ts')],
      bundle: true,
      minify: true,
      write: false,
      metafile: true,
      format: 'esm',
      platform: 'browser',
      target: 'es2022',
      logLevel: 'silent',
    });
    const [output] = Object.values(metafile.outputs);
    expect(output.imports).toEqual([]);
    const [{ text }] = outputFiles;
    // Node's globals would be missing where such a line runs; what is asked for by typeof is not.
    expect(
      [...text.matchAll(/\bBuffer\.\w+|\bprocess\.(?!emitWarning)\w+|\bsetImmediate\(/g)].map(([use]) => use),
    ).toEqual([]);
    expect(gzipSync(text, { level: 9 }).length).toBeLessThanOrEqual(200_000);
  });
});

describe('the fast lane of tests', () => {
  it('has no test that needs the built program, a browser or MPI: these are named *.slow.test.ts', () => {
    const needs = /\b(?:trefoil|trefoilMain|startTrefoil|mpirunAbsence)\(|'playwright-core'/;
    const fast = files.filter((path) => path.endsWith('.test.ts') && !path.endsWith('.slow.test.ts'));
    expect(fast.length).toBeGreaterThan(200);
    expect(fast.filter((path) => path !== 'test/house.test.ts' && needs.test(read(path)))).toEqual([]);
  });
});

describe('programs beside the package', () => {
  it('import only modules of dist/ that the sources have', () => {
    const missing = files
      .filter((path) => /^(bench|dev|scripts|test)\/.*\.mjs$/.test(path))
      .flatMap((path) =>
        [...read(path).matchAll(/\bdist\/([\w/-]+)\.js\b/g)].map(([name, module]) => ({ path, name, module })),
      )
      .filter(({ module }) => !files.includes(`src/${module}.ts`))
      // The web application is bundled.
      .filter(({ module }) => !module.startsWith('dashboard/web/'));
    expect(missing).toEqual([]);
  });
});

describe('src/train', () => {
  it('treats one process as a world of size one: at most four places ask whether there are others', () => {
    const asks =
      /\b(?:size|ranks) (?:>|<|>=|[!=]==) [12]\b|\bcollectives [!=]== null|\b[wW]orld(?:\?\.| [!=]== (?:null|undefined))/;
    const found = files
      .filter((path) => path.startsWith('src/train/') && !path.startsWith('src/train/ranks/') && isProduction(path))
      .flatMap((path) =>
        read(path)
          .split('\n')
          .map((line) => `${path}: ${line.trim()}`),
      )
      .filter((line) => asks.test(line));
    expect(found.length, found.join('\n')).toBeLessThanOrEqual(4);
  });
});

describe('src/ops', () => {
  it('holds folders only', () => {
    const loose = readdirSync(join(root, 'src/ops'), { withFileTypes: true }).filter((entry) => entry.isFile());
    expect(loose.map(({ name }) => name)).toEqual([]);
  });

  it('launches the cuda.cu beside every cuda.ts', () => {
    const launchers = files.filter((path) => /^src\/ops\/.*\/cuda\.ts$/.test(path));
    expect(launchers.length).toBeGreaterThan(15);
    expect(launchers.filter((path) => !read(path).includes("new URL('./cuda.cu'"))).toEqual([]);
  });
});

describe('CPU kernels', () => {
  const kernels = files.filter(
    (path) => /^src\/.*\.(cpp|h)$/.test(path) && !/(^|\/)(testing|mpi)\//.test(path) && !path.endsWith('/runtime.cpp'),
  );
  const lines = () =>
    kernels.flatMap((path) =>
      read(path)
        .split('\n')
        .map((line) => `${path}: ${line.replace(/\/\/.*/, '').trim()}`),
    );

  it('call no function of libm whose last bits depend on the system', () => {
    expect(kernels.length).toBeGreaterThan(30);
    // exp and exp2 without std:: are those of simd.h. sqrt, floor and the like are exact.
    const names =
      'log|log2|log10|log1p|expm1|pow|sin|cos|tan|asin|acos|atan|atan2|sinh|cosh|tanh|erf|erfc|cbrt|hypot|tgamma|lgamma';
    const calls = new RegExp(
      `std::(exp|exp2|fma|${names})f?\\s*\\(|(?<![\\w.>:])(expf|exp2f|fmaf?|(${names})f?)\\s*\\(`,
    );
    expect(lines().filter((line) => calls.test(line))).toEqual([]);
  });

  it('have no pointer in a struct that JavaScript fills: Address<T> has 8 bytes on every machine', () => {
    const filled = /\bstruct (AttentionArguments|Record|Piece|Scalars) \{([^}]*)\}/g;
    const found = kernels.flatMap((path) =>
      [...read(path).matchAll(filled)].map(([, name, body]) => ({
        path,
        name,
        pointers: /\*/.test(body.replace(/\/\/.*/g, '')),
      })),
    );
    expect(found.length).toBeGreaterThanOrEqual(8);
    expect(found.filter(({ pointers }) => pointers)).toEqual([]);
    // No other struct comes in by address: a parameter that points to one is one of these.
    const structs = kernels.flatMap((path) => {
      const text = read(path);
      const own = [...text.matchAll(/^struct (\w+)/gm)].map(([, name]) => name);
      const exported = text.slice(text.indexOf('extern "C"'));
      return own.filter((name) =>
        new RegExp(`^(?:extern "C" )?void \\w+\\([^)]*const ${name}\\s*\\*`, 'm').test(exported),
      );
    });
    expect(structs.filter((name) => !/^(AttentionArguments|Record|Piece|Scalars)$/.test(name))).toEqual([]);
  });
});

describe('src/device', () => {
  it('knows nothing about attention', () => {
    const about = /attention|softmax|\bnsa\b|compressed (block|key)|selected block|window branch/i;
    const lines = files
      .filter((path) => path.startsWith('src/device/') && !/\.test\.ts$|\.wasm$/.test(path))
      .flatMap((path) =>
        read(path)
          .split('\n')
          .map((line, i) => `${path}:${i + 1}: ${line.trim()}`),
      )
      .filter((line) => about.test(line.replace(/^src\/device\/[^:]*/, '')));
    expect(lines).toEqual([]);
  });
});

describe('kernel sources', () => {
  it('keep to the 120 columns of .clang-format', () => {
    const long = files
      .filter((path) => /^(src\/ops\/attention|dev)\/.*\.(cu|cuh|h|cpp)$/.test(path))
      .flatMap((path) =>
        read(path)
          .split('\n')
          .map((line, i) => [`${path}:${i + 1}`, line.length] as const),
      )
      .filter(([, length]) => length > 120);
    expect(long).toEqual([]);
  });
});

/** Phrases of a private dialect, and what to write instead (shared rules: plain technical English). */
const BANNED: readonly (readonly [RegExp, string])[] = [
  [/\bso many\b/i, 'at least N, at most N, or the name of the number'],
  [/\bnumbers? that (is|are) none\b|(?<!there )\bis none\b|\bis no number\b/, 'NaN, null, missing'],
  [/\bwhoever\b/i, 'the caller, the reader, the process that …'],
  [/\bnobody\b(?!\/)/i, 'nothing reads it, unused, ignored'],
  [/\bwithout a word\b/i, 'silently, without a message'],
  [/\bof it are\b/i, 'say what the thing is'],
  [/\bin the place of\b/i, 'instead of'],
  [/\b(?:MOST|LEAST)_[A-Z]/, 'MAX_ or MIN_'],
];

describe('plain English', () => {
  const isText = (path: string) =>
    /\.(ts|mjs|md|cpp|cu|cuh|h|py|sh|ya?ml)$/.test(path) &&
    path !== 'test/house.test.ts' &&
    !/^(dev\/log|src\/data\/synthetic\/stories)\//.test(path); // logs as they were written, and the words of the stories

  it('has no comment that begins with "Of" or "What": its first word names the thing or the action', () => {
    const riddle = /\/\*\*\s+(?:\*\s+)?(?:Of|What)\b|(?<!\/\/[^\n]*\n\s*)\/\/ (?:Of|What)\b/g;
    const found = files
      .filter((path) => /\.(tsx?|mjs|cpp|cu|cuh|h)$/.test(path) && path !== 'test/house.test.ts')
      .flatMap((path) => [...read(path).matchAll(riddle)].map(([comment]) => `${path}: ${comment}`));
    expect(found).toEqual([]);
  });

  it('has none of the banned phrases', () => {
    const found: string[] = [];
    for (const path of files.filter(isText))
      for (const [i, line] of read(path).split('\n').entries())
        for (const [phrase, instead] of BANNED)
          if (phrase.test(line)) found.push(`${path}:${i + 1}: ${phrase.exec(line)![0]} (write: ${instead})`);
    expect(found).toEqual([]);
  });
});
