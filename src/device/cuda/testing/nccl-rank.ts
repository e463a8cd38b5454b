/** A process that is one of several ranks on GPUs: runs one scenario and prints its results as JSON lines. */
import { createHash } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../../../tensor/bfloat16.js';
import { RankGuard } from '../../../train/ranks/guard.js';
import { openNccl } from '../../../train/ranks/nccl.js';
import { openStore } from '../../../train/ranks/store.js';
import type { Span, WireType } from '../../collectives.js';
import { CudaDevice } from '../cuda.js';
import { chooseGpu } from '../gpu-choice.js';
import type { NcclCollectives } from '../nccl.js';

const options = JSON.parse(process.argv[2]) as {
  readonly rank: number;
  readonly world: number;
  readonly key: string;
  readonly port: number;
  readonly scenario: string;
};
const { rank, world } = options;
const print = (line: object) => console.log(JSON.stringify(line));

const BYTES: Record<WireType, number> = { f32: 4, f64: 8, bf16: 2, i32: 4, u8: 1 };

/** Values of a rank that sum exactly in every type. */
function values(count: number, of: number): number[] {
  return Array.from({ length: count }, (_, i) => ((i * 7 + of * 3) % 5) + of);
}

function encode(numbers: readonly number[], dtype: WireType): Uint8Array {
  const arrays = {
    f32: () => Float32Array.from(numbers),
    f64: () => Float64Array.from(numbers),
    bf16: () => float32ToBfloat16(numbers),
    i32: () => Int32Array.from(numbers),
    u8: () => Uint8Array.from(numbers),
  };
  const { buffer, byteOffset, byteLength } = arrays[dtype]();
  return new Uint8Array(buffer, byteOffset, byteLength);
}

function decode(bytes: Uint8Array, dtype: WireType): number[] {
  const { buffer } = bytes.slice();
  const arrays = {
    f32: () => new Float32Array(buffer),
    f64: () => new Float64Array(buffer),
    bf16: () => bfloat16ToFloat32(new Uint16Array(buffer)),
    i32: () => new Int32Array(buffer),
    u8: () => new Uint8Array(buffer),
  };
  return [...arrays[dtype]()];
}

/** Memory of the GPU with the given numbers in it. */
class Numbers {
  readonly #device: CudaDevice;
  readonly span: Span;

  constructor(device: CudaDevice, count: number, dtype: WireType) {
    this.#device = device;
    this.span = { address: device.pool.take(count * BYTES[dtype]).address, count, dtype };
  }

  write(numbers: readonly number[]): this {
    this.#device.upload(this.span.address, encode(numbers, this.span.dtype));
    return this;
  }

  get bytes(): Uint8Array {
    const bytes = new Uint8Array(this.span.count * BYTES[this.span.dtype]);
    this.#device.download(this.span.address, bytes);
    return bytes;
  }

  read(): number[] {
    return decode(this.bytes, this.span.dtype);
  }

  part(index: number, count: number): Span {
    const { address, dtype } = this.span;
    return { address: address + BigInt(index * count * BYTES[dtype]), count, dtype };
  }
}

type Scenario = (device: CudaDevice, ranks: NcclCollectives) => Promise<void> | void;

const everyRank = Array.from({ length: world }, (_, other) => other);
const sumOfAll = (count: number) =>
  everyRank.map((other) => values(count, other)).reduce((sum, next) => sum.map((x, i) => x + next[i]));
const same = (a: readonly number[], b: readonly number[]) => a.length === b.length && a.every((x, i) => x === b[i]);

/** Every operation in every type, against sums made here. */
const operations: Scenario = (device, ranks) => {
  const part = 1003; // odd, so that nothing is aligned by luck
  const count = part * world;
  for (const dtype of ['f32', 'f64', 'bf16', 'i32', 'u8'] as const) {
    const filled = () => new Numbers(device, count, dtype).write(values(count, rank));
    const sum = sumOfAll(count);
    const [all, most, least, scattered, gathered, sent] = [1, 2, 3, 4, 5, 6].map(filled);
    const own = new Numbers(device, part, dtype).write(values(part, rank));
    const mine = new Numbers(device, part, dtype);
    ranks.allReduce(all.span);
    ranks.allReduce(most.span, 'max');
    ranks.allReduce(least.span, 'min');
    ranks.reduceScatter(scattered.span, mine.span);
    ranks.allGather(own.span, gathered.span);
    ranks.broadcast(sent.span, world - 1);
    ranks.join();
    const inPlace = filled();
    ranks.reduceScatter(inPlace.span, inPlace.part(rank, part));
    ranks.allGather(inPlace.part(rank, part), inPlace.span);
    ranks.join();
    const given = everyRank.map((other) => values(count, other));
    const extreme = (pick: (...numbers: number[]) => number) =>
      sum.map((_, i) => pick(...given.map((numbers) => numbers[i])));
    print({
      dtype,
      allReduce: same(all.read(), sum),
      max: same(most.read(), extreme(Math.max)),
      min: same(least.read(), extreme(Math.min)),
      reduceScatter: same(mine.read(), sum.slice(rank * part, (rank + 1) * part)),
      allGather: same(
        gathered.read(),
        everyRank.flatMap((other) => values(part, other)),
      ),
      broadcast: same(sent.read(), values(count, world - 1)),
      inPlace: same(inPlace.read(), sum),
    });
  }
  // Sums of floats that round: the same bits on every rank, and the same again.
  const rough = Array.from({ length: 100_003 }, (_, i) => Math.fround(Math.sin(i + 100_003 * rank)));
  const hashes = [1, 2].map(() => {
    const numbers = new Numbers(device, rough.length, 'f32').write(rough);
    ranks.allReduce(numbers.span);
    ranks.join();
    return createHash('sha256').update(numbers.bytes).digest('hex');
  });
  print({ hash: hashes[0], isRepeated: hashes[0] === hashes[1] });
};

