/** Runs made for tests: heartbeats written by the real writer with a clock of the test's own. */
import { writeFileSync } from 'node:fs';
import { ownIdentity } from '../../process-identity.js';
import type { HeartbeatFields, SectionName } from '../../run/logs/heartbeat.js';
import { type Log, openHeartbeats, openSection } from '../../run/logs/log.js';
import { runPaths } from '../../run/paths.js';

/** A step of a healthy run at the given number. */
export function healthyStep(step: number): HeartbeatFields {
  const wave = Math.sin(step / 7);
  return {
    step,
    msg: 'progress',
    loss: 2 + 3 * Math.exp(-step / 4000) + 0.02 * wave,
    toks_per_s: 1000 * (1 + 0.08 * wave),
    dt_fetch_s: 0.004,
    fetch_p50_ms: 3,
    fetch_p95_ms: 9,
    grad_norm: 0.8 + 0.2 * wave,
    gate_entropy_mean: 0.95 + 0.05 * wave,
    gate_entropy_min: 0.4,
    gate_max_gate: 0.9,
    gate_max_gate_mean: 0.5,
    gate_collapse_frac: 0.001,
    gate_branch_shares: [0.3, 0.3, 0.4],
    sel_k_mean: 8,
    sel_k_max: 16,
    sel_pct_at_max: 70,
    fb_save_failed: 0,
    fb_spike: 0,
    gpu_mem_alloc: 700,
    gpu_mem_peak: 900,
    gpu_mem_reserved: 1000,
    data: 'text',
  };
}

export class RecordedRun {
  readonly dir: string;
  readonly rank: number;
  /** Seconds since 1970; the test moves it. */
  now: number;
  readonly #start: number;
  readonly #writer: Log<HeartbeatFields>;
  #sections: ReturnType<typeof openSection> | undefined;

  constructor(dir: string, { now = 1_700_000_000, rank = 0 } = {}) {
    this.dir = dir;
    this.rank = rank;
    this.now = now;
    this.#start = now;
    this.#writer = openHeartbeats(runPaths(dir).heartbeat(rank), rank, {
      clock: () => this.now * 1000,
      now: () => 0, // a write that takes long on a busy machine must not hold lines back: the test reads them at once
    });
  }

  write(fields: HeartbeatFields): void {
    this.#writer.write(fields);
  }

  /** Healthy steps from `first` to `last`, `seconds` apart, with changes on top. */
  steps(
    first: number,
    last: number,
    seconds: number,
    change: (step: number) => Partial<HeartbeatFields> = () => ({}),
  ): void {
    for (let step = first; step <= last; step++) {
      this.now += seconds;
      this.write({ ...healthyStep(step), ...change(step) } as HeartbeatFields);
    }
  }

  /** Enters a section now. */
  section(name: SectionName, step: number): void {
    this.#sections ??= openSection(runPaths(this.dir).section(this.rank), this.rank, {
      clock: () => this.now * 1000,
    });
    this.#sections.write({ section: name, step });
  }

  /** A lock as a process of this machine would hold it since `start`: this test's own, or one that is gone. */
  lock(owner: 'alive' | 'dead', start = this.#start): void {
    const own = ownIdentity();
    const identity = owner === 'alive' ? own : { ...own, process_start: (own.process_start ?? 1) + 1 };
    const lock = { ...identity, run_start: new Date(start * 1000).toISOString(), nonce: 'recorded' };
    writeFileSync(runPaths(this.dir).lock, `${JSON.stringify(lock)}\n`);
  }

  close(): void {
    this.#writer.close();
    this.#sections?.close();
  }
}
