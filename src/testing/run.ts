/** Small training runs for tests, in a folder of their own. */
import { EventEmitter } from 'node:events';
import { existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Writable } from 'node:stream';
import { readsPath } from '../config/data-sources.js';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import type { TrainOptions, TrainResult } from '../train/options.js';
import { train } from '../train/train.js';
import { cpu } from './devices.js';

export function temporaryFolder(): { path: string; remove: () => void } {
  const path = mkdtempSync(join(tmpdir(), 'trefoil-run-'));
  return { path, remove: () => rmSync(path, { recursive: true, force: true }) };
}

type Section = Record<string, unknown>;
export interface TinyOverrides {
  readonly model?: Section;
  readonly nsa?: Section;
  readonly data?: Section;
  readonly runtime?: Section;
  readonly train?: Section;
}

/** A model that trains a step in a few milliseconds, on text of its own. One thread: others would mostly wait for work. */
export function tinyConfig(outDir: string, overrides: TinyOverrides = {}): Config {
  return parseConfig({
    model: { dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8, mlp_ratio: 2, ...overrides.model },
    nsa: { l: 8, d: 4, l_sel: 16, n_sel: 4, w: 16, ...overrides.nsa },
    data: {
      source: 'text',
      val_fraction: 0.1,
      document_mask: false,
      ...(readsPath(overrides.data?.['source'] ?? 'text') && { path: writeText(outDir) }),
      ...overrides.data,
    },
    runtime: { device: 'cpu', threads: 1, ...overrides.runtime },
    train: {
      steps: 12,
      seq_len: 64,
      batch_size: 2,
      lr: 3e-3,
      warmup_steps: 2,
      log_every: 1,
      eval_every: 5,
      save_every: 4,
      out_dir: join(outDir, 'run'),
      ...overrides.train,
    },
  });
}

function writeText(folder: string): string {
  const path = join(folder, 'text');
  if (existsSync(path)) return path; // files that are not written again are not tokenised again
  mkdirSync(path, { recursive: true });
  for (let i = 0; i < 60; i++) {
    const lines = Array.from(
      { length: 12 },
      (_, j) => `line ${j} of document ${i}: the quick brown fox jumps ${i * j} times.`,
    );
    writeFileSync(join(path, `${String(i).padStart(3, '0')}.txt`), `${lines.join('\n')}\n`);
  }
  return path;
}

export interface TestRun {
  readonly result: TrainResult;
  readonly said: readonly string[];
  readonly warned: readonly string[];
}

export type RunOptions = Partial<
  Pick<
    TrainOptions,
    'resume' | 'save' | 'saveOptions' | 'peakFlops' | 'device' | 'signal' | 'onStep' | 'onEvaluation' | 'onCheckpoint'
  >
> & {
  /** Called with every line said, and with the emitter that stands for the process's signals. */
  readonly onLine?: (line: string, signals: EventEmitter) => void;
};

export async function runTraining(config: Config, options: RunOptions = {}): Promise<TestRun> {
  const [said, warned]: [string[], string[]] = [[], []];
  const signals = new EventEmitter();
  const { onLine, ...given } = options;
  const result = await train({
    config,
    device: cpu(),
    resume: null,
    save: null,
    say: (line) => {
      said.push(line);
      onLine?.(line, signals);
    },
    warn: (line) => warned.push(line),
    terminal: new Writable({ write: (_chunk, _encoding, done) => done() }),
    signals,
    ...given,
  });
  return { result, said, warned };
}
