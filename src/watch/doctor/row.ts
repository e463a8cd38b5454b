/** A row of `doctor`. */
import type { Level } from '../row.js';

export interface DoctorRow {
  readonly check: string;
  readonly level: Level;
  readonly found: string;
  /** The remedy; empty if none is needed. */
  readonly remedy: string;
}

export function fine(check: string, found: string): DoctorRow {
  return { check, level: 'green', found, remedy: '' };
}

export function warn(check: string, found: string, remedy: string): DoctorRow {
  return { check, level: 'yellow', found, remedy };
}

export function fail(check: string, found: string, remedy: string): DoctorRow {
  return { check, level: 'red', found, remedy };
}
