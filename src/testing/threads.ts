/** Results must not depend on the number of threads: runs the same work with several and returns what each gave. */
import { cpu } from './devices.js';

export function eachThreadCount<T>(run: () => T): T[] {
  const device = cpu();
  const { threads } = device;
  try {
    return [1, 2, 3].map((count) => {
      device.threads = count;
      return run();
    });
  } finally {
    device.threads = threads;
  }
}
