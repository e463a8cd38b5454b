/** Processor time and memory instead of the clock: unlike the clock's, such figures do not grow with what else runs here. */
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

/** The milliseconds of processor time that `work` takes in this process. */
export function cpuMs(work: () => void): number {
  const before = process.cpuUsage();
  work();
  const { user, system } = process.cpuUsage(before);
  return (user + system) / 1000;
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
