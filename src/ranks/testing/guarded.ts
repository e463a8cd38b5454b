/**
 * A process that is one rank with its guard: `busy` blocks its only other thread, as a large corpus does, `waits` waits for the
 * others for so long, as an exchange does before the run has files, and says whom it blames.
 */
import { RankGuard } from '../guard.js';
import { RankMonitor } from '../monitor.js';

const { rank, members, timeoutSeconds, ports, lifeline, does, seconds } = JSON.parse(process.argv[2]);
const block = (ms: number) => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
const guard = await RankGuard.start({ rank, members, timeoutSeconds, ports });
if (lifeline) await guard.hold(lifeline);
const [gone, silent] = [() => guard.gone(), () => guard.silent()];
const monitor = new RankMonitor({ rank, members, timeoutSeconds, gone, silent });
await new Promise<void>((resolve) => process.stdout.write(`${JSON.stringify(guard.lifeline)}\n`, () => resolve()));
let end = 'nobody is to blame';
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
// Whoever is through stays until all are: its end is not what is looked for.
setTimeout(() => {}, 600_000);
