/** The rule that results are bitwise the same for any number of threads, as one line of a test. */
import { eachThreadCount } from './threads.js';

/** Throws unless `run` returns the same bytes with every number of threads. */
export function expectSameForAnyThreadCount(run: () => Uint8Array[]): void {
  const [first, ...others] = eachThreadCount(run);
  for (const other of others)
    other.forEach((bytes, i) => {
      if (Buffer.compare(bytes, first[i]) !== 0) throw new Error(`result ${i} depends on the number of threads`);
    });
}
