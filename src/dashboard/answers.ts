/** The JSON answers of the server, as its pages read them. Types only: both sides import this module. */
import type { Row } from '../watch/row.js';
import type { RankStatus } from '../watch/status.js';

/** A row of the table of runs. */
export interface RunRow {
  readonly name: string;
  /** `broken`: its files are not those of a run. */
  readonly state: 'running' | 'ended' | 'gone' | 'empty' | 'broken';
  readonly detail: string;
  readonly step: number | null;
  readonly steps: number | null;
  readonly loss: number | null;
  readonly valLoss: number | null;
  readonly tokensPerSecond: number | null;
  readonly secondsLeft: number | null;
  /** Seconds since 1970; the page shows its age. */
  readonly lastBeat: number | null;
  readonly checkpoint: number | null;
  readonly section: string | null;
  /** All ranks if there are several, else empty. */
  readonly ranks: readonly RankStatus[];
  readonly halt: string | null;
  readonly anomaly: string | null;
  /** Files that cannot be read or are not what they should be. */
  readonly problems: readonly string[];
  /** Health rules that are not green. */
  readonly alerts: readonly Row[];
  /** The most important settings in a few words. */
  readonly summary: string;
  /** A few losses over the whole run, for a sparkline. */
  readonly spark: readonly number[];
}

export interface Table {
  readonly dir: string;
  readonly version: string;
  readonly runs: readonly RunRow[];
}

/** A heartbeat that is not a step, or a step whose loss or gradient is not finite or that counted a failure. */
export interface Mark {
  readonly step: number;
  /** Seconds since 1970. */
  readonly ts: number;
  readonly kind: string;
  readonly detail: string;
}

/** A health rule that is not green. */
export interface HealthRow extends Row {
  readonly explanation: string;
}

/** What the page of a report shows of a run. */
export interface ReportRun {
  readonly name: string;
  readonly summary: string;
  readonly health: readonly HealthRow[];
  readonly problems: readonly string[];
  readonly damaged: number;
  readonly marks: readonly Mark[];
  readonly tokensPerStep: number | null;
  /** The chart data of the logs (chart-data.ts) in base64. */
  readonly columns: Readonly<Record<'heartbeat' | 'training' | 'val', string>>;
  readonly attention: readonly Readonly<Record<string, unknown>>[];
  readonly needle: Readonly<Record<string, unknown>> | null;
  readonly samples: readonly Readonly<Record<string, unknown>>[];
}

/** Everything about a run except curves. */
export interface Overview {
  readonly row: RunRow;
  /** config.yaml as `section.key` to value. */
  readonly config: Readonly<Record<string, string>>;
  readonly environment: Readonly<Record<string, unknown>> | null;
  readonly metrics: Readonly<Record<string, unknown>> | null;
  readonly health: readonly HealthRow[];
  readonly marks: readonly Mark[];
  /** Lines of the heartbeat file that are no records. */
  readonly damaged: number;
  readonly traces: readonly string[];
  readonly tokensPerStep: number | null;
}
