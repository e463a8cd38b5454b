/** Options of `train`, what its callbacks receive, and its result. */
import type { Config } from '../config/schema.js';
import type { Device } from '../device/device.js';
import { ExitCode } from '../errors.js';
import type { Terminal } from '../live-line.js';
import type { SaveOptions } from '../run/checkpoint/save.js';
import type { OwnMetrics } from '../run/metrics.js';
import type { Evaluation } from './evaluation.js';
import type { World } from './ranks/world.js';
import type { SignalSource } from './signals.js';
import type { TrainingStep } from './trainer.js';

/** How a run ended. */
export type TrainStatus = 'done' | 'halted' | 'signalled' | 'non-finite' | 'no-data' | 'ranks-differ';

/** The exit code of `trefoil train` for each way a run ends. */
export const EXIT_CODES: Record<TrainStatus, number> = {
  done: ExitCode.done,
  halted: ExitCode.halted,
  signalled: ExitCode.signalled,
  'non-finite': ExitCode.nonFinite,
  'no-data': ExitCode.dataSource,
  'ranks-differ': ExitCode.failed,
};

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
  /**
   * Called after each optimizer step with all metrics of the run. Numbers that it returns, by name, are recorded with the
   * step: in the heartbeat, in own_metrics.csv, in TensorBoard, and as charts of the dashboard.
   */
  readonly onStep?: ((step: TrainingStep) => void) | ((step: TrainingStep) => OwnMetrics | undefined);
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
