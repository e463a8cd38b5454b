// The cost of checkpoints on a slow disk: the steps while one is written, beside the steps of the same run while none is, and
// how long training waits for one. With train.async_save and without.
//   node bench/slow-saves.mjs [--mb-per-s 8] [--steps 120] [--rounds 3]     (Linux; needs a build and g++)
// A library in LD_PRELOAD slows writes to checkpoints (src/testing/slow-writes.cpp). A step is the processor time of the
// training thread, which other programs do not change; a wait is the time on the clock.
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

const root = fileURLToPath(new URL('..', import.meta.url));
const { values } = parseArgs({
  options: {
    'mb-per-s': { type: 'string', default: '8' },
    steps: { type: 'string', default: '120' },
    rounds: { type: 'string', default: '3' },
    /** One training, in a process of its own; prints JSON. */
    one: { type: 'string' },
    async: { type: 'string' },
  },
});
const SAVE_EVERY = 20;
const median = (list) => [...list].sort((a, b) => a - b)[Math.floor(list.length / 2)];

/** Milliseconds of this thread on a processor. */
const cpuMs = () => Number(readFileSync(`/proc/self/task/${process.pid}/schedstat`, 'utf8').split(' ')[0]) / 1e6;

async function training(outDir, isAsync) {
  const { openDevice, readConfig, train } = await import(join(root, 'dist/index.js'));
  const config = readConfig('text_cpu', {
    data: { path: join(root, 'docs') },
    runtime: { threads: 1 },
    train: {
      steps: Number(values.steps),
      save_every: SAVE_EVERY,
      eval_every: 0,
      sample_every: 0,
      keep_last: 2,
      async_save: isAsync,
      out_dir: outDir,
    },
  });
  const [during, between, waits, copies] = [[], [], [], []];
  let isSaving = false;
  let last = cpuMs();
  const onStep = ({ step, metrics }) => {
    const now = cpuMs();
    // The first steps warm up; the step after a save has the copy in it, or the whole save.
    if (step > 5) (step % SAVE_EVERY === 1 ? copies : isSaving ? during : between).push(now - last);
    if (metrics.save_pause_s !== undefined && step % SAVE_EVERY === 1) waits.push(1000 * metrics.save_pause_s);
    if (isAsync && step % SAVE_EVERY === 0) isSaving = true;
    last = cpuMs();
  };
  const onCheckpoint = () => {
    isSaving = false;
  };
  await train({ config, device: openDevice('cpu', { threads: 1 }), onStep, onCheckpoint });
  console.log(JSON.stringify({ during, between, waits, copies }));
}

function compare() {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-slow-saves-'));
  try {
    const library = join(folder, 'slow.so');
    run('g++', ['-shared', '-fPIC', '-O1', '-o', library, join(root, 'src/testing/slow-writes.cpp'), '-ldl'], {});
    const rate = String(1e6 * Number(values['mb-per-s']));
    const slow = { LD_PRELOAD: library, SLOW_FILES: '/checkpoints/', SLOW_BYTES_PER_S: rate };
    for (let round = 1; round <= Number(values.rounds); round++)
      for (const isAsync of [true, false]) {
        const words = [fileURLToPath(import.meta.url), '--one', join(folder, `${round}-${isAsync}`)];
        const out = run(process.execPath, [...words, '--async', String(isAsync), '--steps', values.steps], slow);
        const { during, between, waits, copies } = JSON.parse(out.trim().split('\n').at(-1));
        const [copy, longest] = [median(copies), Math.max(...copies)].map((ms) => (ms - median(between)).toFixed(1));
        const ratio = during.length > 0 ? (median(during) / median(between)).toFixed(3) : '-';
        console.log(
          `round ${round}, async_save ${isAsync}: ${during.length} steps during a save take ${ratio} of the others; ` +
            `a save costs the training thread ${copy} ms of processor time, at most ${longest}; ` +
            `on the clock ${median(waits).toFixed(0)} ms, at most ${Math.max(...waits).toFixed(0)}`,
        );
      }
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

function run(program, words, env) {
  const { status, stdout, stderr } = spawnSync(program, words, { env: { ...process.env, ...env }, encoding: 'utf8' });
  if (status !== 0) throw new Error(`${program}: ${stderr}`);
  return stdout;
}

if (values.one) await training(values.one, values.async === 'true');
else compare();
