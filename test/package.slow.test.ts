/** The package as a user gets it: packed, installed in an empty folder, run, imported from strict TypeScript. */
import { execFile, spawn } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { dirname, join, posix } from 'node:path';
import { text } from 'node:stream/consumers';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { ended } from '../src/testing/cli.js';
import { INVARIANTS } from '../src/verify/check.js';

const root = join(import.meta.dirname, '..');
const read = (...names: string[]) => readFileSync(join(root, ...names), 'utf8');
const folder = mkdtempSync(join(tmpdir(), 'trefoil-package-'));
const user = join(folder, 'user');
const tsc = join(dirname(createRequire(import.meta.url).resolve('typescript/package.json')), 'bin', 'tsc');
/** The oldest TypeScript that must compile programs against the package. */
const OLDEST_TYPESCRIPT = '5.4.5';
const EXAMPLES = readdirSync(join(root, 'examples')).filter((name) => name.endsWith('.ts'));
let files: string[];

/** Runs a program in the user's folder; what it printed, or an error with all of that. */
function run(command: string, words: readonly string[], cwd = user): Promise<string> {
  // Settings of the outer npm (its prefix, its package) must not reach the inner one.
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !/^npm_(?!config_)/.test(name)));
  return new Promise((resolve, reject) => {
    execFile(command, words, { cwd, env, encoding: 'utf8', maxBuffer: 2 ** 26 }, (error, stdout, stderr) => {
      if (error) reject(new Error(`${command} ${words.join(' ')}: ${error.message}\n${stdout}${stderr}`));
      else resolve(stdout);
    });
  });
}

beforeAll(async () => {
  if (!existsSync(join(root, 'dist', 'index.js'))) await run(process.execPath, ['scripts/build.mjs', '--quiet'], root);
  // Without scripts: dist is there, and other tests are using it while a build would write to it.
  const packed = await run('npm', ['pack', '--json', '--ignore-scripts', '--pack-destination', folder], root);
  const [tarball] = JSON.parse(packed) as { filename: string; files: { path: string }[] }[];
  files = tarball.files.map(({ path }) => path);
  mkdirSync(user);
  writeFileSync(join(user, 'package.json'), '{ "name": "user", "private": true, "type": "module" }\n');
  // Without scripts again: the package and all it needs must work without any.
  await run('npm', [
    'install',
    '--ignore-scripts',
    '--no-audit',
    '--no-fund',
    '--prefer-offline',
    join(folder, tarball.filename),
    `typescript@${OLDEST_TYPESCRIPT}`,
  ]);
});
afterAll(() => rmSync(folder, { recursive: true, force: true }));

