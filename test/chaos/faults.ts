/**
 * Faults of a run that trains from a hub, each as one function. A fault says how the trainer must answer; the
 * test compares the end.
 */
import {
  closeSync,
  existsSync,
  ftruncateSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  symlinkSync,
  unlinkSync,
  writeFileSync,
  writeSync,
} from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { expect } from 'vitest';
import { DATASET } from '../../src/data/testing/corpora.js';
import { listCheckpoints, openCheckpoint } from '../../src/run/checkpoint/read.js';
import { runPaths, writeHalt } from '../../src/run/paths.js';
import { KINDS, type Network } from './network.js';
import { type Ending, Life, pause } from './supervisor.js';

export interface Storm {
  readonly args: readonly string[];
  readonly outDir: string;
  readonly network: Network;
  /** The small disk the run lies on; null where none can be mounted. */
  readonly disk: string | null;
  readonly scratch: string;
  /** A library that makes system calls on the run's files fail while `failing` exists; null where it cannot be built. */
  readonly faulty: { readonly library: string; readonly failing: string } | null;
  readonly random: () => number;
  /** The process that trains now; undefined between two lives. */
  life: Life | undefined;
  env: Record<string, string>;
}

export interface Fault {
  readonly name: string;
  /** Why it cannot happen here; undefined when it can. */
  readonly absent?: (storm: Storm) => string | undefined;
  readonly inject: (storm: Storm) => Promise<void>;
}

const DONE: Ending = { code: 0, signal: null };

/** For a source that will be dead: other lives have time to start on a machine that is busy. */
const HASTY = ['--loader-timeout', '4'];

function start(storm: Storm, flags: readonly string[] = [], stdout?: string): Life {
  const { args, network, env, faulty, outDir } = storm;
  const calls = faulty && {
    LD_PRELOAD: faulty.library,
    FAULTY_FILES: outDir,
    FAULTY_WHILE: faulty.failing,
    FAILING_ONE_IN: '8',
  };
  const unheard = stdout === undefined ? undefined : { stdout, log: runPaths(outDir).log };
  storm.life ??= new Life([...args, ...flags], { ...network.environment, ...env, ...calls }, unheard);
  return storm.life;
}

/** A life that has done one to six steps more. */
async function running(storm: Storm): Promise<Life> {
  let life = start(storm);
  if (life.isOver) {
    await over(storm, life); // nothing was done to it since: it may only be done
    life = start(storm);
  }
  await life.progress(life.steps + 1 + Math.floor(storm.random() * 6));
  // Anywhere inside a step, not only after its line.
  await pause(storm.random() * 25);
  return life;
}

/** Waits for the end and holds it against what may be; a run that was just done is always right. */
async function over(storm: Storm, life: Life, ...allowed: Ending[]): Promise<void> {
  const ending = await life.ending;
  expect([DONE, ...allowed], life.stderr).toContainEqual(ending);
  storm.life = undefined;
}

async function killed(storm: Storm): Promise<void> {
  if (!storm.life) return;
  storm.life.send('SIGKILL');
  await over(storm, storm.life, { code: null, signal: 'SIGKILL' });
}

/** Starts a life that must refuse to train, in one line that names the file. */
async function refused(storm: Storm, name: string): Promise<void> {
  const life = start(storm);
  const { code } = await life.ending;
  storm.life = undefined;
  expect(code, life.stderr).toBe(2);
  expect(life.stderr).toContain(name);
  expect(life.stderr).not.toMatch(/\n {4}at /);
}

/** Checkpoints that verify, newest first. */
function soundCheckpoints(outDir: string): string[] {
  return listCheckpoints(runPaths(outDir).checkpoints)
    .map(({ path }) => path)
    .filter((path) => {
      try {
        openCheckpoint(path);
        return true;
      } catch {
        return false; // which is the answer
      }
    });
}

function fill(path: string): void {
  const descriptor = openSync(path, 'w');
  for (const size of [1 << 20, 4096, 1]) {
    const bytes = Buffer.alloc(size, 0xff);
    for (;;) {
      try {
        if (writeSync(descriptor, bytes) === 0) break;
      } catch (error) {
        expect((error as NodeJS.ErrnoException).code).toBe('ENOSPC');
        break;
      }
    }
  }
  closeSync(descriptor);
}

const noCalls = ({ faulty }: Storm) => (faulty === null ? 'needs Linux and g++' : undefined);

/** One in eight calls on files of the run fails from here on. Returns how to end it. */
function failCalls({ faulty }: Storm): () => void {
  writeFileSync(faulty!.failing, '');
  return () => rmSync(faulty!.failing);
}

/** A life that was killed while calls failed, or ended by itself, in one line. */
async function failed(storm: Storm, life: Life): Promise<void> {
  const refused = [1, 2].map((code) => ({ code, signal: null }));
  await over(storm, life, ...refused, { code: null, signal: 'SIGKILL' });
  expect(life.stderr).not.toMatch(/\n {4}at /);
}

