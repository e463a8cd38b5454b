/** Options of `train`, what its callbacks receive, and its result. */
import type { Config } from '../config/schema.js';
import type { LoaderTelemetry } from '../data/loader.js';
import type { Device } from '../device/device.js';
import type { Terminal } from '../live-line.js';
import type { SparseStartState } from '../model/sparse-start.js';
import type { GateStatistics } from '../ops/attention/gate/op.js';
import type { SelectionStatistics } from '../ops/attention/selection-counts/op.js';
import type { SaveOptions } from '../run/checkpoint/save.js';
import type { Evaluation } from './evaluate.js';
import type { AttentionStatistics } from './observers.js';
import type { World } from './ranks/world.js';
import type { SignalSource } from './signals.js';

/** How a run ended. */
export type TrainStatus = 'done' | 'halted' | 'signalled' | 'non-finite' | 'no-data' | 'ranks-differ';

/** How a training run ended. */
export interface TrainResult {
  readonly status: TrainStatus;
  /** The last step done. */
  readonly step: number;
  readonly outDir: string;
  readonly firstLoss: number | null;
  readonly lastLoss: number | null;
  readonly valLoss: number | null;
}

/** The facts of one optimizer step, as a run records them. */
export interface StepRecord {
  readonly step: number;
  /** Mean loss per target in nats, over all ranks. */
  readonly loss: number;
  readonly learningRate: number;
  readonly tokensPerSecond: number;
  /** Before clipping. */
  readonly gradientNorm: number;
  readonly fetchSeconds: number;
  readonly fetchP50Ms: number;
  readonly fetchP95Ms: number;
  readonly mfu: number | null;
  readonly gates: GateStatistics | null;
  readonly selection: SelectionStatistics | null;
  /** By layer; null for dense attention and in most steps. */
  readonly attention: AttentionStatistics | null;
  /** The schedule from dense to sparse attention; null without one. */
  readonly sparseStart: SparseStartState | null;
  readonly memoryMib: { readonly allocated: number; readonly reserved: number };
  /** Counters of failures, fallbacks and attention kernels since the start, by name. */
  readonly counters: Readonly<Record<string, number>>;
  /** The source of the batch: `synthetic` if that replaces a source that failed. */
  readonly data: string;
  /** State of a loader that reads ahead. */
  readonly loader?: LoaderTelemetry | undefined;
}

/** A completed evaluation. */
export interface EvaluationRecord extends Evaluation {
  readonly step: number;
}

/** An attempt to save a checkpoint. */
export interface CheckpointRecord {
  readonly step: number;
  /** The checkpoint's folder; null if the disk did not take it, in which case training continues. */
  readonly path: string | null;
}

/** Functions that a program can pass to `train`. */
export interface RunCallbacks {
  /** Called after each optimizer step was recorded. */
  readonly onStep?: (record: StepRecord) => void;
  /** Called after each evaluation was recorded. */
  readonly onEvaluation?: (record: EvaluationRecord) => void;
  /** Called after each checkpoint was saved, or could not be saved. */
  readonly onCheckpoint?: (record: CheckpointRecord) => void;
}

/** Options of `train`. */
export interface TrainOptions extends RunCallbacks {
  readonly config: Config;
  readonly device: Device;
  /** The ranks of the run (`openWorld`). Default: this process alone. */
  readonly world?: World | null;
  /** `auto` (the newest sound checkpoint of the folder), a checkpoint, or null for a new run, the default. */
  readonly resume?: string | null;
  /** Also write the final model to this file. */
  readonly save?: string | null;
  /** Receives progress lines. Ignored by default. */
  readonly say?: (line: string) => void;
  /** Receives warnings, one line each. Default: stderr. */
  readonly warn?: (line: string) => void;
  /** The stream of the live progress line. Default: none. */
  readonly terminal?: Terminal | null;
  /** Peak of the device in FLOP/s, for MFU (`measurePeak`). Without it MFU is not reported. */
  readonly peakFlops?: number | null;
  /** The source of SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, such as `process`. Default: none, so no handlers are installed. */
  readonly signals?: SignalSource | null;
  /** An AbortSignal: once aborted, the run ends after the step with a checkpoint, as by SIGTERM. */
  readonly signal?: { readonly aborted: boolean };
  readonly saveOptions?: SaveOptions;
}
