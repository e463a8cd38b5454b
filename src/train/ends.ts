/** The end of a run in its files, however it ended: the last heartbeat, metrics.json, and .anomaly_type where it failed. */
import { existsSync } from 'node:fs';
import { freemem, totalmem } from 'node:os';
import { ExitCode, OutOfMemory, TrefoilError, UsageError } from '../errors.js';
import { writeFileAtomic } from '../files.js';
import type { RunFolder } from '../run/folder.js';
import { toJson } from '../run/json.js';
import type { EndStatus, HeartbeatFields } from '../run/logs/heartbeat.js';
import { openHeartbeats } from '../run/logs/log.js';
import { readAnomaly, writeAnomaly } from '../run/paths.js';
import { EXIT_CODES, type TrainStatus } from './options.js';
import { RankLost } from './ranks/monitor.js';
import type { RunRecords } from './report.js';

/** How a training loop ended. */
export interface Ending {
  readonly status: TrainStatus;
  /** One line: who asked for the end, or its cause. */
  readonly detail: string;
  /** A step that was not applied. */
  readonly refused?: { readonly step: number; readonly loss: number; readonly grad_norm: number };
}

/** Ends that somebody asked for. All others are anomalies. */
const PLANNED: ReadonlySet<EndStatus> = new Set(['done', 'signalled', 'halted']);
/** Ends with a heartbeat `stop`; the others have `halt`. */
const STOPS: ReadonlySet<EndStatus> = new Set(['done', 'signalled']);

type EndFolder = Pick<RunFolder, 'path' | 'paths' | 'keepLock'>;

interface EndingRank {
  readonly rank: number;
  /** How many ranks there are. */
  readonly size: number;
}

export class RunEnds {
  /** The content of metrics.json besides the end; null until the run is complete enough to know. */
  facts: (() => Readonly<Record<string, unknown>> & { readonly step: number }) | null = null;
  /** The log files; until they are open, the end opens the heartbeats itself. */
  records: Pick<RunRecords, 'writeEvent' | 'flush'> | null = null;
  readonly #folder: EndFolder;
  readonly #rank: EndingRank;
  readonly #start: number;
  readonly #config: string | null;

  /** `start`: the step at which this process begins; `config`: the text of config.yaml. */
  constructor(folder: EndFolder, rank: EndingRank, start: number, config: string | null = null) {
    this.#folder = folder;
    this.#rank = rank;
    this.#start = start;
    this.#config = config;
  }

  /** An end without an error. */
  write({ status, detail, refused }: Ending): void {
    this.#write(status, EXIT_CODES[status], detail, refused);
  }

  /**
   * The end by an error, which the caller throws on. A second error, such as a full disk, must not hide the first.
   * `killed`: the exit code of a process that the error kills instead.
   */
  writeFailure(error: unknown, warn: (line: string) => void, killed?: number): void {
    if (this.#isRefusal(error)) return;
    const exitCode = error instanceof TrefoilError ? error.exitCode : ExitCode.failed;
    try {
      this.#writeConfig();
      this.#write(failureStatus(error, exitCode), killed ?? exitCode, errorLine(error));
      if (error instanceof RankLost) writeAnomaly(this.#folder.path, error.anomaly);
    } catch (second) {
      this.#folder.keepLock();
      warn(`the end of the run could not be written: ${errorLine(second)}`);
    }
  }

  /** A mistake that is found before the run of a new folder has begun: nothing is left behind, and no rank follows. */
  #isRefusal(error: unknown): boolean {
    const { rank } = this.#rank;
    const isMistake = error instanceof UsageError || (rank > 0 && error instanceof RankLost);
    return isMistake && this.records === null && !existsSync(this.#folder.paths.heartbeat(rank));
  }

  /** The advice about a failure names the file, which a run whose data cannot be opened has not written yet. */
  #writeConfig(): void {
    const { config } = this.#folder.paths;
    if (this.#config !== null && this.#rank.rank === 0 && !existsSync(config)) writeFileAtomic(config, this.#config);
  }

  #write(status: EndStatus, exitCode: number, detail: string, refused: Ending['refused'] = undefined): void {
    const { path, paths } = this.#folder;
    const facts = this.facts?.() ?? { step: this.#start };
    const end = { status, exit_code: exitCode };
    if (!PLANNED.has(status) && readAnomaly(path) === undefined) writeAnomaly(path, status.replaceAll('-', '_'));
    // The line is last: a run that is killed while it writes the final files has not ended.
    const metrics = { ...end, error: PLANNED.has(status) ? null : detail, ...facts };
    if (this.#rank.rank === 0) writeFileAtomic(paths.metrics, `${toJson(metrics, 2)}\n`);
    const msg = STOPS.has(status) ? 'stop' : 'halt';
    if (!this.#writeLine({ step: facts.step, msg, ...refused, detail, ...end })) this.#folder.keepLock();
  }

  /** False if the disk did not take it. */
  #writeLine(line: HeartbeatFields): boolean {
    if (this.records) {
      this.records.writeEvent(line);
      return this.records.flush();
    }
    const { rank, size } = this.#rank;
    const log = openHeartbeats(this.#folder.paths.heartbeat(rank), rank, { world: size });
    try {
      log.write(line);
      return log.flush();
    } finally {
      log.close();
    }
  }
}

function failureStatus(error: unknown, exitCode: number): EndStatus {
  if (isOutOfMemory(error)) return 'out-of-memory';
  return exitCode === ExitCode.dataSource ? 'no-data' : 'failed';
}

/** Node and V8 report it as a RangeError or by a code, drivers by their own name. */
function isOutOfMemory(error: unknown): boolean {
  if (error instanceof OutOfMemory) return true;
  const { code = '', message = '' } = (error ?? {}) as { code?: unknown; message?: unknown };
  if (code === 'ENOMEM' || code === 'ERR_WORKER_OUT_OF_MEMORY') return true;
  return /array buffer allocation failed|out[ _]of[ _]memory/i.test(String(message));
}

/** The memory of the machine, for an error that has no numbers. */
function memoryFacts(): string {
  const mib = (bytes: number) => `${Math.round(bytes / 2 ** 20)} MiB`;
  return `the process holds ${mib(process.memoryUsage.rss())}, ${mib(freemem())} of ${mib(totalmem())} are free`;
}

/** The first line of an error, with its kind if it is an unexpected one. */
function errorLine(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  const [line] = error.message.split('\n');
  if (error instanceof TrefoilError) return line;
  return `${error.name}: ${line}${isOutOfMemory(error) ? `; ${memoryFacts()}` : ''}`;
}
