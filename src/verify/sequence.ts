/**
 * Invariants 2, 3 and 4: causality; a prefix equals the same tokens of the whole; a packed batch equals its
 * sequences.
 */
import type { Device } from '../device/device.js';
import type { ModelShape } from '../model/shape.js';
import type { SelectionKernel } from '../ops/attention/selected/op.js';
import { check, type Finding, TOLERANCE, type VerifyCheck, Worst } from './check.js';
import { type TestModule, VARIANTS, withModule } from './module.js';
import { addTo, differentBits, randomValues, relativeError, startsOf, sum } from './numbers.js';

/** Longer than w = 24 and n*l' = 64, and not a multiple of any block size. */
const LENGTH = 77;
const RAGGED = [3, 0, 70, 1, 16, 24, 41];
const KERNELS = ['v1', 'v2'] as const;

export function sequenceChecks(device: Device): VerifyCheck[] {
  const limit = TOLERANCE;
  const each = (make: (name: string, shape: ModelShape, turn: number) => VerifyCheck) =>
    VARIANTS.map(({ name, shape }, turn) => make(name, shape, turn));
  return [
    ...each((name, shape, turn) => check('2 causality', `module, ${name}`, 0, () => causality(device, shape, turn))),
    ...each((name, shape, turn) =>
      check('3 prefix', `prefix of length t alone equals the whole, each t: ${name}`, limit, () =>
        prefixes(device, shape, turn),
      ),
    ),
    ...each((name, shape) =>
      check('4 packing', `ragged batch equals each sequence alone: ${name}`, limit, () => packing(device, shape)),
    ),
  ];
}

/** For every t: other tokens after t, even NaN, leave every bit up to t unchanged. */
function causality(device: Device, shape: ModelShape, turn: number): Finding {
  const { dim } = shape;
  const x = randomValues(LENGTH * dim, 21, 2);
  const other = randomValues(LENGTH * dim, 22, 50);
  const worst = new Worst();
  withModule(device, shape, 6, (module) => {
    const wholes = KERNELS.map((kernel) => module.run(x, [LENGTH], null, kernel));
    for (let t = 0; t < LENGTH - 1; t++) {
      const end = (t + 1) * dim;
      // Alternates between both kernels and between finite values and NaN: a product with a weight of zero shows only
      // with NaN. Every configuration starts at another offset, so that each t meets all four.
      const kernel = KERNELS[(t + turn) % 2];
      const whole = wholes[(t + turn) % 2];
      const changed = x.slice();
      if ((t + turn) % 4 < 2) changed.set(other.subarray(end), end);
      else changed.fill(Number.NaN, end);
      const after = module.run(changed, [LENGTH], null, kernel);
      const count = differentBits(after.out.subarray(0, end), whole.out.subarray(0, end));
      worst.add(count, `${kernel}: ${count} values up to token ${t} change with the tokens after it`);
      const slots = ((t + 1) * whole.selected.length) / LENGTH;
      const blocks = differentBits(after.selected.subarray(0, slots), whole.selected.subarray(0, slots));
      worst.add(blocks, `${kernel}: ${blocks} selected blocks up to token ${t} change with the tokens after it`);
    }
    for (const kernel of KERNELS)
      worst.add(futureGradients(module, x, kernel), `${kernel}: tokens after t get a gradient from outputs up to t`);
  });
  return worst.finding;
}

/** How many tokens after t have a gradient that is not zero, when only outputs up to t enter the loss. */
function futureGradients(module: TestModule, x: Float64Array, kernel: SelectionKernel): number {
  const dim = x.length / LENGTH;
  let count = 0;
  for (const t of [0, 7, 15, 16, 24, 50, 64, 75]) {
    const dOut = randomValues(x.length, 23).fill(0, (t + 1) * dim);
    const gradient = module.run(x, [LENGTH], dOut, kernel).gradients!.get('x')!;
    count += gradient.subarray((t + 1) * dim).filter((value) => value !== 0).length;
  }
  return count;
}

/** Expected results of a prefill of t tokens followed by single tokens, computed by running every prefix. */
function prefixes(device: Device, shape: ModelShape, turn: number): Finding {
  const { dim } = shape;
  const x = randomValues(LENGTH * dim, 24, 2);
  const worst = new Worst();
  withModule(device, shape, 7, (module) => {
    const wholes = KERNELS.map((kernel) => module.run(x, [LENGTH], null, kernel));
    for (let t = 1; t <= LENGTH; t++) {
      const kernel = KERNELS[(t + turn) % 2];
      const alone = module.run(x.subarray(0, t * dim), [t], null, kernel);
      const error = relativeError(alone.out, wholes[(t + turn) % 2].out.subarray(0, t * dim));
      worst.add(error, `${kernel}: the first ${t} tokens alone give another output`);
    }
  });
  return worst.finding;
}

function packing(device: Device, shape: ModelShape): Finding {
  const { dim } = shape;
  const x = randomValues(sum(RAGGED) * dim, 25, 2);
  const dOut = randomValues(x.length, 26);
  const starts = startsOf(RAGGED);
  const worst = new Worst();
  withModule(device, shape, 8, (module) => {
    for (const kernel of KERNELS) {
      const packed = module.run(x, RAGGED, dOut, kernel);
      const sums = new Map([...packed.gradients!].map(([name, gradient]) => [name, new Float64Array(gradient.length)]));
      RAGGED.forEach((length, s) => {
        const rows = <T extends Float32Array | Float64Array>(values: T) =>
          values.subarray(starts[s] * dim, starts[s + 1] * dim) as T;
        const alone = module.run(rows(x), [length], rows(dOut), kernel);
        worst.add(relativeError(alone.out, rows(packed.out)), `${kernel}: sequence ${s} alone gives another output`);
        for (const [name, gradient] of alone.gradients!)
          if (name === 'x')
            worst.add(
              relativeError(gradient, rows(packed.gradients!.get('x')!)),
              `${kernel}: sequence ${s} alone gets another gradient`,
            );
          else addTo(sums.get(name)!, gradient);
      });
      for (const [name, total] of sums)
        if (name !== 'x')
          worst.add(
            relativeError(packed.gradients!.get(name)!, total),
            `${kernel}: the gradient of ${name} is not the sum over the sequences`,
          );
    }
  });
  return worst.finding;
}
