/**
 * Stack dumps of a run, on SIGUSR1. A handler runs between two steps, so its own stack says nothing: the main thread is sampled
 * for a while instead, and the dump shows where it spent the time. A thread that never returns from a call writes none;
 * `trefoil watch` then dumps the kernel's view of it from outside.
 */
import { Session } from 'node:inspector/promises';
import { setTimeout } from 'node:timers/promises';
import { CudaDevice } from '../device/cuda/cuda.js';
import type { Device } from '../device/device.js';
import { writeFileAtomic } from '../files.js';
import { toJson } from '../run/json.js';

interface Dumped {
  readonly rank: number;
  readonly device: Device;
  readonly position: () => { readonly step: number; readonly section: string };
}

/** Long enough for a step of a fast run; a longer step is sampled to its end, because the timer waits for it. */
const SAMPLED_MS = 1000;
const INTERVAL_US = 2000;
const STACKS = 12;

export class StackDumps {
  readonly #dumped: Dumped;
  #writing: Promise<void> | null = null;

  constructor(dumped: Dumped) {
    this.#dumped = dumped;
  }

  /** Resolves when no dump is being written. */
  get finished(): Promise<void> {
    return this.#writing ?? Promise.resolve();
  }

  /** Writes a dump, unless one is being written, and says where it is. */
  write(path: string, say: (line: string) => void): void {
    this.#writing ??= this.#write(path)
      .then(
        () => say(`SIGUSR1: wrote ${path}`),
        (error: Error) => say(`SIGUSR1: ${error.message}`),
      )
      .finally(() => {
        this.#writing = null;
      });
  }

  async #write(path: string): Promise<void> {
    const { rank, device, position } = this.#dumped;
    const [at, launched, began] = [position(), launches(device), performance.now()];
    const stacks = await sampleStacks();
    // Node's report, without its environment section, which may hold credentials.
    const { libuv, javascriptHeap, resourceUsage } = process.report.getReport() as unknown as Record<string, unknown>;
    const facts = {
      ...{ pid: process.pid, rank, iso: new Date().toISOString(), ...at, after: position() },
      sampled_ms: Math.round(performance.now() - began),
      ...(launched === null ? {} : { launches: launched, launches_while_sampled: launches(device)! - launched }),
    };
    writeFileAtomic(path, `${toJson({ ...facts, stacks, libuv, javascriptHeap, resourceUsage }, 2)}\n`);
  }
}

/** Launches since the start, on a GPU; they run after the call, so the stack is that of the host. */
function launches(device: Device): number | null {
  return device instanceof CudaDevice ? device.launches : null;
}

interface Stack {
  /** Share of the samples. */
  readonly share: number;
  /** `function (file:line)`, innermost first. `(idle)`: the thread waits for an event, such as data. */
  readonly frames: readonly string[];
}

/** Where this thread spends its time, most often first. */
async function sampleStacks(): Promise<Stack[]> {
  const session = new Session();
  session.connect();
  try {
    await session.post('Profiler.enable');
    await session.post('Profiler.setSamplingInterval', { interval: INTERVAL_US });
    await session.post('Profiler.start');
    await setTimeout(SAMPLED_MS);
    const { profile } = await session.post('Profiler.stop');
    const parents = new Map(profile.nodes.flatMap(({ id, children = [] }) => children.map((child) => [child, id])));
    const nodes = new Map(profile.nodes.map((node) => [node.id, node]));
    const stackOf = (id: number): string[] => {
      const { functionName: name, url, lineNumber } = nodes.get(id)!.callFrame;
      const parent = parents.get(id);
      if (parent === undefined) return []; // (root)
      const place = url === '' ? '' : ` (${url.replace(/^file:\/\//, '')}:${lineNumber + 1})`;
      return [`${name || '(anonymous)'}${place}`, ...stackOf(parent)];
    };
    const counts = new Map<number, number>();
    for (const id of profile.samples ?? []) counts.set(id, (counts.get(id) ?? 0) + 1);
    const total = profile.samples?.length ?? 0;
    return [...counts]
      .sort((a, b) => b[1] - a[1])
      .slice(0, STACKS)
      .map(([id, count]) => ({ share: count / total, frames: stackOf(id) }));
  } finally {
    session.disconnect();
  }
}