describe('the package', () => {
  it('holds what a user needs and nothing else', () => {
    const allowed =
      /^(dist\/|configs\/|docs\/|examples\/|deploy\/|dev\/log\/|bench\/(README\.md$|results\/)|package\.json$|(README|CHANGELOG|CONTRIBUTING|SECURITY)\.md$|LICENSE$)/;
    const development = /\.test\.|\/testing\/|golden|\.map$|tsbuildinfo|node_modules|\.log$/;
    expect(files.filter((path) => !allowed.test(path) || development.test(path))).toEqual([]);
    for (const needed of ['dist/index.js', 'dist/index.d.ts', 'dist/cli/main.js', 'dist/device/cpu/runtime.cpp'])
      expect(files).toContain(needed);
    for (const needed of ['LICENSE', 'README.md', 'docs/explain/attention.md', 'configs/quickstart.yaml'])
      expect(files).toContain(needed);
    // Every operation has its kernel, and every module comes from a source that is still there.
    const kernels = files.filter((path) => path.endsWith('cpu.cpp'));
    expect(kernels.length).toBeGreaterThan(10);
    const orphans = files
      .filter((path) => /^dist\/(?!page\/).*\.js$/.test(path)) // dist/page is bundled from examples/browser
      .filter((path) => {
        const source = join(root, 'src', path.slice('dist/'.length, -'.js'.length));
        return !['.ts', '.tsx'].some((ending) => existsSync(source + ending));
      });
    expect(orphans).toEqual([]);
  });

  it('holds every file and folder that its documents link to', () => {
    const isPacked = (path: string) => files.some((file) => file === path || file.startsWith(`${path}/`));
    const broken = files
      .filter((path) => path.endsWith('.md'))
      .flatMap((page) => {
        const prose = read(page).replace(/^```[\s\S]*?^```/gm, '');
        return [...prose.matchAll(/\]\(([^)\s]+)\)/g)]
          .map(([, target]) => target.split('#')[0])
          .filter((target) => target !== '' && !/^[a-z]+:/.test(target))
          .filter((target) => !isPacked(posix.join(posix.dirname(page), target).replace(/\/$/, '')))
          .map((target) => `${page}: ${target}`);
      });
    expect(broken).toEqual([]);
  });

  it('builds itself when it is packed, and runs nothing when it is installed', () => {
    const { scripts } = JSON.parse(read('package.json')) as { scripts: Record<string, string> };
    expect(scripts['prepack']).toBe('node scripts/build.mjs');
    for (const name of ['preinstall', 'install', 'postinstall', 'prepare']) expect(scripts).not.toHaveProperty(name);
  });

  it('has a command that says its version', async () => {
    const { version } = JSON.parse(read('package.json')) as { version: string };
    expect(await run('npx', ['--no-install', 'trefoil', '--version'])).toBe(`${version}\n`);
  });

  it('verifies its mathematics where it is installed', async () => {
    const main = join(user, 'node_modules', 'trefoil', 'dist', 'cli', 'main.js');
    const child = spawn(process.execPath, [main, 'verify', '--json', '--jobs', '2'], { cwd: user });
    const [stdout, stderr, { code }] = await Promise.all([text(child.stdout), text(child.stderr), ended(child)]);
    const { passed, failed, skipped, rows } = JSON.parse(stdout);
    expect(rows.filter((row: { ok: boolean | null }) => row.ok === false)).toEqual([]);
    const progress = /^(compiling kernels|cpu \d+\/\d+).*\n/gm; // of slow work
    expect({ code, stderr: stderr.replace(progress, ''), failed }).toEqual({ code: 0, stderr: '', failed: 0 });
    expect(passed + skipped).toBe(rows.length);
    for (const invariant of INVARIANTS)
      expect(rows).toContainEqual(expect.objectContaining({ device: 'cpu', invariant, ok: true }));
    expect(Object.keys(rows[0])).toEqual(['device', 'invariant', 'case', 'ok', 'error', 'limit', 'reason']);
  });

  it('has types that stand on their own, with TypeScript 5.4 too, and the programs of README and docs run', async () => {
    const [program] = programsOf('README.md');
    writeFileSync(join(user, 'program.ts'), `${program}\n${EVERY_PART}`);
    // The blocks of the page continue each other.
    writeFileSync(join(user, 'api.ts'), programsOf(join('docs', 'reference', 'api.md')).join('\n'));
    writeFileSync(join(user, 'training.ts'), programsOf(join('docs', 'reference', 'training.md')).join('\n'));
    writeFileSync(join(user, 'guide.ts'), programsOf(join('docs', 'guide', 'typescript.md')).join('\n'));
    const changes = join('docs', 'guide', 'change-the-model.md');
    for (const name of ['change', join('built', 'change')]) mkdirSync(join(user, name), { recursive: true });
    writeFileSync(join(user, 'change', 'change.ts'), programsOf(changes).join('\n'));
    writeFileSync(join(user, 'built', 'change', 'cpu.cpp'), /^```cpp\n([\s\S]*?)^```/m.exec(read(changes))![1]);
    // No types of Node, every library file checked: nothing of ours may lean on the user's setup.
    const options = {
      target: 'ES2022',
      module: 'NodeNext',
      strict: true,
      skipLibCheck: false,
      noUncheckedIndexedAccess: true, // in what `tsc --init` writes
      exactOptionalPropertyTypes: true,
    };
    const compilerOptions = {
      ...options,
      types: [],
      lib: ['ES2023', 'DOM'],
      outDir: 'built',
    };
    writeFileSync(
      join(user, 'tsconfig.json'),
      JSON.stringify({
        compilerOptions,
        files: ['program.ts', 'api.ts', 'training.ts', 'guide.ts', 'change/change.ts'],
      }),
    );
    await run(process.execPath, [tsc, '-p', '.']);
    const oldest = join(user, 'node_modules', 'typescript', 'bin', 'tsc');
    expect(await run(process.execPath, [oldest, '--version'])).toBe(`Version ${OLDEST_TYPESCRIPT}\n`);
    await run(process.execPath, [oldest, '-p', '.', '--noEmit']);
    writeFileSync(join(user, 'built', 'cpu.cpp'), KERNEL);
    const lines = await run(process.execPath, [join('built', 'program.js')]);
    expect(lines).toMatch(
      /^step 0012 \| loss [1-5]\.[\s\S]*\nThe [\s\S]+\nloss near 2\.77: true\ntwice: 2 4 6, gradient 10 20 30\nfunction number string function object\n$/m,
    );
    const printed = await run(process.execPath, [join('built', 'api.js')]);
    expect(printed).toMatch(/^done \d\.\d+$/m);
    expect(printed).toMatch(/^signalled 5\n6\nto bytes and back\ntrue$/m);
    expect(printed).toMatch(/\n0\ntrue\n$/);
    expect(printed).not.toContain('NaN');
    const losses = [...printed.matchAll(/^own loop: ([\d.]+)$/gm)].map((match) => Number(match[1]));
    expect(losses).toHaveLength(12);
    expect(losses[11]).toBeLessThan(losses[0] / 2);
    const trained = await run(process.execPath, [join('built', 'training.js')]);
    const lossesOf = (word: string) =>
      [...trained.matchAll(new RegExp(`^${word} \\d+ loss ([\\d.]+)`, 'gm'))].map(([, loss]) => Number(loss));
    expect(lossesOf('step')).toHaveLength(6);
    expect(lossesOf('step')[5]).toBeLessThan(lossesOf('step')[0] - 1);
    expect(Number(/^validation ([\d.]+)$/m.exec(trained)?.[1])).toBeLessThan(1);
    expect(trained).toContain('resumed at 30');
    expect(lossesOf('again')).toHaveLength(3);
    expect(lossesOf('again')[2]).toBeLessThan(lossesOf('step')[2]);
    const changed = await run(process.execPath, [join('built', 'change', 'change.js')]);
    const changedLosses = (name: string) =>
      [...changed.matchAll(new RegExp(`^${name}: step \\d+, loss ([\\d.]+)`, 'gm'))].map(([, loss]) => Number(loss));
    expect(changedLosses('z-loss')).toHaveLength(2);
    expect(changedLosses('looped')).toHaveLength(3);
    expect(changedLosses('looped')[2]).toBeLessThan(changedLosses('looped')[0]);
    expect(changed).toMatch(
      /^norm of the gradient \d+\.\d+, differences agree: true\nsquared: 0 4 9\ngradient: 0 4 6\n$/m,
    );
    const own = readFileSync(join(user, 'artifacts', 'looped', 'own_metrics.csv'), 'utf8');
    expect(own).toMatch(/^step,metric,value\n1,bits,[\d.]+\n[\s\S]*^30,unseen,[\d.]+\n$/m);
    expect(await run('npx', ['--no-install', 'trefoil', 'status', '--dir', 'artifacts/looped'])).toMatch(
      /\bdone\b.*30/,
    );
    const guided = await run(process.execPath, [join('built', 'guide.js')]);
    expect(guided).toMatch(
      /^done: loss 5\.\d+ -> [1-4]\.\d+\nThe [\s\S]{20,}\nsignalled at step 22\ndone at step 24\n$/m,
    );
  });
});

