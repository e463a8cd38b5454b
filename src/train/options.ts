/** Options and result of `train`. */
import type { Config } from '../config/schema.js';
import type { Device } from '../device/device.js';
import type { Terminal } from '../live-line.js';
import type { SaveOptions } from '../run/checkpoint/save.js';
import type { World } from './ranks/world.js';
import type { CheckpointRecord, EvaluationRecord, StepRecord } from './records.js';
import type { SignalSource } from './requests.js';

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
