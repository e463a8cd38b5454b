// A rank of test/ranks.slow.test.ts: every collective on every type and many sizes against the same in float64, and all ranks'
// results against each other. The first rank prints how many cases there were and which failed.
import { CpuDevice } from '../../dist/device/cpu/cpu.js';
import { MpiCollectives } from '../../dist/device/mpi/collectives.js';
import { Tensor } from '../../dist/tensor/tensor.js';
import { RankAgreement } from '../../dist/train/ranks/agreement.js';

const device = new CpuDevice({ threads: 1 });
const collectives = new MpiCollectives(device);
const { rank, world } = collectives;
const agreement = new RankAgreement(device, collectives);
const SIZES = [1, 3, 7, 1000, 4099, 9001];
/** Limits as a share of the largest number; sums are rounded once. */
const LIMITS = { f32: 1e-7, f64: 1e-15, bf16: 8e-3, i32: 0 };
const failures = [];
let cases = 0;

const span = (tensor) => ({ address: tensor.pointer, count: tensor.size, dtype: tensor.dtype });
/** The input of a rank: whole numbers for i32, and never the same twice. */
const value = (dtype, of, i) => {
  const number = Math.sin(1 + i * 0.7 + of * 13) * 100;
  return dtype === 'i32' ? Math.round(number) : number;
};
const filled = (dtype, count, of = rank) =>
  Tensor.from(
    device,
    Array.from({ length: count }, (_, i) => value(dtype, of, i)),
    [count],
    dtype,
  );
/** As the tensor holds it. */
const held = (dtype, count, of) => {
  const tensor = filled(dtype, count, of);
  const numbers = [...tensor.read()];
  tensor.free();
  return numbers;
};

function check(what, dtype, found, expected) {
  cases += 1;
  const scale = expected.reduce((most, number) => Math.max(most, Math.abs(number)), 1);
  const worst = found.reduce((most, number, i) => Math.max(most, Math.abs(number - expected[i])), 0) / scale;
  if (!(worst <= LIMITS[dtype]) || found.length !== expected.length) failures.push(`${what}: off by ${worst}`);
}

const JOIN = { sum: (a, b) => a + b, max: Math.max, min: Math.min };
for (const dtype of Object.keys(LIMITS))
  for (const count of SIZES) {
    const inputs = Array.from({ length: world }, (_, of) => held(dtype, count, of));
    for (const [reduction, join] of Object.entries(JOIN)) {
      const tensor = filled(dtype, count);
      collectives.allReduce(span(tensor), reduction);
      collectives.join();
      const expected = inputs[0].map((_, i) => inputs.map((numbers) => numbers[i]).reduce((a, b) => join(a, b)));
      check(`allReduce ${reduction} ${dtype} ${count}`, dtype, [...tensor.read()], expected);
      const bytes = agreement.gather(Buffer.from(tensor.readBytes()).toString('base64'));
      if (bytes.some((text) => text !== bytes[0])) failures.push(`allReduce ${dtype} ${count}: ranks differ`);
      tensor.free();
    }
    const whole = filled(dtype, count * world);
    const own = Tensor.empty(device, [count], dtype);
    collectives.reduceScatter(span(whole), span(own));
    collectives.join();
    const all = Array.from({ length: world }, (_, of) => held(dtype, count * world, of));
    const sums = Array.from({ length: count }, (_, i) =>
      all.map((numbers) => numbers[rank * count + i]).reduce((a, b) => a + b),
    );
    check(`reduceScatter ${dtype} ${count}`, dtype, [...own.read()], sums);
    own.copyFrom(whole.rows(rank * count, (rank + 1) * count));
    const gathered = inputs.flatMap((_, of) => held(dtype, count * world, of).slice(of * count, (of + 1) * count));
    for (const from of [own, whole.rows(rank * count, (rank + 1) * count)]) {
      collectives.allGather(span(from), span(whole));
      collectives.join();
      check(`allGather ${dtype} ${count}`, dtype, [...whole.read()], gathered);
    }
    const sent = filled(dtype, count);
    collectives.broadcast(span(sent), world - 1);
    collectives.join();
    check(`broadcast ${dtype} ${count}`, dtype, [...sent.read()], held(dtype, count, world - 1));
    for (const tensor of [whole, own, sent]) tensor.free();
  }

// Many at once, of both kinds: each must find its own partners.
const many = [5000, 3, 20_001, 9, 8000].map((count) => filled('f64', count));
for (const tensor of many) collectives.allReduce(span(tensor));
collectives.join();
for (const tensor of many) {
  const inputs = Array.from({ length: world }, (_, of) => held('f64', tensor.size, of));
  check(
    'several at once',
    'f64',
    [...tensor.read()],
    inputs[0].map((_, i) => inputs.reduce((sum, one) => sum + one[i], 0)),
  );
}
// NaN propagates through a maximum.
const poisoned = Tensor.from(device, [rank === 1 ? Number.NaN : rank], [1], 'f64');
collectives.allReduce(span(poisoned), 'max');
collectives.join();
if (!Number.isNaN(poisoned.item())) failures.push('max hides a NaN');

const lists = agreement.gather(JSON.stringify(failures));
if (rank === 0)
  process.stdout.write(`${JSON.stringify({ cases, failures: lists.flatMap((text) => JSON.parse(text)) })}\n`);
collectives.close();
