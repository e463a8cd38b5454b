/** The definition of a check, and the runner: one row per check, also when the check throws. */
import type { Device } from '../device/device.js';

/** The invariants of docs/explain/attention.md, by number. */
export const INVARIANTS = [
  '1 reference',
  '2 causality',
  '3 prefix',
  '4 packing',
  '5 dense',
  '6 gradients',
  '7 random tokens',
  '8 repeat',
  '9 shapes',
] as const;
/** Names of the invariants. */
export type Invariant = (typeof INVARIANTS)[number];

/** The measured error and where it occurred, or the reason why nothing was measured. */
export type Finding = { readonly error: number; readonly detail?: string } | { readonly skipped: string };

/** One check of a device. */
export interface VerifyCheck {
  readonly invariant: Invariant;
  readonly case: string;
  /** The largest error that passes; 0 where bits must agree. */
  readonly limit: number;
  /** Runs the check on a device. */
  run(device: Device): Finding;
}

export function check(invariant: Invariant, name: string, limit: number, run: VerifyCheck['run']): VerifyCheck {
  return { invariant, case: name, limit, run };
}

/** The stable shape of `trefoil verify --json`. */
export interface VerifyRow {
  readonly device: string;
  readonly invariant: Invariant | 'all';
  readonly case: string;
  /** Null when skipped. */
  readonly ok: boolean | null;
  readonly error: number | null;
  readonly limit: number | null;
  /** Why it failed or was skipped. */
  readonly reason: string | null;
}

/** How far fp32 may be from the float64 reference, as ‖a-b‖/‖b‖, on every device. */
export const TOLERANCE = 2e-5;
/** The same for bf16: the fused kernels of CUDA. */
export const BF16_TOLERANCE = 1e-2;

export function runCheck({ invariant, case: name, limit, run }: VerifyCheck, device: Device): VerifyRow {
  const row = (ok: boolean | null, error: number | null, reason: string | null): VerifyRow => ({
    device: device.kind,
    invariant,
    case: name,
    ok,
    error,
    limit,
    reason,
  });
  let finding: Finding;
  try {
    finding = run(device);
  } catch (error) {
    return row(false, null, error instanceof Error ? error.message : String(error));
  }
  if ('skipped' in finding) return row(null, null, finding.skipped);
  const { error, detail = '' } = finding;
  if (error <= limit) return row(true, error, null);
  // NaN and infinity are not JSON numbers; the reason names the value.
  if (!Number.isFinite(error)) return row(false, null, `the error is ${error}${detail && `: ${detail}`}`);
  return row(false, error, detail || 'over the limit');
}

/** The row of a device that is not available. */
export function absentRow(device: string, reason: string): VerifyRow {
  return { device, invariant: 'all', case: 'all checks', ok: null, error: null, limit: null, reason };
}

/** The row of a check that could not be run to its end. */
export function unfinishedRow(
  { invariant, case: name, limit }: VerifyCheck,
  device: string,
  reason: string,
): VerifyRow {
  return { device, invariant, case: name, ok: false, error: null, limit, reason };
}

/** Counts of passed, failed and skipped checks. */
export interface VerifySummary {
  readonly passed: number;
  readonly failed: number;
  readonly skipped: number;
  readonly rows: readonly VerifyRow[];
}

/** Counts passed, failed and skipped checks. */
export function summarize(rows: readonly VerifyRow[]): VerifySummary {
  const count = (ok: boolean | null) => rows.filter((row) => row.ok === ok).length;
  return { passed: count(true), failed: count(false), skipped: count(null), rows };
}

/** Collects the largest of several errors and where it occurred. NaN counts as the largest. */
export class Worst {
  #error = 0;
  #detail = '';

  add(error: number, detail: string): void {
    if (Number.isNaN(this.#error) || error <= this.#error) return;
    this.#error = error;
    this.#detail = detail;
  }

  get finding(): Finding {
    return { error: this.#error, detail: this.#detail };
  }
}
