// Measures what following a run costs it: node bench/dashboard-follow.mjs [pairs] [steps]   (default: 5 pairs of 400 steps)
// Trains the quickstart model alone and while a dashboard streams its steps to a client, in turns. Prints one JSON value.
// CPU time per step is compared beside the time per step: on a busy machine only the former means something. Linux only.
// telemetry_step: time of a step that records attention.jsonl over that of its neighbours.
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

const [pairs = 5, steps = 400] = process.argv.slice(2).map(Number);
const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const folder = mkdtempSync(join(tmpdir(), 'trefoil-follow-bench-'));
const start = (...given) => spawn(process.execPath, [join(root, 'dist/cli/main.js'), ...given]);
const median = (values) => [...values].sort((a, b) => a - b)[values.length >> 1];
/** Steps at the start compile kernels and fill caches. */
const WARM_UP = 20;
const CLOCK_TICKS = 100;

/** User and system time of a process in seconds. */
function cpuSeconds(pid) {
  const fields = readFileSync(`/proc/${pid}/stat`, 'latin1').split(') ')[1].split(' ');
  return (Number(fields[11]) + Number(fields[12])) / CLOCK_TICKS;
}

function beatsOf(name) {
  const lines = readFileSync(join(folder, name, 'heartbeat_rank0.jsonl'), 'utf8')
    .trim()
    .split('\n');
  return lines.map((line) => JSON.parse(line)).filter(({ msg }) => msg === 'progress');
}

/** Trains; `cpu` is the time of the process from the end of the warm-up to its last steps. */
async function train(name) {
  const child = start('train', '--config', 'quickstart', '--steps', String(steps), '--out-dir', join(folder, name));
  child.stderr.resume();
  let [first, last] = [null, null];
  createInterface({ input: child.stdout }).on('line', (line) => {
    const step = Number(/^step (\d+)/.exec(line)?.[1]);
    if (!(step >= WARM_UP)) return;
    last = { step, cpu: cpuSeconds(child.pid) };
    first ??= last;
  });
  await new Promise((resolve) => child.once('exit', resolve));
  const seconds = beatsOf(name)
    .filter(({ step }) => step > WARM_UP)
    .map(({ toks_per_s: rate }) => 1 / rate);
  return { time: median(seconds), cpu: (last.cpu - first.cpu) / (last.step - first.step) };
}

/** Reads the stream of a run until `isOver` is set. */
async function follow(url, name, isOver) {
  while (!isOver.value && (await fetch(`${url}/api/runs/${name}`)).status !== 200) await setTimeout(50);
  const response = await fetch(`${url}/api/stream?run=${name}&from=0`);
  const reader = response.body.getReader();
  let bytes = 0;
  while (!isOver.value) {
    const piece = await Promise.race([reader.read(), setTimeout(200, null)]);
    bytes += piece?.value?.length ?? 0;
  }
  await reader.cancel().catch(() => {}); // the server may be gone already
  return bytes;
}

const dashboard = start('dashboard', '--dir', folder, '--port', '0');
const url = await new Promise((resolve) => {
  createInterface({ input: dashboard.stdout }).once('line', (line) => resolve(line.replace('listening on ', '')));
});
const alone = [];
const followed = [];
let dashboardCpu = 0;
let followedSeconds = 0;
for (let pair = 0; pair < pairs; pair++) {
  const one = async () => alone.push(await train(`alone-${pair}`));
  const other = async () => {
    const name = `followed-${pair}`;
    const isOver = { value: false };
    const [cpu, begin] = [cpuSeconds(dashboard.pid), performance.now()];
    const reading = follow(url, name, isOver);
    followed.push(await train(name));
    isOver.value = true;
    if ((await reading) === 0) throw new Error('the stream sent nothing');
    dashboardCpu += cpuSeconds(dashboard.pid) - cpu;
    followedSeconds += (performance.now() - begin) / 1000;
  };
  // In turns, and in turns which of the two comes first.
  for (const work of pair % 2 === 0 ? [one, other] : [other, one]) await work();
}
dashboard.kill();

const ratios = [];
for (const [pair] of alone.entries()) {
  const beats = beatsOf(`alone-${pair}`);
  const recorded = readFileSync(join(folder, `alone-${pair}`, 'attention.jsonl'), 'utf8')
    .trim()
    .split('\n');
  const at = new Set(recorded.map((line) => JSON.parse(line).step));
  for (let i = WARM_UP; i < beats.length - 1; i++) {
    const neighbours = (1 / beats[i - 1].toks_per_s + 1 / beats[i + 1].toks_per_s) / 2;
    if (at.has(beats[i].step)) ratios.push(1 / beats[i].toks_per_s / neighbours);
  }
}
rmSync(folder, { recursive: true, force: true });
const of = (runs, what) => median(runs.map((run) => run[what]));
const change = (what) => Number((100 * (of(followed, what) / of(alone, what) - 1)).toFixed(2));
console.log(
  JSON.stringify({
    pairs,
    steps,
    step_cpu_ms: Number((1000 * of(alone, 'cpu')).toFixed(2)),
    slower_percent: change('time'),
    more_cpu_percent: change('cpu'),
    dashboard_cpu_percent: Number(((100 * dashboardCpu) / followedSeconds).toFixed(2)),
    telemetry_step: Number(median(ratios).toFixed(4)),
  }),
);