describe('the examples', () => {
  const names = EXAMPLES.map((name) => name.replace(/\.ts$/, ''));
  /** Minimum output of each program; losses must fall where a program trains, how far depends on the documents. */
  const EXPECTED: Readonly<Record<string, RegExp>> = {
    'first-model': /^done: loss 6\.\d+ -> [01]\.\d+\nOnce upon a time there was [\s\S]{60,}/m,
    'own-data': /^done: loss 5\.\d+ -> [0-3]\.\d+, validation [0-3]\.\d+$/m,
    'training-loop': /^step 1: loss 5\.\d+, .*\n[\s\S]*^step 40: loss [01]\.\d+/m,
    'own-model': /^step 1: loss 0\.[67]\d+\n[\s\S]*^step 120: loss 0\.[0-5]\d+/m,
    streaming: /^ended: aborted after \d+ tokens in 10 pieces\ncharacters of three texts: \d+ \d+ \d+$/m,
    serving: /^200: mine answered with \d+ tokens$/m,
    attention: /^blocks of the last token: 0 \d 4 5\n[\s\S]*^gradient of attention\.qkv: norm \d+\.\d{4}$/m,
    gpu: /^this example needs an NVIDIA GPU: no CUDA device: |^step 10: loss /m,
    evaluation: /^\d+ targets: loss 5\.\d+, perplexity \d+\.\d\nbits per byte: [78]\.\d+$/m,
    resume: /^done at step 12; the same losses as an undisturbed run: true$/m,
  };

  beforeAll(async () => {
    mkdirSync(join(user, 'examples'));
    for (const name of EXAMPLES) cpSync(join(root, 'examples', name), join(user, 'examples', name));
    const compilerOptions = {
      target: 'ES2022',
      module: 'NodeNext',
      strict: true,
      skipLibCheck: false,
      lib: ['ES2023', 'DOM'],
      typeRoots: [join(root, 'node_modules', '@types')],
      types: ['node'],
      outDir: 'ran',
      rootDir: '.',
    };
    writeFileSync(join(user, 'tsconfig.examples.json'), JSON.stringify({ compilerOptions, include: ['examples'] }));
    await run(process.execPath, [tsc, '-p', 'tsconfig.examples.json']);
  });

  it('are nine or more', () => expect(names.sort()).toEqual(Object.keys(EXPECTED).sort()));

  it.each(names)('%s', async (name) => {
    const printed = await run(process.execPath, [join('ran', 'examples', `${name}.js`)]);
    expect(printed).toMatch(EXPECTED[name]);
    expect(printed).not.toContain('NaN');
  });
});

