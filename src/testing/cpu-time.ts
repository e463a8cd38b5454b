/** Processor time and memory instead of the clock: unlike the clock's, such figures do not grow with what else runs here. */
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

/** The milliseconds of processor time that `work` takes in this process. */
export function cpuMs(work: () => void): number {
  const before = process.cpuUsage();
  work();
  const { user, system } = process.cpuUsage(before);
  return (user + system) / 1000;
}

/** Why the processor time of other processes is not known here; null when it is. */
export const procAbsence = existsSync('/proc/self/stat')
  ? null
  : 'processor time is read from /proc, which is not there';

/** User time of another process; the clock of /proc has 100 ticks per second. */
export function cpuSeconds(pid: number): number {
  return Number(statOf(pid)[11]) / 100;
}

/** Whether another process waits for something: its main thread neither runs nor is kept from running. */
export function isSleeping(pid: number): boolean {
  return statOf(pid)[0] === 'S';
}

/** The fields of /proc/PID/stat after the name. */
function statOf(pid: number): string[] {
  return readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1].split(' ');
}

/** Loaded by the other process before its own program. */
const COUNTER = `import { writeFileSync } from 'node:fs';
process.on('exit', () => {
  const { maxRSS, userCPUTime, systemCPUTime } = process.resourceUsage();
  writeFileSync(process.env.USAGE_OUT, JSON.stringify({ mib: maxRSS / 1024, ms: (userCPUTime + systemCPUTime) / 1000 }));
});
`;

/** Variables for another Node that make it leave in `folder` what it took: memory at its highest and processor time. */
export function countUsage(folder: string) {
  const [counter, out] = [join(folder, 'usage.mjs'), join(folder, 'usage.json')];
  writeFileSync(counter, COUNTER);
  return {
    env: { NODE_OPTIONS: `--import=${pathToFileURL(counter).href}`, USAGE_OUT: out },
    /** When it has ended. */
    read: () => JSON.parse(readFileSync(out, 'utf8')) as { mib: number; ms: number },
  };
}