/** A file that is there and cannot be opened, even by root: a link to itself. Returns how to undo it. */
function makeUnreadable(path: string): () => void {
  const aside = `${path}.aside`;
  renameSync(path, aside);
  symlinkSync(path, path);
  return () => {
    unlinkSync(path);
    renameSync(aside, path);
  };
}

export const FAULTS: readonly Fault[] = [
  {
    name: 'SIGKILL in training',
    inject: async (storm) => {
      await running(storm);
      await killed(storm);
    },
  },
  {
    name: 'SIGKILL while starting',
    inject: async (storm) => {
      await killed(storm);
      await start(storm).starting(storm.random() * 1500);
      await killed(storm);
    },
  },
  {
    name: 'SIGTERM',
    inject: async (storm) => {
      const life = await running(storm);
      life.send('SIGTERM');
      await over(storm, life, { code: 4, signal: null });
    },
  },
  {
    name: 'SIGTERM twice',
    inject: async (storm) => {
      const life = await running(storm);
      life.send('SIGTERM');
      await pause(storm.random() * 30);
      life.send('SIGTERM');
      await over(storm, life, { code: 4, signal: null }, { code: null, signal: 'SIGTERM' });
    },
  },
  {
    name: 'SIGSTOP and SIGCONT',
    inject: async (storm) => {
      const life = await running(storm);
      life.send('SIGSTOP');
      await pause(50 + storm.random() * 400);
      life.send('SIGCONT');
      await life.progress(life.steps + 1);
    },
  },
  {
    name: 'SIGSTOP and SIGKILL',
    inject: async (storm) => {
      const life = await running(storm);
      life.send('SIGSTOP');
      await pause(20 + storm.random() * 100);
      await killed(storm);
    },
  },
  {
    name: 'SIGUSR1 and SIGUSR2',
    inject: async (storm) => {
      const life = await running(storm);
      life.send(storm.random() < 0.5 ? 'SIGUSR1' : 'SIGUSR2');
      await life.progress(life.steps + 1);
    },
  },
  {
    name: '.HALT',
    inject: async (storm) => {
      const life = await running(storm);
      writeHalt(storm.outDir, 'chaos');
      await over(storm, life, { code: 3, signal: null });
    },
  },
  {
    name: 'disk full',
    absent: ({ disk }) => (disk === null ? 'a small tmpfs cannot be mounted here (needs root)' : undefined),
    inject: async (storm) => {
      const life = await running(storm);
      const ballast = join(storm.disk!, 'ballast');
      fill(ballast);
      await pause(50 + storm.random() * 300);
      // Half of the time the process dies while nothing can be written.
      if (storm.random() < 0.5) await killed(storm);
      rmSync(ballast);
      if (!storm.life) return;
      await life.progress(life.steps + 1);
    },
  },
  {
    name: 'disk full at the start',
    absent: ({ disk }) => (disk === null ? 'a small tmpfs cannot be mounted here (needs root)' : undefined),
    inject: async (storm) => {
      await running(storm);
      await killed(storm);
      const ballast = join(storm.disk!, 'ballast');
      fill(ballast);
      const life = start(storm);
      await Promise.race([life.ending, pause(4000)]);
      life.send('SIGKILL'); // a slow machine may be about to give up by itself
      const { code, signal } = await life.ending;
      if (signal === null) {
        expect(code, life.stderr).toBe(1);
        expect(life.stderr).toContain('no space left on the disk');
      }
      storm.life = undefined;
      rmSync(ballast);
    },
  },
  {
    name: 'stdout on a full disk',
    absent: () => (existsSync('/dev/full') ? undefined : 'no /dev/full'),
    inject: async (storm) => {
      await killed(storm);
      const life = start(storm, [], '/dev/full');
      await life.progress(1 + Math.floor(storm.random() * 6));
      life.send('SIGTERM');
      await over(storm, life, { code: 4, signal: null });
    },
  },
  {
    name: 'system calls that fail',
    absent: noCalls,
    inject: async (storm) => {
      const life = await running(storm);
      const heal = failCalls(storm);
      await life.progress(life.steps + 1 + Math.floor(storm.random() * 4));
      await pause(storm.random() * 25);
      // Some of the time the process dies meanwhile, and some of it by itself.
      if (storm.random() < 0.2) life.send('SIGKILL');
      heal();
      await life.progress(life.steps + 1);
      if (life.isOver) await failed(storm, life);
    },
  },
  {
    name: 'system calls that fail at the start',
    absent: noCalls,
    inject: async (storm) => {
      await running(storm);
      await killed(storm);
      const heal = failCalls(storm);
      const life = start(storm);
      await Promise.race([life.ending, pause(1000 + storm.random() * 3000)]);
      heal();
      await life.progress(1);
      if (life.isOver) await failed(storm, life);
    },
  },
  {
    name: 'a damaged or unreadable checkpoint',
    inject: async (storm) => {
      await running(storm);
      await killed(storm);
      const sound = soundCheckpoints(storm.outDir);
      if (sound.length < 2) return; // with nothing behind it the run would rightly refuse to start again
      const file = join(sound[0], storm.random() < 0.5 ? 'model.safetensors' : 'optimizer.safetensors');
      const kind = Math.floor(storm.random() * 3);
      if (kind === 0) {
        const bytes = readFileSync(file);
        bytes[Math.floor(storm.random() * bytes.length)] ^= 1 << Math.floor(storm.random() * 8);
        writeFileSync(file, bytes);
      } else if (kind === 1) {
        const descriptor = openSync(file, 'r+');
        ftruncateSync(descriptor, Math.floor(storm.random() * statSync(file).size));
        closeSync(descriptor);
      } else makeUnreadable(file);
      const life = start(storm);
      await life.progress(1);
      await expect.poll(() => life.stderr).toContain('is skipped'); // its two streams come in any order
    },
  },
  {
    name: 'an unreadable log',
    inject: async (storm) => {
      await running(storm);
      await killed(storm);
      const paths = runPaths(storm.outDir);
      const path = [paths.training, paths.val, paths.heartbeat(0), paths.kStats][Math.floor(storm.random() * 4)];
      const restore = makeUnreadable(path);
      await refused(storm, path);
      restore();
    },
  },
  {
    name: 'a dataset that is gone',
    inject: async (storm) => {
      await running(storm);
      await killed(storm);
      storm.network.hub.missing = true;
      await refused(storm, DATASET);
      storm.network.hub.missing = false;
    },
  },
  {
    name: 'a clock that jumps',
    inject: async (storm) => {
      await killed(storm);
      storm.env = storm.random() < 0.3 ? {} : jumpingClock(storm);
      const life = start(storm);
      await life.progress(2);
    },
  },
  {
    name: 'a broken network',
    inject: async (storm) => {
      const life = await spoilt(storm, KINDS.length);
      await life.progress(life.steps + 1);
      storm.network.heal();
    },
  },
  {
    name: 'SIGKILL in a broken network',
    inject: async (storm) => {
      await spoilt(storm, 1 + Math.floor(storm.random() * 3));
      await killed(storm);
      storm.network.heal();
    },
  },
  {
    name: 'a dead network',
    inject: async (storm) => {
      await killed(storm);
      const life = start(storm, HASTY);
      await life.progress(1 + Math.floor(storm.random() * 6));
      storm.network.hub.dead = true;
      // Batches that are ready are trained on; then the run ends with its own code, and with a checkpoint of that
      // moment.
      await over(storm, life, { code: 6, signal: null });
      // Nothing is there at the start either.
      if (storm.random() < 0.3) await over(storm, start(storm, HASTY), { code: 6, signal: null });
      storm.network.hub.dead = false;
    },
  },
];

