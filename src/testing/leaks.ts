/** Hooks that fail a test which leaves device memory allocated, with the stack frames that allocated it. */
import { afterEach, beforeEach } from 'vitest';
import type { Device } from '../device/device.js';

export function failOnLeaks(device: () => Device): void {
  beforeEach(() => device().pool.trace());
  afterEach(() => {
    const leaks = device().pool.allocations;
    if (leaks.length > 0) throw new Error(leakReport(leaks));
  });
}

export function leakReport(leaks: Device['pool']['allocations']): string {
  const lines = leaks.map(({ bytes, where }) => `${bytes} bytes were not freed, allocated\n${where}`);
  return lines.join('\n');
}