describe('the code model', () => {
  it('goes from installed packages to a report, and continues where it stopped', async () => {
    const program = join('node_modules', 'trefoil', 'examples', 'code-model', 'run.mjs');
    const words = [program, '--form', 'cpu', '--out', 'code', '--from', 'node_modules', '--max-mb', '0.3'];
    const short = ['--steps', '3', '--set', 'train.batch_size=1', '--set', 'train.eval_batches=1'];
    const printed = await run(process.execPath, [...words, ...short]);
    expect(printed).toMatch(/^train\.jsonl: \d+ projects, \d+ files in \d+ documents, 0\.[23] MB$/m);
    expect(printed).toMatch(/^\s+513-1024: \d\.\d{4}$/m);
    for (const what of ['all branches', 'without cmp', 'without sel', 'without win'])
      expect(printed).toMatch(new RegExp(`^loss \\d\\.\\d{4}, \\d\\.\\d{3} bits per byte: ${what}$`, 'm'));
    expect(printed).toMatch(/^nsa: far context is worth -?\d\.\d{4} nats \(error \d\.\d{4}\)$/m);
    for (const layer of [0, 1, 2, 3]) expect(printed).toMatch(new RegExp(`^ {4}${layer}: +-?\\d+ % +\\d+ %$`, 'm'));
    const { train, validation } = JSON.parse(readFileSync(join(user, 'code', 'corpus', 'corpus.json'), 'utf8'));
    const projectsOf = (part: string) =>
      readFileSync(join(user, 'code', 'corpus', `${part}.jsonl`), 'utf8')
        .trim()
        .split('\n')
        .map((line) => JSON.parse(line).project as string);
    const trained = new Set(projectsOf('train'));
    expect(trained.size).toBe(train.projects);
    expect(projectsOf('val').filter((project) => trained.has(project))).toEqual([]);
    expect(new Set(projectsOf('val'))).toEqual(new Set(validation.names));
    expect(existsSync(join(user, 'code', 'nsa', 'report', 'report.html'))).toBe(true);
    const again = await run(process.execPath, [...words, ...short]);
    expect(again.match(/: done before$/gm)).toHaveLength(8);
  });
});