/** Operations wait for earlier launches, and launches after a join wait for them; also in a graph. */
const order: Scenario = (device, ranks) => {
  const count = 2 ** 20;
  const [a, b] = [new Numbers(device, count, 'f32'), new Numbers(device, count, 'f32')];
  const seen = new Numbers(device, 3, 'f32');
  const copyOne = (from: Numbers, to: number) =>
    device.copy(seen.part(to, 1).address, from.part(count - 1, 1).address, 4);
  const source = new Numbers(device, count, 'f32');
  const work = () => {
    for (let i = 0; i < 20; i++) device.copy(a.span.address, source.span.address, 4 * count); // keeps the GPU busy
    ranks.allReduce(a.span);
    device.copy(b.span.address, source.span.address, 4 * count); // may run concurrently
    ranks.join();
    copyOne(a, 0);
    ranks.allReduce(a.span);
    ranks.allReduce(b.span, 'max');
    ranks.join();
    copyOne(a, 1);
    copyOne(b, 2);
  };
  const run = (launch: () => void, value: number) => {
    device.fill(source.span.address, value + rank, count);
    launch();
    return seen.read();
  };
  const plain = [1, 2].map((value) => run(work, value));
  const graph = device.record(work);
  const replayed = [1, 2, 3].map((value) => run(() => graph.replay(), value));
  const mixed = run(work, 5);
  print({ plain, replayed, mixed });
  graph.free();
};

/** GPU times of products and of a reduction that does not depend on them. */
const overlap: Scenario = (device, ranks) => {
  const n = 4096;
  const matrix = () => ({ pointer: device.pool.take(2 * n * n).address, dtype: 'bf16' as const });
  const [a, b, d] = [matrix(), matrix(), matrix()];
  for (const { pointer } of [a, b]) device.fillZero(pointer, 2 * n * n);
  const numbers = new Numbers(device, 2 ** 22, 'f32').write(values(2 ** 22, rank));
  const products = () => {
    for (let i = 0; i < 40; i++) device.matrixProduct({ a, b, d, m: n, n, k: n } as never);
  };
  products();
  ranks.allReduce(numbers.span);
  ranks.join();
  device.synchronize();
  const timeline = device.timeline(() => {
    ranks.allReduce(numbers.span);
    products();
    ranks.join();
  });
  const [reduction] = timeline.filter(({ isBeside }) => isBeside);
  const beside = timeline.filter(({ isBeside }) => !isBeside);
  const during = beside.filter(({ from, to }) => to > reduction.from && from < reduction.to);
  print({
    reduction: [reduction.from, reduction.to],
    products: [beside[0].from, beside.at(-1)!.to],
    launches: beside.length,
    during: during.length,
  });
};

/** Rank 0 waits for a rank that was killed. */
const lost: Scenario = async (device, ranks) => {
  const numbers = new Numbers(device, 2 ** 20, 'f32').write(values(2 ** 20, rank));
  ranks.allReduce(numbers.span);
  ranks.join();
  device.synchronize();
  print({ ready: true });
  if (rank !== 0) await sleep(60_000);
  await sleep(2000); // the test kills rank 1 meanwhile
  const started = performance.now();
  let failure = '';
  try {
    ranks.allReduce(numbers.span);
    ranks.join();
    device.synchronize();
  } catch (error) {
    failure = (error as Error).message;
  }
  print({ failure, seconds: (performance.now() - started) / 1000 });
  process.kill(process.pid, 'SIGKILL'); // its GPU waits for ever: an orderly end would too
};

/** Rank 0 starts an operation that rank 1 never starts, and aborts it. */
const givenUp: Scenario = async (device, ranks) => {
  const numbers = new Numbers(device, 2 ** 20, 'f32').write(values(2 ** 20, rank));
  ranks.allReduce(numbers.span);
  ranks.join();
  device.synchronize();
  if (rank === 0) ranks.allReduce(numbers.span);
  if (rank === 0) ranks.join();
  await sleep(500);
  const isWaiting = !device.driver.isDone(device.stream);
  const started = performance.now();
  ranks.abort();
  device.synchronize();
  const seconds = (performance.now() - started) / 1000;
  let failure = '';
  try {
    ranks.allReduce(numbers.span);
  } catch (error) {
    failure = (error as Error).message;
  }
  print({ isWaiting, seconds, failure, left: numbers.read().length });
};

const SCENARIOS: Readonly<Record<string, Scenario>> = { operations, order, overlap, lost, givenUp };

try {
  const store = await openStore({ ...options, address: '127.0.0.1', timeoutMs: 30_000 });
  const device = new CudaDevice({ index: chooseGpu(rank, 1, process.env) });
  const guard = await RankGuard.start({ rank, members: store.members, timeoutSeconds: 30, key: options.key });
  let beganMs = performance.now();
  const ranks = await openNccl(device, {
    rank,
    world,
    store,
    guard,
    onWait: (waitedMs) => {
      if (waitedMs > 20_000) throw new Error(`nothing for ${waitedMs} ms`);
    },
  });
  print({ joinedMs: performance.now() - beganMs });
  beganMs = performance.now();
  await SCENARIOS[options.scenario](device, ranks);
  if (options.scenario !== 'givenUp') ranks.check();
  ranks.close();
  guard.close();
  store.close();
  print({ closedMs: performance.now() - beganMs });
} catch (error) {
  print({ error: (error as Error).message, stack: (error as Error).stack });
  process.exit(1);
}
