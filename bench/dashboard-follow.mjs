// Measures what following a run costs it: node bench/dashboard-follow.mjs [options]
//   --seconds <n>           how long to measure (default: 60)
//   --round <n>             seconds of a round (default: 1)
//   --trainer-cores <list>  cores of the training, as taskset takes them (default: all)
//   --other-cores <list>    cores of the dashboard and the client (default: all)
//   -- <arguments>          of trefoil train (default: --config quickstart)
// One training runs all the time; a client follows it through a dashboard in every second round. Rounds next to each other
// are compared, so that drift of the machine cancels out. Prints one JSON value. Linux only.
// slower_percent: median over pairs of rounds, with its 95 % interval (bootstrap). Batches of equal shape on a GPU give the
// least noise. more_cpu_percent: CPU time of all threads of the trainer per step. waits_percent: how much longer the trainer
// waited for a core, in percent of its CPU time.
// telemetry_step: time of a step that records attention.jsonl over that of its neighbours.
import { spawn, spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const { values, positionals } = parseArgs({
  options: {
    seconds: { type: 'string', default: '60' },
    round: { type: 'string', default: '1' },
    'trainer-cores': { type: 'string' },
    'other-cores': { type: 'string' },
  },
  allowPositionals: true,
});
const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const folder = mkdtempSync(join(tmpdir(), 'trefoil-follow-bench-'));
const heartbeats = join(folder, 'run', 'heartbeat_rank0.jsonl');
const roundMs = 1000 * Number(values.round);
const rounds = 2 * Math.max(1, Math.round((1000 * Number(values.seconds)) / roundMs / 2));
/** Steps this close to a change of rounds count for neither. */
const EDGE_MS = 50;
/** Steps at the start compile kernels and fill caches. */
const WARM_UP = 50;

/** A process of Trefoil on some cores. */
function start(cores, ...given) {
  const command = [process.execPath, join(root, 'dist/cli/main.js'), ...given];
  const [program, ...rest] = cores === undefined ? command : ['taskset', '-c', cores, ...command];
  return spawn(program, rest);
}

const sorted = (numbers) => [...numbers].sort((a, b) => a - b);
const quantile = (numbers, share) => sorted(numbers)[Math.min(numbers.length - 1, Math.floor(share * numbers.length))];
const median = (numbers) => quantile(numbers, 0.5);
const rounded = (value, digits) => Number(value.toFixed(digits));

/** Seconds that all threads of a process computed, and that they waited for a core. */
function cpuSeconds(pid) {
  const total = { ran: 0, waited: 0 };
  for (const thread of readdirSync(`/proc/${pid}/task`)) {
    const [ran, waited] = readFileSync(`/proc/${pid}/task/${thread}/schedstat`, 'latin1').split(' ').map(Number);
    total.ran += ran / 1e9;
    total.waited += waited / 1e9;
  }
  return total;
}

/** The steps of the run so far, as seconds since 1970 and the duration of a step in any unit. */
function stepsOfRun() {
  if (!existsSync(heartbeats)) return [];
  const lines = readFileSync(heartbeats, 'utf8').split('\n').slice(0, -1);
  return lines
    .map((line) => JSON.parse(line))
    .filter(({ msg, step }) => msg === 'progress' && step > WARM_UP)
    .map(({ step, ts, toks_per_s: rate }) => ({ step, ts, time: 1 / rate }));
}

/** Reads the stream of the run until `signal`; returns the bytes it got. */
async function follow(url, signal) {
  let bytes = 0;
  try {
    const { size } = statSync(heartbeats);
    const response = await fetch(`${url}/api/stream?run=run&from=${size}`, { signal });
    for await (const piece of response.body) bytes += piece.length;
  } catch (error) {
    if (error.name !== 'AbortError') throw error;
  }
  return bytes;
}

if (values['other-cores'] !== undefined)
  spawnSync('taskset', ['-a', '-p', '-c', values['other-cores'], String(process.pid)]);
const dashboard = start(values['other-cores'], 'dashboard', '--dir', folder, '--port', '0');
const url = await new Promise((resolve) => {
  createInterface({ input: dashboard.stdout }).once('line', (line) => resolve(line.replace('listening on ', '')));
});
const given = positionals.length > 0 ? positionals : ['--config', 'quickstart'];
// Nothing but steps: an evaluation or a checkpoint would fall into some rounds only.
const quiet = ['--steps', '10000000', '--set', 'train.eval_every=0', '--set', 'train.save_every=0'];
const trainer = start(values['trainer-cores'], 'train', ...given, ...quiet, '--out-dir', join(folder, 'run'));
trainer.stdout.resume();
let complaint = '';
trainer.stderr.on('data', (text) => {
  complaint = (complaint + text).slice(-4000);
});
const ended = new Promise((resolve) => trainer.once('exit', resolve));
const stop = async () => {
  trainer.kill('SIGKILL');
  dashboard.kill();
  await ended;
};
for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, () => void stop().then(() => process.exit(1)));
while (stepsOfRun().length === 0) {
  if (trainer.exitCode !== null) {
    dashboard.kill();
    throw new Error(`the training ended: ${complaint}`);
  }
  await setTimeout(200);
}

