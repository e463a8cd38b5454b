// Lists the source files that run in one training step, one generated token and one resume, by measuring them.
//
//   npm run build && node scripts/files-crossed.mjs [--functions]
//
// A file counts if one of its functions ran in the span, on the main thread, on the CPU, after a warm-up. The span of a step
// is from one record of a step to the next, until records are handed to the log thread; its formats and files
// (src/run/logs) are not counted. Operations are counted apart: a step and a token call each of them, so `ops`, `tensor`
// and `device` are as many files as a model has operations.
import { mkdtempSync, rmSync } from 'node:fs';
import { Session } from 'node:inspector';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const root = new URL('../', import.meta.url);
const dist = new URL('dist/', root).href;
const isDetailed = process.argv.includes('--functions');
const session = new Session();
session.connect();
post('Profiler.enable');
post('Profiler.startPreciseCoverage', { callCount: true, detailed: false });

const { generate, loadModel, openDevice, readConfig, train, Trainer } = await import(`${dist}index.js`);
const outDir = mkdtempSync(join(tmpdir(), 'trefoil-files-crossed-'));
const device = openDevice('cpu', { threads: 1 });
try {
  report('one training step', await trainingStep());
  report('one generated token', await generatedToken());
  report('one resume', await resume());
} finally {
  rmSync(outDir, { recursive: true });
}

async function trainingStep() {
  let files = new Map();
  const onStep = ({ step }) => {
    if (step < 6) files = filesRun(); // the last step also computes statistics by layer
  };
  await train({ config: config(), device, onStep, say: () => {} });
  return files;
}

async function generatedToken() {
  const loaded = loadModel(device, outDir);
  let files = new Map();
  // Bytes are tokens here, so most pieces of text are one token.
  for await (const _ of generate(loaded, 'The format', { maxNewTokens: 40 })) files = filesRun();
  loaded.free();
  return files;
}

async function resume() {
  const loaded = loadModel(device, outDir);
  const trainer = new Trainer({ model: loaded.model, data: config() });
  await trainer.resume(outDir);
  filesRun();
  await trainer.resume(outDir);
  const files = filesRun();
  trainer.free();
  loaded.free();
  return files;
}

function config() {
  return readConfig('text_cpu', {
    model: { dim: 64, n_layers: 2 },
    data: { path: fileURLToPath(new URL('CHANGELOG.md', root)) },
    train: { steps: 6, log_every: 1, eval_every: 0, save_every: 6, sample_every: 0, out_dir: outDir },
  });
}

/** Files of src/ with the functions that ran since the last call. */
function filesRun() {
  const files = new Map();
  for (const { url, functions } of post('Profiler.takePreciseCoverage').result) {
    if (!url.startsWith(dist)) continue;
    const ran = functions.filter(({ ranges: [{ count }] }) => count > 0).map(({ functionName }) => functionName);
    if (ran.length > 0) files.set(url.slice(dist.length).replace(/\.js$/, '.ts'), ran);
  }
  return files;
}

function report(title, files) {
  const names = [...files.keys()].sort();
  const isArithmetic = (name) => /^(ops|tensor|device)\//.test(name);
  const [own, arithmetic] = [names.filter((name) => !isArithmetic(name)), names.filter(isArithmetic)];
  console.log(`${title}: ${own.length} files, and ${arithmetic.length} of ops, tensor and device`);
  for (const name of [...own, ...arithmetic])
    console.log(`  src/${name}${isDetailed ? `: ${files.get(name).filter(Boolean).join(', ')}` : ''}`);
}

/** Calls back before it returns, because the session is connected to its own thread. */
function post(method, params) {
  let answer;
  session.post(method, params, (error, result) => {
    if (error) throw new Error(`${method}: ${error.message}`);
    answer = result;
  });
  return answer;
}
