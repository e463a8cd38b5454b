/** All checks of a device, in the order of the invariants. */
import type { Device } from '../device/device.js';
import { INVARIANTS, runCheck, type VerifyCheck, type VerifyRow } from './check.js';
import { decodeChecks } from './decode.js';
import { fusedChecks } from './fused.js';
import { denseLimitChecks } from './limits.js';
import { longChecks } from './long.js';
import { modelChecks } from './model-checks.js';
import { moduleChecks } from './module-parity.js';
import { parityChecks } from './parity.js';
import { sequenceChecks } from './sequence.js';

export { absentRow, summarize, type VerifyRow, type VerifySummary } from './check.js';

/** `full` adds sequences of 64k tokens and a longer training on random tokens. */
export function checksFor(device: Device, full = false): VerifyCheck[] {
  const checks = [
    ...parityChecks(device),
    ...moduleChecks(device),
    ...sequenceChecks(device),
    ...decodeChecks(device),
    ...denseLimitChecks(device),
    ...modelChecks(device, full),
    ...(full ? longChecks(device) : []),
    ...fusedChecks(device, full),
  ];
  return INVARIANTS.flatMap((invariant) => checks.filter((check) => check.invariant === invariant));
}

/** Runs them one by one; calls `onStart` before each. */
export function verifyDevice(
  device: Device,
  checks: readonly VerifyCheck[] = checksFor(device),
  onStart: (check: VerifyCheck, index: number) => void = () => {},
): VerifyRow[] {
  return checks.map((check, index) => {
    onStart(check, index);
    return runCheck(check, device);
  });
}