const measured = [];
let dashboardCpu = 0;
for (let i = 0; i < rounds; i++) {
  // off on, on off, off on, …: a drift in one direction has no effect.
  const isFollowed = i % 4 === 1 || i % 4 === 2;
  const control = new AbortController();
  const [cpu, ownCpu] = [cpuSeconds(trainer.pid), cpuSeconds(dashboard.pid)];
  const begin = Date.now();
  const reading = isFollowed ? follow(url, control.signal) : null;
  await setTimeout(roundMs);
  const end = Date.now();
  control.abort();
  const used = cpuSeconds(trainer.pid);
  if (reading && (await reading) === 0) throw new Error('the stream sent nothing');
  if (isFollowed) dashboardCpu += cpuSeconds(dashboard.pid).ran - ownCpu.ran;
  measured.push({ isFollowed, begin, end, cpu: used.ran - cpu.ran, waits: used.waited - cpu.waited });
}
const steps = stepsOfRun();
await stop();

const within = ({ begin, end }) => steps.filter(({ ts }) => 1000 * ts > begin + EDGE_MS && 1000 * ts < end - EDGE_MS);
const figures = measured.map((round) => {
  const own = within(round);
  const count = steps.filter(({ ts }) => 1000 * ts > round.begin && 1000 * ts <= round.end).length;
  return { ...round, steps: own.length, time: median(own.map(({ time }) => time)), cpuPerStep: round.cpu / count };
});
const pairs = Array.from({ length: rounds / 2 }, (_, i) => {
  const [a, b] = figures.slice(2 * i, 2 * i + 2);
  const [alone, followed] = a.isFollowed ? [b, a] : [a, b];
  return {
    time: followed.time / alone.time,
    cpu: followed.cpuPerStep / alone.cpuPerStep,
    waits: (followed.waits - alone.waits) / alone.cpu,
  };
});
/** Medians of samples drawn with replacement. */
const resampled = Array.from({ length: 2000 }, () =>
  median(pairs.map(() => pairs[Math.floor(Math.random() * pairs.length)].time)),
);
const percent = (ratio) => rounded(100 * (ratio - 1), 3);
const lines = readFileSync(join(folder, 'run', 'attention.jsonl'), 'utf8')
  .split('\n')
  .slice(0, -1);
const recorded = new Set(lines.map((line) => JSON.parse(line).step));
const telemetry = steps.flatMap(({ step, time }, i) => {
  const [before, after] = [steps[i - 1], steps[i + 1]];
  return recorded.has(step) && before && after ? [time / ((before.time + after.time) / 2)] : [];
});
const followedSeconds = figures
  .filter(({ isFollowed }) => isFollowed)
  .reduce((sum, { begin, end }) => sum + (end - begin) / 1000, 0);
rmSync(folder, { recursive: true, force: true });
console.log(
  JSON.stringify({
    train: given.join(' '),
    pairs: pairs.length,
    steps_per_round: median(figures.map((round) => round.steps)),
    step_ms: rounded((1000 * (steps.at(-1).ts - steps[0].ts)) / (steps.length - 1), 3),
    slower_percent: percent(median(pairs.map(({ time }) => time))),
    slower_percent_95: [percent(quantile(resampled, 0.025)), percent(quantile(resampled, 0.975))],
    slower_percent_quartiles: [0.25, 0.75].map((share) =>
      percent(
        quantile(
          pairs.map(({ time }) => time),
          share,
        ),
      ),
    ),
    more_cpu_percent: percent(median(pairs.map(({ cpu }) => cpu))),
    waits_percent: rounded(100 * median(pairs.map(({ waits }) => waits)), 3),
    dashboard_cpu_percent: rounded((100 * dashboardCpu) / followedSeconds, 2),
    telemetry_step: telemetry.length > 0 ? rounded(median(telemetry), 4) : null,
  }),
);
