/**
 * Checks of the invariants of attention on a device, and attention cases in files.
 *
 * @packageDocumentation
 */

export type { NsaInputs } from '../ops/attention/reference.js';
export { attend, attendReference } from '../verify/attend.js';
export { type CaseFile, type CaseResult, readCase } from '../verify/case-file.js';
export type { InputName, Shapes as CaseShapes } from '../verify/cases.js';
export type { Check as VerifyCheck, Finding, Invariant } from '../verify/check.js';
export {
  checksFor,
  type Row as VerifyRow,
  type Summary as VerifySummary,
  summarize,
  verifyDevice,
} from '../verify/verify.js';
