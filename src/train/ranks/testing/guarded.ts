/**
 * A process that is one rank with its guard. `busy` blocks the main thread, as tokenising a large corpus does. `waits` waits
 * for the other ranks, as an exchange does before the run has files, and prints the rank it names.
 */
import { RankGuard } from '../guard.js';
import { RankMonitor } from '../monitor.js';

const { rank, members, timeoutSeconds, ports, lifeline, does, seconds, key } = JSON.parse(process.argv[2]);
const block = (ms: number) => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
const guard = await RankGuard.start({ rank, members, timeoutSeconds, ports, key });
if (lifeline) await guard.hold(lifeline);
const [gone, silent] = [() => guard.gone(), () => guard.silent()];
const monitor = new RankMonitor({ rank, members, timeoutSeconds, gone, silent });
await new Promise<void>((resolve) => process.stdout.write(`${JSON.stringify(guard.lifeline)}\n`, () => resolve()));
let end = 'no rank was lost';
const started = performance.now();
for (let waited = 0; waited < 1000 * seconds; waited = performance.now() - started) {
  if (does === 'waits')
    try {
      monitor.look(waited);
    } catch (error) {
      end = (error as Error).message;
      break;
    }
  block(does === 'busy' ? 1000 * seconds : 100);
}
console.log(`after ${Math.round((performance.now() - started) / 1000)} s: ${end}`);
// A rank that has finished stays until all have: its exit must not be noticed as a loss.
setTimeout(() => {}, 600_000);
