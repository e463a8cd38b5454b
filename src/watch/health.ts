/** Checks a run once by all health rules. */
import { readRun } from '../run/reader.js';
import { wallAges } from './ages.js';
import { type Verdict, verdict } from './row.js';
import { healthFindings } from './rules.js';
import type { Thresholds } from './thresholds.js';

/** `now` in seconds since 1970. */
export function checkHealth(dir: string, thresholds: Thresholds, now: number = Date.now() / 1000): Verdict {
  return verdict(healthFindings(readRun(dir), thresholds, wallAges(now)));
}
