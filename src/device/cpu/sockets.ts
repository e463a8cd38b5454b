/** The processor packages of this machine. */
import { readFileSync } from 'node:fs';

/** Their number; 1 where the system does not tell (macOS, and virtual machines without `physical id`). */
export function cpuSockets(read: () => string = () => readFileSync('/proc/cpuinfo', 'utf8')): number {
  try {
    const ids = [...read().matchAll(/^physical id\s*:\s*(\d+)/gm)].map(([, id]) => id);
    return Math.max(1, new Set(ids).size);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ENOENT') throw error;
    return 1;
  }
}
