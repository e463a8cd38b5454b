// Operates a training as a person would, injects faults, and compares its weights with those of an undisturbed run.
//
//   node faults.mjs --data FILE_OR_FOLDER [--device cpu|cuda] [--out artifacts/faults] [--steps N] [--deadline 10] [--disk-mb 256] [--set KEY=VALUE]…
//
// 1. Trains without a disturbance, in deterministic mode, into OUT/calm.
// 2. Trains the same on a small disk. A supervisor starts the trainer again after a failure (as systemd does with
//    deploy/systemd/trefoil-train@.service), and `trefoil watch` kills a trainer that hangs. Three faults are injected: a hang
//    (SIGSTOP) after 25 % of the steps, kill -9 after 50 %, and a full disk after 70 %.
// 3. Prints what happened and when, and whether the weights are equal. Exit code 1 if not.
// The full disk needs the right to mount a tmpfs (root); without it this fault is left out, which the table says.
import { spawn, spawnSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { closeSync, mkdirSync, openSync, readFileSync, rmSync, writeFileSync, writeSync } from 'node:fs';
import { createRequire } from 'node:module';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const here = dirname(fileURLToPath(import.meta.url));
const { values } = parseArgs({
  options: {
    data: { type: 'string' },
    device: { type: 'string', default: 'cpu' },
    out: { type: 'string', default: 'artifacts/faults' },
    steps: { type: 'string' },
    deadline: { type: 'string', default: '10' },
    'disk-mb': { type: 'string', default: '256' },
    set: { type: 'string', multiple: true, default: [] },
  },
});
if (values.data === undefined)
  throw new Error('--data is missing: text, JSON Lines or a folder of token shards, in bytes');

/** Small models, so that the whole takes a minute or two. Bytes, so that any text will do. */
const FORMS = {
  cpu: { config: 'cpu.yaml', steps: 240, settings: ['train.seq_len=256', 'train.batch_size=2', 'train.eval_every=0'] },
  cuda: {
    config: 'gpu.yaml',
    steps: 2000,
    settings: [
      ...['model.dim=256', 'model.n_layers=4', 'model.n_heads=4', 'model.tie_embeddings=true', 'data.tokenizer=byte'],
      ...['train.seq_len=8192', 'train.batch_size=2', 'train.eval_every=0', 'runtime.deterministic=true'],
    ],
  },
};
const form = FORMS[values.device];
if (form === undefined) throw new Error(`--device: ${values.device} is neither cpu nor cuda`);
const steps = Number(values.steps ?? form.steps);
const saveEvery = Math.max(1, Math.floor(steps / 24));
/** A run that fails more often than this is not going to recover. */
const MAX_STARTS = 12;
/** Exit codes that a new start does not help against: bad config, halted, stopped by a signal, loss not finite. */
const FINAL_CODES = [2, 3, 4, 5];

const command = join(dirname(createRequire(import.meta.url).resolve('trefoil/package.json')), 'dist', 'cli', 'main.js');
const out = resolve(values.out);
const disk = join(out, 'disk');
const folders = { calm: join(out, 'calm'), disturbed: join(disk, 'run') };
const pidFile = join(out, 'trainer.pid');
const alertFile = join(out, 'alerts.jsonl');
const ballast = join(disk, 'ballast');
const started = performance.now();
const events = [];
let alertsSeen = 0;
let trainer;
let watchdog;
let starts = 0;
let hasDisk = false;

rmSync(out, { recursive: true, force: true });
mkdirSync(disk, { recursive: true });
writeFileSync(alertFile, '');

console.log(`undisturbed: ${steps} steps into ${folders.calm}`);
process.on('exit', () => {
  for (const child of [trainer?.child, watchdog]) if (child?.exitCode === null) child.kill('SIGKILL');
  if (hasDisk) spawnSync('umount', ['-l', disk]);
});
const calm = startTrainer(folders.calm, 'calm.log');
const calmEnd = await calm.ended;
if (calmEnd.code !== 0) fail(`the undisturbed run ended with ${describeEnd(calmEnd)}; see ${join(out, 'calm.log')}`);

const mounted = spawnSync('mount', ['-t', 'tmpfs', '-o', `size=${values['disk-mb']}m`, 'tmpfs', disk], {
  encoding: 'utf8',
});
hasDisk = mounted.status === 0;
if (!hasDisk)
  console.log(`no full disk: a tmpfs cannot be mounted (${mounted.stderr?.trim() || mounted.error?.message})`);
console.log(`disturbed: the same ${steps} steps into ${folders.disturbed}`);
watchdog = startWatchdog();
await supervise(injectFaults());

const digests = Object.values(folders).map((folder) => digestOf(join(folder, 'model.safetensors')));
const losses = Object.values(folders).map((folder) => lossesOf(join(folder, 'training.csv')));
const areEqual = digests[0] === digests[1] && losses[0] === losses[1];
printTable();
console.log(`\nweights of the undisturbed run: sha256 ${digests[0].slice(0, 16)}…`);
console.log(`weights of the disturbed run:   sha256 ${digests[1].slice(0, 16)}…`);
console.log(areEqual ? 'equal, and so are all losses' : 'DIFFERENT');
const result = {
  device: values.device,
  steps,
  save_every: saveEvery,
  events,
  starts,
  sha256: digests,
  equal: areEqual,
};
writeFileSync(join(out, 'faults.json'), `${JSON.stringify(result, null, 1)}\n`);
process.exitCode = areEqual ? 0 : 1;

function startTrainer(folder, log) {
  const settings = [...form.settings, `train.steps=${steps}`, `train.save_every=${saveEvery}`, ...values.set];
  const words = [
    ...['train', '--config', join(here, form.config), '--local-path', values.data, '--device', values.device],
    ...['--out-dir', folder, '--resume', 'auto', '--seed', '1', '--set', 'train.log_every=1'],
    ...settings.flatMap((setting) => ['--set', setting]),
  ];
  const child = spawn(process.execPath, [command, ...words], { stdio: ['ignore', 'pipe', 'pipe'] });
  const state = { child, step: 0, output: '', isOver: false };
  for (const stream of [child.stdout, child.stderr])
    stream.setEncoding('utf8').on('data', (text) => {
      state.output += text;
      writeFileSync(join(out, log), text, { flag: 'a' });
      for (const [, step] of text.matchAll(/^step (\d+) /gm)) state.step = Number(step);
    });
  state.ended = new Promise((resolveEnd) => {
    child.once('close', (code, signal) => {
      state.isOver = true;
      resolveEnd({ code, signal });
    });
  });
  return state;
}

/** `trefoil watch`, which outlives the trainers. Its alert command kills one that hangs; the supervisor then starts another. */
function startWatchdog() {
  const limits = ['step', 'fetch', 'save'].flatMap((section) => [`--deadline-${section}`, values.deadline]);
  const onAlert =
    `cat >> '${alertFile}'; case "$TREFOIL_ALERT_LEVEL $TREFOIL_ALERT_RULE" in ` +
    `"red section"*|"red heartbeat"*) [ ! -e '${pidFile}' ] || kill -9 "$(cat '${pidFile}')";; esac`;
  const words = ['watch', '--dir', folders.disturbed, '--interval', '0.5', ...limits, '--command', onAlert];
  const child = spawn(process.execPath, [command, ...words], {
    stdio: ['ignore', 'ignore', openSync(join(out, 'watch.log'), 'w')],
  });
  return child;
}

/** Starts the trainer again until it is done. */
async function supervise(faults) {
  faults.catch((error) => fail(error.message));
  for (;;) {
    starts++;
    trainer = startTrainer(folders.disturbed, 'disturbed.log');
    const current = trainer;
    // Only from its first step on: until then the watchdog still sees where its predecessor stopped.
    until(() => current.step > 0 || current.isOver).then(() => {
      if (current.isOver) return;
      writeFileSync(pidFile, String(current.child.pid));
      if (starts > 1) note(`resumed, first step ${current.step}`);
    });
    const end = await current.ended;
    rmSync(pidFile, { force: true });
    if (end.code === 0) {
      note('done');
      break;
    }
    for (const { rule, value } of newAlerts()) note(`watchdog, rule ${rule}: ${value}`);
    note(`the trainer ended with ${describeEnd(end)}`);
    if (FINAL_CODES.includes(end.code) || starts >= MAX_STARTS)
      fail(`the run does not recover; see ${join(out, 'disturbed.log')}`);
  }
  if (events.filter(({ what }) => what.startsWith('fault: ')).length < (hasDisk ? 3 : 2))
    fail('the run was over before all faults were injected; raise --steps');
  await faults;
}

async function injectFaults() {
  await reached(0.25);
  note('fault: SIGSTOP, the trainer hangs');
  const hung = trainer;
  hung.child.kill('SIGSTOP');
  await until(() => hung.isOver);

  await reached(0.5);
  note('fault: kill -9');
  const killed = trainer;
  killed.child.kill('SIGKILL');
  await until(() => killed.isOver);

  await reached(0.7);
  if (!hasDisk) return note('no full disk: a tmpfs cannot be mounted here');
  fillDisk();
  note('fault: the disk is full');
  const full = trainer;
  await until(() => /was not saved/.test(full.output));
  const [, step] = /step (\d+) was not saved/.exec(full.output) ?? [];
  note(`checkpoint of step ${step} was not saved; training goes on`);
  rmSync(ballast);
  note('space was freed');
}

/** Waits until the disturbed run has done a share of its steps. */
async function reached(share) {
  await until(() => trainer !== undefined && !trainer.isOver && trainer.step >= share * steps);
}

async function until(condition) {
  while (!condition()) await new Promise((done) => setTimeout(done, 20));
}

function fillDisk() {
  const file = openSync(ballast, 'w');
  for (const size of [1 << 20, 4096]) {
    const bytes = Buffer.alloc(size);
    try {
      while (writeSync(file, bytes) > 0);
    } catch (error) {
      if (error.code !== 'ENOSPC') throw error;
    }
  }
  closeSync(file);
}

function newAlerts() {
  const lines = readFileSync(alertFile, 'utf8').trim().split('\n').filter(Boolean);
  const fresh = lines.slice(alertsSeen).map((line) => JSON.parse(line));
  alertsSeen = lines.length;
  return fresh.filter(({ level }) => level === 'red');
}

function note(what) {
  const event = { seconds: Number(((performance.now() - started) / 1000).toFixed(1)), step: trainer?.step ?? 0, what };
  events.push(event);
  console.log(`${event.seconds.toFixed(1).padStart(7)} s  step ${String(event.step).padStart(5)}  ${what}`);
}

function printTable() {
  console.log('\n| seconds | step | what happened |\n|---|---|---|');
  for (const { seconds, step, what } of events) console.log(`| ${seconds.toFixed(1)} | ${step} | ${what} |`);
}

function describeEnd({ code, signal }) {
  return signal ?? `exit code ${code}`;
}

function digestOf(path) {
  return createHash('sha256').update(readFileSync(path)).digest('hex');
}

/** Steps and losses, without the speed. */
function lossesOf(path) {
  return readFileSync(path, 'utf8')
    .split('\n')
    .map((line) => line.split(',').slice(0, 3).join())
    .join('\n');
}

function fail(message) {
  console.error(message);
  process.exit(1);
}
