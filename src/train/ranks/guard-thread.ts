/** The thread of guard.ts: watches the main thread, and kills the process when a lost rank blocks it. */
import { writeSync } from 'node:fs';
import { parentPort, Worker, workerData } from 'node:worker_threads';
import { tailHeartbeats } from '../../run/logs/heartbeat.js';
import { runPaths } from '../../run/paths.js';
import { RunEnds } from '../ends.js';
import { FOLDER_AT, type GuardTask, type Lifeline, PHASES, rankIn, WORDS } from './guard-shared.js';
import { holdLifeline, offerLifeline } from './lifeline.js';
import { RankLost, RankMonitor } from './monitor.js';
import { Pulse, type Silence } from './pulse.js';

const { shared, rank, members, timeoutSeconds, quietMs, leaveMs, ports, addresses, key } = workerData as GuardTask;
const words = new Int32Array(shared, 0, WORDS.count);
const LOOK_MS = Math.min(500, quietMs / 4);
const TIMEOUT_MS = 1000 * timeoutSeconds;
/** Short enough to name a rank soon after the time limit, long enough for thousands of ranks. */
const BEAT_MS = Math.min(5000, TIMEOUT_MS / 10);
const STDERR = 2;

/** Only the first rank whose lifeline closed is recorded: others exit because of it. */
function onGone(other: number): void {
  Atomics.compareExchange(words, WORDS.gone, 0, other + 1);
}

let silence: Silence | null = null;

const pulse = new Pulse(BEAT_MS, (longest) => {
  silence = longest;
  Atomics.store(words, WORDS.silent, longest && longest.ms >= TIMEOUT_MS ? longest.rank + 1 : 0);
});

/** The rank that has missed three heartbeats, if any: the one to name when the time limit has passed. */
function silent(): number | null {
  return silence && silence.ms >= 3 * BEAT_MS ? silence.rank : null;
}

/** The run's folder; null until it is known. */
function folder(): string | null {
  const bytes = Atomics.load(words, WORDS.folderBytes);
  return bytes === 0 ? null : Buffer.from(new Uint8Array(shared, FOLDER_AT, bytes).slice()).toString();
}

/** Why the process must be killed, `ms` after the main thread's last progress; null if it need not be. */
function verdict(phase: (typeof PHASES)[number], ms: number): RankLost | null {
  if (phase === 'leave') {
    // Ranks that have left NCCL may exit, so a process that is gone is not to blame here.
    const late = `leaving NCCL took longer than ${Math.round(ms / 1000)} s: another rank did not take part`;
    return ms < leaveMs ? null : new RankLost(late, 'rank_stall');
  }
  const gone = () => rankIn(words, WORDS.gone);
  const monitor = new RankMonitor({ rank, members, timeoutSeconds, gone, silent });
  const place = folder();
  if (place !== null) monitor.watch({ paths: runPaths(place), waiting: () => {} });
  try {
    monitor.look(ms - quietMs); // the main thread looks first
  } catch (error) {
    if (error instanceof RankLost) return error;
    throw error;
  }
  if (ms - quietMs < TIMEOUT_MS) return null;
  const call = phase === 'join' ? 'NCCL did not reach the other ranks' : 'a CUDA or NCCL call did not return';
  return new RankLost(`${call} within ${timeoutSeconds} s; NCCL_DEBUG=INFO prints why`, 'rank_stall');
}

/** Signals are 128 and more in exit codes; SIGKILL is 9. */
const KILLED = 137;
/** How long the end of the run may take to be written. */
const WRITE_MS = 5000;

function end(lost: RankLost): void {
  writeSync(STDERR, `trefoil: rank ${rank}: ${lost.message} (this rank was blocked and is killed)\n`);
  const place = folder();
  if (place !== null) {
    // A file system that hangs must not keep the process alive: this thread would wait for it.
    const kill = `setTimeout(() => process.kill(process.pid, 'SIGKILL'), ${WRITE_MS})`;
    new Worker(kill, { eval: true, execArgv: [], name: 'trefoil-kill' });
    writeEnd(place, lost);
  }
  process.kill(process.pid, 'SIGKILL');
}

/** The log thread has written its lines long before: the main thread makes none while it is blocked. */
function writeEnd(path: string, lost: RankLost): void {
  const paths = runPaths(path);
  const step = tailHeartbeats(paths.heartbeat(rank), 1)[0]?.step ?? 0;
  const ends = new RunEnds({ path, paths, keepLock: () => {} }, { rank, size: members.length }, step);
  ends.writeFailure(lost, (line) => writeSync(STDERR, `trefoil: rank ${rank}: ${line}\n`), KILLED);
}

let [moves, quiet, looked] = [-1, 0, performance.now()];

function look(): void {
  const now = performance.now();
  const passed = Math.min(now - looked, 2 * LOOK_MS); // time in which this process was stopped does not count
  looked = now;
  const phase = PHASES[Atomics.load(words, WORDS.phase)];
  const seen = Atomics.load(words, WORDS.moves);
  quiet = phase === 'idle' || seen !== moves ? 0 : quiet + passed;
  moves = seen;
  if (quiet < quietMs) return;
  const lost = verdict(phase, quiet);
  if (lost) end(lost);
}

setInterval(() => (Atomics.load(words, WORDS.isClosed) === 1 ? process.exit(0) : look()), LOOK_MS);
parentPort!.on('message', async (lifeline: Lifeline) => {
  await holdLifeline(rank, { ...lifeline, key }, onGone, pulse);
  parentPort!.postMessage(null);
});
const isOffered = rank === 0 && ports.length > 0;
parentPort!.postMessage(
  isOffered ? await offerLifeline({ addresses, ports, world: members.length, key }, onGone, pulse) : null,
);
