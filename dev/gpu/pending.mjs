// Runs the experiments that wait for a GPU (the entries are in entries.mjs).
//
//   node dev/gpu/pending.mjs --list
//   node dev/gpu/pending.mjs --run [--seconds 1500] [--only ID,ID] [--from ID] [--before FOLDER] [--out FILE]
//
// --list      prints the entries; needs no GPU
// --run       builds dist/ and runs the entries in order, each within its own limit. One that no longer fits into
//             --seconds is left out, and a shorter one after it is taken.
// --from      starts with this entry; --only: these entries alone
// --before    a built copy of an older commit (package.json, configs/, dist/): entries that compare with it need it
// --out       results, rewritten after every entry (default: .gpu/results.json). Entries that passed or failed there are
//             not run again: repeat the command to go on after an interruption.
//
// Needs a GPU, nvcc, g++, Python with packages (their source code is a training text) and node_modules.
// Exit code: 0 all that ran passed, 1 one failed or broke, 2 wrong usage.
import { execFileSync, spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, openSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { cpus } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import { DECIDED, ENTRIES } from './entries.mjs';

const root = join(dirname(fileURLToPath(import.meta.url)), '..', '..');
const work = join(root, '.gpu');
const { values } = parseArgs({
  options: {
    list: { type: 'boolean', default: false },
    run: { type: 'boolean', default: false },
    seconds: { type: 'string', default: '1500' },
    only: { type: 'string' },
    from: { type: 'string' },
    before: { type: 'string' },
    out: { type: 'string', default: join(work, 'results.json') },
  },
});
const started = performance.now();
const limit = Number(values.seconds);
if (values.list === values.run) stop('expected --list or --run');
if (!(limit > 0)) stop('--seconds: expected a number above 0');
const ids = ENTRIES.map(({ id }) => id);
for (const id of [values.from, ...(values.only?.split(',') ?? [])])
  if (id !== undefined && !ids.includes(id)) stop(`${id} is not an entry: expected one of ${ids.join(', ')}`);
if (values.before && !existsSync(join(values.before, 'dist', 'cli', 'main.js')))
  stop(`--before: there is no dist/cli/main.js in ${values.before}`);
const wanted = ENTRIES.slice(values.from ? ids.indexOf(values.from) : 0).filter(
  ({ id }) => !values.only || values.only.split(',').includes(id),
);

/** Seconds that building takes at most; entries do not count them. */
const BUILD_SECONDS = 20;

if (values.list) list();
else await run();

function list() {
  for (const { id, feature, seconds, needs = [], commands, expected, passed, failed } of wanted) {
    console.log(`${id} (at most ${seconds} s${needs.map((need) => `, needs ${need}`).join('')}): ${feature}`);
    for (const words of commands) console.log(`  $ ${words.map(quoted).join(' ')}`);
    console.log(`  expected: ${expected}\n  if so: ${passed}\n  if not: ${failed}\n`);
  }
  const total = wanted.reduce((sum, { seconds }) => sum + seconds, BUILD_SECONDS);
  console.log(`at most ${total} s: ${BUILD_SECONDS} build, the rest entries\n`);
  for (const line of DECIDED) console.log(`not here: ${line}`);
}

async function run() {
  const results = existsSync(values.out) ? JSON.parse(readFileSync(values.out, 'utf8')) : { entries: {} };
  results.machine ??= { gpu: gpuName(), cores: cpus().length, node: process.version };
  const save = () => {
    mkdirSync(dirname(resolve(values.out)), { recursive: true });
    writeFileSync(values.out, `${JSON.stringify(results, null, 2)}\n`);
  };
  const preparation = join(work, 'preparation');
  mkdirSync(preparation, { recursive: true });
  await all([['node', 'scripts/build.mjs', '--quick', '--quiet']], preparation, BUILD_SECONDS);
  for (const entry of wanted) {
    if (['passed', 'failed'].includes(results.entries[entry.id]?.state)) continue;
    const result = await resultOf(entry);
    results.entries[entry.id] = result;
    if (result.state) save();
    const { state = 'not run', reason, seconds, measured } = result;
    console.log(`${state}: ${entry.id}${seconds ? `, ${seconds.toFixed(0)} s` : ''}${reason ? `: ${reason}` : ''}`);
    if (measured) console.log(`  ${JSON.stringify(measured)}`);
  }
  console.log(`\n${elapsed().toFixed(0)} of ${limit} s used. What follows:`);
  for (const { id, passed, failed } of ENTRIES) {
    const { state, reason } = results.entries[id] ?? {};
    const follows = { passed, failed }[state] ?? reason?.slice(0, 200) ?? 'not asked for';
    console.log(`  ${(state ?? 'not run').padEnd(8)} ${id}: ${follows}`);
  }
  process.exitCode = Object.values(results.entries).some(({ state }) => ['failed', 'broken'].includes(state)) ? 1 : 0;
}

/** Runs an entry and judges it: `broken` if a command failed, so that nothing follows. Without `state` it was not run. */
async function resultOf(entry) {
  const needs = entry.needs ?? [];
  if (needs.includes('before') && !values.before)
    return { reason: 'needs --before FOLDER, a built copy of the commit' };
  if (needs.includes('fla') && !hasFla()) return { reason: 'needs the Python package fla' };
  if (elapsed() + entry.seconds > limit) return { reason: 'not reached: no time left' };
  const out = join(work, entry.id);
  rmSync(out, { recursive: true, force: true });
  mkdirSync(out, { recursive: true });
  const begun = performance.now();
  const { texts, problems } = await all(entry.commands, out, entry.seconds);
  const seconds = (performance.now() - begun) / 1000;
  try {
    const { ok, measured } = entry.check(out, texts);
    const state = ok && problems.length > 0 ? 'broken' : ok ? 'passed' : 'failed';
    return { state, seconds, measured, reason: problems.join('; ') || undefined };
  } catch (error) {
    return { state: 'broken', seconds, reason: [...problems, error.message].join('; ') };
  }
}

/** Runs commands at the same time, and ends them after `seconds`. Output goes to files of `out`. */
async function all(commands, out, seconds) {
  const ended = await Promise.all(commands.map((words, i) => one(words, join(out, `command-${i + 1}`), out, seconds)));
  return { texts: ended.map(({ text }) => text), problems: ended.flatMap(({ problem }) => problem ?? []) };
}

async function one(words, log, out, seconds) {
  const filled = words.map((word) =>
    word.replace(/\{(\w+)\}/g, (_, name) => ({ out, before: values.before && resolve(values.before) })[name]),
  );
  const [program, ...rest] = programOf(filled);
  const environment = { ...process.env, TEST_RESULTS: join(out, 'tests.jsonl') };
  const files = [openSync(`${log}.out`, 'w'), openSync(`${log}.err`, 'w')];
  // A group of its own, so that the limit ends its children too. SIGTERM first: some have groups of theirs, which they end.
  const child = spawn(program, rest, { cwd: root, env: environment, stdio: ['ignore', ...files], detached: true });
  let isLate = false;
  const timer = setTimeout(() => {
    isLate = true;
    process.kill(-child.pid, 'SIGTERM');
    setTimeout(() => child.exitCode === null && process.kill(-child.pid, 'SIGKILL'), 5000).unref();
  }, seconds * 1000);
  const code = await new Promise((done) => {
    child.once('error', (error) => done(error.message));
    child.once('close', (code, signal) => done(code ?? signal));
  });
  clearTimeout(timer);
  const end = isLate ? `ended by its limit of ${seconds} s` : code;
  const said = readFileSync(`${log}.err`, 'utf8').trim().split('\n').slice(-3).join(' | ').slice(-400);
  return {
    text: readFileSync(`${log}.out`, 'utf8'),
    problem: end === 0 ? null : `${words.slice(0, 3).map(quoted).join(' ')}: ${end}${said && `: ${said}`}`,
  };
}

function programOf([first, ...rest]) {
  const node = process.execPath;
  switch (first) {
    case 'node':
      return [node, ...rest];
    case 'trefoil':
      return [node, join(root, 'dist/cli/main.js'), ...rest];
    case 'vitest':
      return [node, join(root, 'node_modules/vitest/vitest.mjs'), ...rest, '--reporter', 'dev/gpu/reporter.mjs'];
    default:
      return [first, ...rest];
  }
}

function elapsed() {
  return (performance.now() - started) / 1000;
}

function hasFla() {
  return spawnSync('python3', ['-c', 'import fla.ops.nsa'], { stdio: 'ignore' }).status === 0;
}

function gpuName() {
  try {
    return execFileSync('nvidia-smi', ['--query-gpu=name,driver_version', '--format=csv,noheader']).toString().trim();
  } catch (error) {
    return stop(`--run needs an NVIDIA GPU: ${error.message}`);
  }
}

function quoted(word) {
  return /^[\w./:=,+{}-]+$/.test(word) ? word : `'${word}'`;
}

function stop(message) {
  process.stderr.write(`${message}\n`);
  process.exit(2);
}
