/** The JSON answers of the server, as its pages read them. Types only: both sides import this module. */
import type { RuleRow } from '../watch/row.js';
import type { RunStatus } from '../watch/status.js';

/** A row of the table of runs. */
export interface RunRow extends Omit<RunStatus, 'run' | 'dir' | 'state' | 'status' | 'heartbeat_age_s'> {
  readonly name: string;
  /** `broken`: its files are not those of a run. */
  readonly state: RunStatus['state'] | 'broken';
  readonly status: RunStatus['status'] | 'broken';
  /** Seconds since 1970; the page shows its age. */
  readonly last_beat: number | null;
  /** Health rules that are not green. */
  readonly alerts: readonly RuleRow[];
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
export interface HealthRow extends RuleRow {
  readonly explanation: string;
}

/** The parts of a run that the page of a report shows. */
export interface ReportRun {
  readonly name: string;
  readonly summary: string;
  readonly health: readonly HealthRow[];
  readonly problems: readonly string[];
  readonly damaged: number;
  readonly marks: readonly Mark[];
  readonly tokensPerStep: number | null;
  /** The chart data of the logs (chart-data.ts) in base64. */
  readonly columns: Readonly<Record<'heartbeat' | 'training' | 'val' | 'own' | 'source', string>>;
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
