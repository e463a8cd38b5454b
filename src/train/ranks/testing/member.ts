/** A process that is one rank at the store: joins, gathers, exchanges a value, then waits for a lost rank or to be killed. */
import { openStore } from '../store.js';

const options = JSON.parse(process.argv[2]);
const print = (line: object) => console.log(JSON.stringify(line));
try {
  const store = await openStore(options);
  print({ met: store.members.map(({ rank, host }) => `${rank}@${host}`), port: store.port });
  store.onLost(({ rank, host }) => {
    print({ lost: `${rank}@${host}` });
    process.exit(7);
  });
  const id = await store.handOut(
    'id',
    Uint8Array.from({ length: 128 }, (_, i) => 255 - i),
  );
  const all = await store.gather('names', Buffer.from(`rank ${options.rank}`));
  print({ id: [id.length, id[0], id[127]], names: all.map((name) => Buffer.from(name).toString()) });
  const handed = await store.handOut('handed out', Buffer.from(`of rank ${options.rank}`));
  if (options.block) Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, options.block);
  print({ handed: Buffer.from(handed).toString(), at: Date.now() });
  if (options.stay) await new Promise((resolve) => setTimeout(resolve, 600_000));
  await store.gather('end', new Uint8Array());
  store.close();
} catch (error) {
  print({ error: (error as Error).message });
  process.exit(1);
}
