/** A process that runs checks on its own device: it gets their numbers one by one and returns their rows (jobs.ts). */
import type { DeviceKind } from '../device/device.js';
import { openDevice } from '../device/open.js';
import { runCheck, type VerifyRow } from './check.js';
import { checksFor } from './verify.js';

/** Which checks a process can be asked for. */
export interface JobOptions {
  readonly device: DeviceKind;
  readonly full: boolean;
  readonly threads?: number | undefined;
}

/** The first message to a process, or the number of a check in the list of `checksFor`. */
export type ToJob = JobOptions | number;

/** Answers to a number; the first message is answered by null. */
export type FromJob = VerifyRow | null;

let run: ((index: number) => VerifyRow) | null = null;

process.on('message', (message: ToJob) => {
  process.send?.(typeof message === 'number' ? run!(message) : begin(message));
});
process.on('disconnect', () => process.exit());

function begin({ device: kind, full, threads }: JobOptions): null {
  const device = openDevice(kind, threads === undefined ? {} : { threads });
  const checks = checksFor(device, full);
  run = (index) => runCheck(checks[index], device);
  return null;
}
