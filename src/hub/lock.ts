/** Locks of files being downloaded: those of Python's huggingface_hub (flock), which end with their process. */
import { closeSync, openSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';

const EXCLUSIVE_WITHOUT_WAITING = 2 | 4; // LOCK_EX | LOCK_NB
/** EWOULDBLOCK on Linux and on macOS. */
const HELD = [11, 35];
const POLL_MS = 200;

/**
 * Runs `work` while this process holds the lock. `onWait` is called if another one holds it. Where a file system has no
 * locks, `work` runs without: processes that write the same blob then write the same bytes to the same places.
 */
export async function withLock<Result>(
  path: string,
  { onWait, signal }: { readonly onWait: () => void; readonly signal?: AbortSignal | undefined },
  work: () => Promise<Result>,
): Promise<Result> {
  const { default: koffi } = await import('koffi');
  const flock = koffi.load(null).func('int flock(int descriptor, int operation)');
  const descriptor = openSync(path, 'a');
  try {
    for (let waits = 0; flock(descriptor, EXCLUSIVE_WITHOUT_WAITING) !== 0 && HELD.includes(koffi.errno()); waits++) {
      if (waits === 0) onWait();
      await sleep(POLL_MS, undefined, signal ? { signal } : {});
    }
    return await work();
  } finally {
    closeSync(descriptor);
  }
}
