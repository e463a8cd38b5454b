// Compiles every CPU kernel of dist/ into the cache, with as many processes as there are cores. The tests then find them
// there: compiled on first use, they would make one test after the other wait, some of them compile the same at once.
import { spawn } from 'node:child_process';
import { readdirSync, statSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const self = fileURLToPath(import.meta.url);
const dist = join(dirname(self), '..', 'dist');
const given = process.argv.slice(2);

if (given.length > 0) await compile(given);
else await compileAll();

async function compile(sources) {
  const { defaultCompilerOptions, KernelCompiler } = await import(join(dist, 'device', 'cpu', 'compile.js'));
  const compiler = new KernelCompiler(defaultCompilerOptions(process.env));
  try {
    for (const source of sources) compiler.library(source);
  } catch (error) {
    console.error(error.message);
    process.exitCode = 1;
  }
}

async function compileAll() {
  const sources = readdirSync(dist, { recursive: true, encoding: 'utf8' })
    .filter((name) => name.endsWith('.cpp'))
    .map((name) => join(dist, name))
    .sort((a, b) => statSync(b).size - statSync(a).size);
  // The largest first, each to the share that is smallest so far: the size is a measure of the time.
  const shares = Array.from({ length: Math.min(availableParallelism(), sources.length) }, () => ({
    bytes: 0,
    files: [],
  }));
  for (const source of sources) {
    const share = shares.reduce((least, other) => (other.bytes < least.bytes ? other : least));
    share.files.push(source);
    share.bytes += statSync(source).size;
  }
  const started = performance.now();
  const codes = await Promise.all(
    shares.map(
      ({ files }) =>
        new Promise((resolve, reject) => {
          const child = spawn(process.execPath, [self, ...files], { stdio: 'inherit' });
          child.once('error', reject);
          child.once('close', resolve);
        }),
    ),
  );
  if (codes.some((code) => code !== 0)) process.exitCode = 1;
  else console.log(`${sources.length} kernels in ${((performance.now() - started) / 1000).toFixed(0)} s`);
}
