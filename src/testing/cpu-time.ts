/**
 * The milliseconds of processor time that `work` takes in this process: unlike the clock's, they do not grow with what
 * else runs on the machine.
 */
export function cpuMs(work: () => void): number {
  const before = process.cpuUsage();
  work();
  const { user, system } = process.cpuUsage(before);
  return (user + system) / 1000;
}
