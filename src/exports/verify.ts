/**
 * Checks of the invariants of attention on a device, and attention cases in files.
 *
 * @packageDocumentation
 */

export type { NsaInputs } from '../ops/attention/reference.js';
export { attend, attendReference } from '../verify/attend.js';
export { type CaseFile, type CaseResult, readCase } from '../verify/case-file.js';
export type { CaseShapes, InputName } from '../verify/cases.js';
export type { Finding, Invariant, VerifyCheck } from '../verify/check.js';
export {
  checksFor,
  summarize,
  type VerifyRow,
  type VerifySummary,
  verifyDevice,
} from '../verify/verify.js';