/** Injects every network fault in rotation, from any of them on, until `count` responses were damaged. */
async function spoilt(storm: Storm, answers: number): Promise<Life> {
  const { network } = storm;
  const life = await running(storm);
  const first = Math.floor(storm.random() * KINDS.length);
  network.spoil([...KINDS.slice(first), ...KINDS.slice(0, first)]);
  // Data that was read ahead is used up first: the network is asked again some steps later.
  while (network.spoilt < answers && !life.isOver) await life.progress(life.steps + 1);
  expect(network.spoilt, life.stderr).toBeGreaterThanOrEqual(answers);
  return life;
}

/** The trainer's wall clock, off by up to a year and jumping by hours every few milliseconds; timers are left alone. */
function jumpingClock({ scratch, random }: Storm): Record<string, string> {
  const file = join(scratch, 'clock.mjs');
  const program = `const real = Date.now;
let offset = Number(process.env.CHAOS_CLOCK_OFFSET_MS);
setInterval(() => { offset += (Math.random() - 0.5) * 8 * 3600_000; }, 20).unref();
Date.now = () => real() + offset;
globalThis.Date = class extends Date {
  constructor(...words) { words.length === 0 ? super(real() + offset) : super(...words); }
  static now() { return real() + offset; }
};\n`;
  writeFileSync(file, program);
  return {
    NODE_OPTIONS: `--import=${pathToFileURL(file).href}`,
    CHAOS_CLOCK_OFFSET_MS: String(Math.round((random() - 0.5) * 2 * 365 * 86_400_000)),
  };
}

/** Files of a run, by name, without those that only a storm leaves. */
export function filesOf(outDir: string): string[] {
  return readdirSync(outDir)
    .filter((name) => !/^stackdump_/.test(name))
    .sort();
}