function programsOf(page: string): string[] {
  return [...read(page).matchAll(/^```ts\n([\s\S]*?)^```/gm)].map((match) => match[1]);
}

/** Every entry point; a step of training (model, loss, gradients, optimizer); an operation with a kernel of the user. */
const EVERY_PART = `
import { parseConfig, UsageError } from 'trefoil';
import { measurePeak } from 'trefoil/bench';
import { createTokenizer } from 'trefoil/data';
import { defineKernels } from 'trefoil/device';
import { AdamW, clipFactor, gradientNorm, LanguageModel, modelShape, Tape, Tensor, withTape } from 'trefoil/nn';
import { runPaths } from 'trefoil/run';
import { serveModel } from 'trefoil/serve';
import { summarize } from 'trefoil/verify';

const small = parseConfig({
  model: { dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 8, d_v: 8 },
  nsa: { l: 4, d: 2, l_sel: 8, n_sel: 3, w: 8 },
});
const model = new LanguageModel(device, modelShape(small, 16), 1);
const optimizer = new AdamW(device, model.parameters.map((parameter) => ({ parameter, weightDecay: 0.1 })));
const ids = Tensor.from(device, Array.from({ length: 32 }, (_, i) => i % 16), [32], 'i32');
const step = new Tape(device);
const loss: Tensor = model.loss(step, ids, ids, { lengths: [32] });
const value: number = loss.item();
step.backward(loss);
const { norm } = gradientNorm(device, model.parameters.flatMap(({ gradient }) => gradient ?? []));
optimizer.step({ learningRate: 1e-3, gradientScale: clipFactor(norm, 1) });
step.end();
try {
  // @ts-expect-error: the types refuse it too
  parseConfig({ model: { dim: 'wide' } });
} catch (error) {
  if (!(error instanceof UsageError)) throw error;
}
console.log(\`loss near 2.77: \${Math.abs(value - Math.log(16)) < 0.3}\`);

const kernels = defineKernels(import.meta.url, { twice: ['ptr', 'ptr', 'i64'] });
function twice(tape: Tape, x: Tensor): Tensor {
  const { twice } = tape.device.kernels(kernels);
  const y = tape.empty(x.shape);
  twice(x, y, x.size);
  tape.record([x], [y], [], () => {
    const [dy, dx] = [tape.gradient(y), tape.gradientTarget(x)];
    if (dy && dx && !dx.accumulate) twice(dy, dx.gradient, x.size);
  });
  return y;
}
withTape(device, (tape) => {
  const x = tape.watch(tape.from([1, 2, 3], [3]));
  const y = twice(tape, x);
  const values = y.read().join(' ');
  tape.backward(y, [5, 10, 15]);
  console.log(\`twice: \${values}, gradient \${tape.gradient(x)?.read().join(' ')}\`);
});
const others = [measurePeak, createTokenizer('byte').vocabSize, runPaths('x').model, serveModel, summarize([])];
console.log(others.map((other) => typeof other).join(' '));
`;

const KERNEL = `
#include <cstdint>
extern "C" void twice(const float *x, float *y, int64_t count) {
  for (int64_t i = 0; i < count; i++) y[i] = 2 * x[i];
}
`;
