// Measures the dashboard's server on many long runs: node bench/dashboard.mjs [runs] [steps]   (default: 100 runs of 1,000,000)
// One run is written; the others are hard links to its files. Prints one JSON value: times in ms,
// memory in MB. On a busy machine the CPU times of the server (cpu_ms) mean more than what a client waits. Linux only.
import { spawn } from 'node:child_process';
import {
  appendFileSync,
  closeSync,
  linkSync,
  mkdirSync,
  mkdtempSync,
  openSync,
  readFileSync,
  rmSync,
  statSync,
  writeSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';

const [runs = 100, steps = 1_000_000] = process.argv.slice(2).map(Number);
const folder = mkdtempSync(join(tmpdir(), 'trefoil-dashboard-bench-'));
const started = Date.now() / 1000 - steps;
const beat = (step) =>
  `{"ts":${started + step},"iso":"2026-01-01T00:00:00.000Z","pid":1,"rank":0,"step":${step},"msg":"progress","loss":${(2 + 8 / step).toFixed(6)},"toks_per_s":${39000 + (step % 97)},"dt_fetch_s":0.002,"fetch_p50_ms":2.1,"fetch_p95_ms":5.5,"grad_norm":0.${100 + (step % 800)},"gate_entropy_mean":0.91,"gate_entropy_min":0.4,"gate_max_gate":0.97,"gate_max_gate_mean":0.55,"gate_collapse_frac":0.01,"gate_branch_shares":[0.25,0.4,0.35],"sel_k_mean":14.5,"sel_k_max":16,"sel_pct_at_max":88,"fb_save_failed":0,"fb_spike":0,"gpu_mem_alloc":21800,"gpu_mem_reserved":24100,"mfu":0.41,"data":"hub"}\n`;

function write(path, header, line, every) {
  const file = openSync(path, 'w');
  let text = header;
  for (let step = 1; step <= steps; step++) {
    if (step % every === 0 || step === 1) text += line(step);
    if (text.length > 1 << 20 || step === steps) {
      writeSync(file, text);
      text = '';
    }
  }
  closeSync(file);
}

const FILES = ['heartbeat_rank0.jsonl', 'training.csv'];
const first = join(folder, 'run-000');
mkdirSync(first);
write(join(first, FILES[0]), '', beat, 1);
write(
  join(first, FILES[1]),
  'step,loss,lr,toks_per_s\n',
  (step) => `${step},${(2 + 8 / step).toFixed(6)},0.0006,39000.1\n`,
  20,
);
for (let i = 1; i < runs; i++) {
  const dir = join(folder, `run-${String(i).padStart(3, '0')}`);
  mkdirSync(dir);
  for (const name of FILES) linkSync(join(first, name), join(dir, name));
}

const root = join(dirname(fileURLToPath(import.meta.url)), '..');
const server = spawn(process.execPath, [join(root, 'dist/cli/main.js'), 'dashboard', '--dir', folder, '--port', '0']);
const url = await new Promise((resolve) => {
  createInterface({ input: server.stdout }).once('line', (line) => resolve(line.replace('listening on ', '')));
});
const timed = async (path) => {
  const [begin, cpu] = [performance.now(), cpuMs()];
  const bytes = new Uint8Array(await (await fetch(url + path)).arrayBuffer());
  return { ms: performance.now() - begin, cpu: cpuMs() - cpu, bytes };
};
/** User and system time of the server; /proc counts in hundredths of a second. */
const cpuMs = () => {
  const fields = readFileSync(`/proc/${server.pid}/stat`, 'latin1').split(') ')[1].split(' ');
  return 10 * (Number(fields[11]) + Number(fields[12]));
};
const memory = () => Number(/VmHWM:\s+(\d+)/.exec(readFileSync(`/proc/${server.pid}/status`, 'utf8'))[1]) / 1024;
const header = (bytes) => {
  const length = new DataView(bytes.buffer).getUint32(0, true);
  return JSON.parse(new TextDecoder().decode(bytes.subarray(8, 8 + length)));
};

const table = await timed('/api/runs');
const firstCurves = await timed('/api/runs/run-000/columns');
const training = await timed('/api/runs/run-000/columns?log=training');
const begin = performance.now();
let read = header(firstCurves.bytes);
while (read.offset < read.size) read = header((await timed('/api/runs/run-000/columns')).bytes);
const whole = performance.now() - begin;
const zoomed = await timed(`/api/runs/run-000/columns?from=${steps / 2}&to=${steps / 2 + 1000}`);

const stream = await fetch(`${url}/api/stream?run=run-000&from=${read.size}`);
const reader = stream.body.getReader();
const delays = [];
for (let i = 1; i <= 20; i++) {
  const at = performance.now();
  appendFileSync(join(first, FILES[0]), beat(steps + i));
  for (let text = ''; !text.includes(`[[${steps + i},`); )
    text += new TextDecoder().decode((await reader.read()).value);
  delays.push(performance.now() - at);
}
await reader.cancel();
const rounded = (value) => Math.round(value * 10) / 10;
console.log(
  JSON.stringify({
    runs,
    steps,
    heartbeat_mb: rounded(statSync(join(first, FILES[0])).size / 1e6),
    table_ms: rounded(table.ms),
    first_curves_ms: rounded(firstCurves.ms),
    training_ms: rounded(training.ms),
    cpu_ms: { table: table.cpu, first_curves: firstCurves.cpu, training: training.cpu },
    whole_run_read_ms: rounded(whole),
    zoom_ms: rounded(zoomed.ms),
    new_step_ms: { median: rounded(delays.sort((a, b) => a - b)[10]), worst: rounded(delays.at(-1)) },
    peak_memory_mb: rounded(memory()),
  }),
);
server.kill();
rmSync(folder, { recursive: true, force: true });
