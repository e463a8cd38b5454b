import { beforeEach, describe, expect, it } from 'vitest';
import { CpuDevice } from '../device/cpu/cpu.js';
import { UsageError } from '../errors.js';
import { add } from '../ops/add/op.js';
import { linear } from '../ops/linear/op.js';
import { rmsnorm } from '../ops/rmsnorm/op.js';
import { cpu } from '../testing/devices.js';
import { failOnLeaks, leakReport } from '../testing/leaks.js';
import { randomValues } from '../testing/numbers.js';
import { Parameter } from './parameter.js';
import { Tape, withTape } from './tape.js';
import { Tensor } from './tensor.js';

const SIZE = 1024; // numbers: 4 KiB, which is a whole block of the pool
const BYTES = SIZE * 4;

/** y = factor * x, computed on the host; saves nothing. */
function scaled(tape: Tape, x: Tensor, factor: number): Tensor {
  const y = tape.from(
    Float32Array.from(x.read(), (value) => value * factor),
    x.shape,
  );
  tape.record([x], [y], [], () => {
    const dy = tape.gradient(y)!;
    write(tape, x, (i) => dy.item(i) * factor);
  });
  return y;
}

/** y = x²; saves x. */
function squared(tape: Tape, x: Tensor): Tensor {
  const y = tape.from(
    Float32Array.from(x.read(), (value) => value * value),
    x.shape,
  );
  tape.record([x], [y], [x], () => {
    const [dy, values] = [tape.gradient(y)!.read(), x.read()];
    write(tape, x, (i) => 2 * dy[i] * values[i]);
  });
  return y;
}

function write(tape: Tape, x: Tensor, slope: (i: number) => number): void {
  const target = tape.gradientTarget(x);
  if (!target) return;
  const before = target.accumulate ? target.gradient.read() : new Float32Array(x.size);
  target.gradient.write(before.map((value, i) => value + slope(i)));
}

const device = cpu();
let before = 0;
const inUse = () => device.pool.bytesInUse - before;

beforeEach(() => {
  before = device.pool.bytesInUse;
});
failOnLeaks(() => device);

describe('gradients', () => {
  it('follow the chain rule and add up over all uses', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from([1, 2, 3], [3]));
    const y = squared(tape, scaled(tape, x, 3)); // 9x²
    const z = scaled(tape, x, 5);
    tape.backward(
      [y, z],
      [
        [1, 1, 1],
        [1, 1, 1],
      ],
    );
    expect([...tape.gradient(x)!.read()]).toEqual([23, 41, 59]);
    tape.end();
  });

  it('start from 1 for a loss', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from([3], [1]));
    tape.backward(squared(tape, x));
    expect(tape.gradient(x)!.item(0)).toBe(6);
    tape.end();
  });

  it('of parameters outlive the tape, add up over passes and start anew when cleared', () => {
    const parameter = new Parameter(device, 'w', [2]);
    parameter.value.write([1, 2]);
    const pass = () => {
      const tape = new Tape(device);
      tape.backward(squared(tape, parameter.value), 1);
      tape.end();
    };
    expect(parameter.gradient).toBeNull();
    pass();
    expect([...parameter.gradient!.read()]).toEqual([2, 4]);
    pass();
    expect([...parameter.gradient!.read()]).toEqual([4, 8]);
    parameter.clearGradient();
    expect(parameter.gradient).toBeNull();
    pass();
    expect([...parameter.gradient!.read()]).toEqual([2, 4]);
    parameter.free();
  });

  it('belong to memory, so a reshape needs no rule', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from([1, 2, 3, 4], [2, 2]));
    const y = squared(tape, scaled(tape, x, 1).reshape([4])).reshape([2, 2]);
    tape.backward(y, [1, 1, 1, 1]);
    expect([...tape.gradient(x)!.read()]).toEqual([2, 4, 6, 8]);
    tape.end();
  });

  it('have the shape of the tensor they are asked for, whatever shape it was used in', () => {
    const run = (shape: number[]) => {
      const tape = new Tape(device);
      const x = tape.watch(tape.from(randomValues(12, 1), [3, 4]));
      const weight = tape.watch(tape.from(randomValues(24, 2), [6, 4]));
      const y = linear(tape, x, weight); // its rule multiplies matrices: a wrong shape reads past the end
      const z = squared(tape, y.reshape(shape));
      tape.backward(z, randomValues(18, 3));
      const gradients = [tape.gradient(x)!, tape.gradient(weight)!].map((gradient) => [...gradient.read()]);
      tape.end();
      return gradients;
    };
    expect(run([3, 2, 3])).toEqual(run([3, 6]));
    const tape = new Tape(device);
    const x = tape.watch(tape.zeros([3, 6]));
    tape.backward(squared(tape, x.reshape([18])), 1);
    expect(tape.gradient(x)!.shape).toEqual([3, 6]);
    tape.end();
  });

  it('of a part of a tensor are refused', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.zeros([4, 2]));
    const y = squared(tape, x.rows(0, 2));
    expect(() => tape.backward(y, 1)).toThrow('rows cannot be differentiated');
    tape.end();
    const other = new Tape(device);
    const sum = add(other, other.watch(other.zeros([4, 2])).rows(2, 4), other.zeros([2, 2]));
    expect(() => other.backward(sum, 1)).toThrow('tensor f32[2, 2] is a part of a larger tensor');
    other.end();
  });

  it('are null where nothing needs or uses them', () => {
    const tape = new Tape(device);
    const [x, constant] = [tape.watch(tape.from([1], [1])), tape.from([1], [1])];
    const unused = squared(tape, x);
    const y = squared(tape, constant);
    expect([tape.tracks(unused), tape.tracks(y)]).toEqual([true, false]);
    expect(tape.gradientTarget(constant)).toBeNull();
    expect(() => tape.backward(y)).toThrow('backward: tensor f32[1] was not recorded on this tape');
    expect([tape.gradient(x), tape.gradient(constant)]).toEqual([null, null]);
    tape.end();
  });

  it('are not recorded for inference', () => {
    const tape = new Tape(device, { record: false });
    const parameter = new Parameter(device, 'w', [1]);
    parameter.value.write([3]);
    const y = squared(tape, parameter.value);
    expect(y.item(0)).toBe(9);
    expect(tape.tracks(y)).toBe(false);
    expect(() => tape.backward(y)).toThrow('this tape does not record');
    expect(parameter.gradient).toBeNull();
    tape.end();
    parameter.free();
  });
});

describe('a gradient passed on', () => {
  it('is shared without a copy, and copied only when one holder adds to it', () => {
    const tape = new Tape(device);
    const [x, r] = [tape.watch(tape.zeros([SIZE])), tape.watch(tape.zeros([SIZE]))];
    const again = scaled(tape, x, 2); // recorded first, so its rule runs last and finds the shared gradient
    const y = add(tape, x, r);
    tape.backward([again, y], [new Float32Array(SIZE).fill(10), new Float32Array(SIZE).fill(1)]);
    expect([tape.gradient(x)!.item(0), tape.gradient(r)!.item(0)]).toEqual([21, 1]);
    expect(tape.gradient(x)!.pointer).not.toBe(tape.gradient(r)!.pointer);
    tape.end();
  });

  it('needs no copy when the branch is done with it before the trunk adds to it', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from(new Float32Array(SIZE).fill(1), [SIZE]));
    const y = add(tape, x, scaled(tape, x, 3));
    device.pool.resetPeak();
    const started = device.pool.bytesInUse + BYTES; // the gradient of y
    tape.backward(y, 1);
    expect(device.pool.peakBytesInUse).toBe(started);
    expect(tape.gradient(x)!.item(0)).toBe(4);
    tape.end();
  });

  it('reaches parameters, and tensors that have a gradient already', () => {
    const parameter = new Parameter(device, 'w', [2]);
    parameter.value.zero();
    const tape = new Tape(device);
    const x = tape.watch(tape.zeros([2]));
    const y = add(tape, add(tape, parameter.value, x), parameter.value);
    tape.backward(
      [y, x],
      [
        [1, 2],
        [10, 10],
      ],
    );
    expect([...parameter.gradient!.read()]).toEqual([2, 4]);
    expect([...tape.gradient(x)!.read()]).toEqual([11, 12]);
    tape.end();
    parameter.free();
  });
});

describe('memory', () => {
  it('of a dropped tensor is free at once when no rule saved it', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.zeros([SIZE]));
    const middle = scaled(tape, x, 2);
    const y = scaled(tape, middle, 2);
    expect(inUse()).toBe(3 * BYTES);
    tape.drop(middle);
    expect(inUse()).toBe(2 * BYTES);
    expect(() => middle.read()).toThrow('tensor f32[1024] was used after its memory was freed by Tape.drop()');
    tape.drop(middle); // twice is harmless
    tape.backward(y, new Float32Array(SIZE).fill(1));
    expect(tape.gradient(x)!.item(0)).toBe(4);
    tape.end();
  });

  it('of a dropped tensor stays until the last rule that saved it has run', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from(new Float32Array(SIZE).fill(3), [SIZE]));
    const middle = scaled(tape, x, 1);
    const [a, b] = [squared(tape, middle), squared(tape, middle)];
    tape.drop(middle);
    expect(middle.item(0)).toBe(3);
    tape.backward([a, b], [1, 1]);
    expect(tape.gradient(x)!.item(0)).toBe(12);
    tape.end();
  });

  it('of activations and gradients shrinks rule by rule', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.zeros([SIZE]));
    const y = squared(tape, squared(tape, squared(tape, squared(tape, x))));
    expect(inUse()).toBe(5 * BYTES);
    device.pool.resetPeak();
    tape.backward(y, 1);
    // x, four activations and two gradients at the last rule, less after every other; in the end x and its gradient.
    expect([device.pool.peakBytesInUse - before, inUse()]).toEqual([7 * BYTES, 2 * BYTES]);
    tape.end();
  });

  it('of a kept tensor belongs to the caller', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from([3], [1]));
    const y = tape.release(squared(tape, x));
    tape.backward(y);
    tape.end();
    expect(y.item(0)).toBe(9);
    y.free();
  });

  it('all goes back at the end, also when backward never ran', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.zeros([SIZE]));
    const y = squared(tape, squared(tape, x));
    expect(inUse()).toBe(3 * BYTES);
    expect(y.size).toBe(SIZE);
    tape.end();
    expect(inUse()).toBe(0);
  });

  it('of inference is freed by drop', () => {
    const tape = new Tape(device, { record: false });
    const x = tape.zeros([SIZE]);
    const y = squared(tape, x);
    tape.drop(x);
    expect(inUse()).toBe(BYTES);
    tape.drop(y);
    expect(inUse()).toBe(0);
    tape.end();
  });
});

describe('checkpoint', () => {
  const run = (depth: number, checkpointed: boolean) => {
    const parameter = new Parameter(device, 'w', [32]);
    parameter.value.write(randomValues(32, 1));
    const tape = new Tape(device);
    const x = tape.watch(tape.from(randomValues(SIZE, 2), [32, 32]));
    const layer = (inner: Tape, input: Tensor) => {
      const normed = rmsnorm(inner, input, parameter.value);
      const branch = squared(inner, scaled(inner, squared(inner, normed), 0.5));
      return add(inner, input, branch);
    };
    device.pool.resetPeak();
    let y: Tensor = x;
    for (let i = 0; i < depth; i++) {
      const input = y;
      y = checkpointed ? tape.checkpoint([input], (inner) => layer(inner, input)) : layer(tape, input);
    }
    const output = y.readBytes();
    tape.backward(y, randomValues(SIZE, 3));
    const result = {
      output,
      dx: tape.gradient(x)!.readBytes(),
      dWeight: parameter.gradient!.readBytes(),
      peak: device.pool.peakBytesInUse - before,
    };
    tape.end();
    parameter.free();
    return result;
  };

  it('gives bitwise the same result and gradients', () => {
    const [plain, again] = [run(6, false), run(6, true)];
    for (const key of ['output', 'dx', 'dWeight'] as const) expect(Buffer.compare(plain[key], again[key])).toBe(0);
  });

  it('needs less memory, one activation a layer', () => {
    const [plain, again, deeper] = [run(6, false), run(6, true), run(7, true)];
    expect(again.peak).toBeLessThan(plain.peak * 0.7);
    expect(deeper.peak - again.peak).toBe(BYTES);
  });

  it('works inside a checkpoint', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from([2], [1]));
    const y = tape.checkpoint([x], (outer) => {
      const doubled = scaled(outer, x, 2);
      return outer.checkpoint([doubled], (inner) => squared(inner, doubled));
    });
    expect(y.item(0)).toBe(16);
    tape.backward(y);
    expect(tape.gradient(x)!.item(0)).toBe(16); // of 4x²
    tape.end();
  });

  it('computes what is wanted once in its first run, and holds it until the second has used it', () => {
    let computed = 0;
    const expensive = (inner: Tape, x: Tensor) => {
      const { factor } = inner.once(() => {
        computed += 1;
        return { factor: inner.from(new Float32Array(x.size).fill(3), x.shape) };
      });
      const y = inner.from(
        x.read().map((value, i) => value * factor.item(i)),
        x.shape,
      );
      inner.record([x], [y], [factor], () => write(inner, x, (i) => inner.gradient(y)!.item(i) * factor.item(i)));
      inner.drop(factor);
      return y;
    };
    const run = (tape: Tape) => {
      computed = 0;
      const x = tape.watch(tape.from(new Float32Array(SIZE).fill(2), [SIZE]));
      const y = tape.checkpoint([x], (inner) => squared(inner, expensive(inner, expensive(inner, x))));
      expect(y.item(0)).toBe(324);
      return { x, y };
    };
    const tape = new Tape(device);
    const { x, y } = run(tape);
    expect(inUse()).toBe(4 * BYTES); // input, output, and two factors
    tape.backward(y, new Float32Array(SIZE).fill(1));
    expect(tape.gradient(x)!.item(0)).toBe(324); // of 81x²
    expect([computed, inUse()]).toEqual([2, 2 * BYTES]); // x and its gradient
    tape.end();
    // Without gradients nothing is held; where the backward pass never runs all goes back at the end.
    const inference = new Tape(device, { record: false });
    run(inference);
    expect(inUse()).toBe(2 * BYTES);
    inference.end();
    const unused = new Tape(device);
    run(unused);
    unused.end();
  });

  it('keeps nothing for inference', () => {
    const tape = new Tape(device, { record: false });
    const x = tape.from(new Float32Array(SIZE).fill(2), [SIZE]);
    const y = tape.checkpoint([x], (inner) => squared(inner, squared(inner, x)));
    expect([y.item(0), inUse()]).toEqual([16, 2 * BYTES]);
    tape.end();
  });
});

describe('a finished gradient', () => {
  const told: string[] = [];
  function parameter(name: string): Parameter {
    const one = new Parameter(device, name, [2]);
    one.value.write([1, 2]);
    one.onGradient = () => void told.push(`${name} ${one.gradient ? [...one.gradient.read()].join() : 'none'}`);
    return one;
  }
  beforeEach(() => {
    told.length = 0;
  });

  it('is told when the last use of a parameter was passed, with its whole sum', () => {
    const [a, b] = [parameter('a'), parameter('b')];
    const tape = new Tape(device);
    const x = scaled(tape, a.value, 3);
    const y = squared(tape, b.value);
    const z = scaled(tape, a.value, 5);
    const both = add(tape, add(tape, x, y), z);
    tape.backward(both, [1, 1]);
    tape.end();
    expect(told).toEqual(['b 2,4', 'a 8,8']);
    for (const one of [a, b]) one.free();
  });

  it('is told once for parameters inside and outside of checkpointed blocks, nested ones too', () => {
    const [a, b, c] = [parameter('a'), parameter('b'), parameter('c')];
    const tape = new Tape(device);
    const first = scaled(tape, a.value, 2);
    const block = tape.checkpoint([first], (inner) => {
      const deep = inner.checkpoint([first], (innermost) => add(innermost, scaled(innermost, b.value, 3), first));
      return add(inner, deep, add(inner, squared(inner, c.value), scaled(inner, b.value, 1)));
    });
    const last = add(tape, block, scaled(tape, c.value, 10));
    tape.backward(last, [1, 1]);
    tape.end();
    expect(told).toEqual(['c 12,14', 'b 4,4', 'a 2,2']);
    for (const one of [a, b, c]) one.free();
  });

  it('is told also of a parameter that the loss does not depend on', () => {
    const [a, b, c] = [parameter('a'), parameter('b'), parameter('c')];
    const tape = new Tape(device);
    const used = scaled(tape, a.value, 2);
    scaled(tape, b.value, 2);
    tape.checkpoint([used], (inner) => add(inner, scaled(inner, c.value, 2), used));
    tape.backward(used, [1, 1]);
    tape.end();
    expect(told).toEqual(['c none', 'b none', 'a 2,2']);
    for (const one of [a, b, c]) one.free();
  });
});

describe('misuse is refused with an error that names it', () => {
  it('leaves a scalar loss readable after backward, until the end', () => {
    const tape = new Tape(device);
    const loss = squared(tape, tape.watch(tape.from([3], [1])));
    tape.backward(loss);
    expect(loss.item()).toBe(9);
    tape.end();
    expect(() => loss.item()).toThrow('tensor f32[1] was used after its memory was freed by Tape.end()');
  });

  it('says what backward has freed', () => {
    const tape = new Tape(device);
    const x = tape.watch(tape.from([1, 2], [2]));
    const y = squared(tape, x);
    tape.backward(y, 1);
    expect(() => y.read()).toThrow('tensor f32[2] was used after its memory was freed by Tape.backward()');
    tape.end();
  });

  it('names the parameter that was freed', () => {
    const parameter = new Parameter(device, 'blocks.0.up', [2, 3]);
    const { value } = parameter;
    parameter.free();
    expect(() => value.read()).toThrow('parameter blocks.0.up f32[2, 3] was used after its memory was freed by free()');
  });

  it.each<[string, (tape: Tape, y: Tensor) => void, string]>([
    [
      'a second backward',
      (tape, y) => {
        tape.backward(y, 1);
        tape.backward(y, 1);
      },
      'has already run on this tape',
    ],
    ['a vector without a gradient', (tape, y) => tape.backward(y), 'tensor f32[2] is not a scalar'],
    ['outputs and gradients in different numbers', (tape, y) => tape.backward([y], [1, 2]), '1 outputs need as many'],
    ['an output given twice', (tape, y) => tape.backward([y, y], [1, 1]), 'tensor f32[2] was given twice'],
    ['a gradient of another size', (tape, y) => tape.backward(y, [1, 2, 3]), '3 values do not fill'],
    [
      'a gradient tensor of another size',
      (tape, y) => tape.backward(y, tape.zeros([3])),
      'cannot copy f32[3] to f32[2]',
    ],
  ])('%s', (_, misuse, message) => {
    const tape = new Tape(device);
    const y = squared(tape, tape.watch(tape.from([1, 2], [2])));
    expect(() => misuse(tape, y)).toThrow(UsageError);
    const again = new Tape(device);
    const z = squared(again, again.watch(again.from([1, 2], [2])));
    expect(() => misuse(again, z)).toThrow(message);
    tape.end();
    again.end();
  });

  it('an output of another tape', () => {
    const [tape, other] = [new Tape(device), new Tape(device)];
    const y = squared(other, other.watch(other.from([1], [1])));
    squared(tape, tape.watch(tape.from([1], [1])));
    expect(() => tape.backward(y)).toThrow('tensor f32[1] was not recorded on this tape: it comes from another tape');
    tape.end();
    other.end();
  });

  it('an operation or a backward pass on a tape that has ended', () => {
    const tape = new Tape(device);
    const x = Tensor.zeros(device, [1, 1]);
    tape.end();
    tape.end(); // a second end is a no-op
    for (const use of [() => linear(tape, x, x), () => tape.zeros([1]), () => tape.watch(x), () => tape.backward(x)])
      expect(use).toThrow('this tape has ended: use a new Tape for each pass');
    x.free();
  });

  it('a tensor of another device', () => {
    const other = new CpuDevice({ threads: 1 });
    const [tape, weight] = [new Tape(device), Tensor.zeros(other, [2, 2])];
    const x = tape.zeros([2, 2]);
    expect(() => linear(tape, x, weight)).toThrow(/linear_forward: tensor f32\[2, 2\] is on another device \(cpu: /);
    expect(() => x.copyFrom(weight)).toThrow('copyFrom: tensor f32[2, 2] is on another device');
    tape.end();
    weight.free();
  });
});

describe('withTape and using', () => {
  it('end the tape when the body returns, throws, or its promise settles', async () => {
    expect(withTape(device, (tape) => squared(tape, tape.from([3], [1])).item())).toBe(9);
    const failing = () =>
      withTape(device, (tape) => {
        tape.zeros([SIZE]);
        throw new Error('in the body');
      });
    expect(failing).toThrow('in the body');
    expect(inUse()).toBe(0);
    const value = withTape(device, async (tape) => {
      const x = tape.from([4], [1]);
      await Promise.resolve();
      return x.item(0);
    });
    expect(await value).toBe(4);
    expect(inUse()).toBe(0);
  });

  it('passes options on', () => {
    expect(withTape(device, ({ recording }) => recording, { record: false })).toBe(false);
  });

  it('frees what a block declares', () => {
    {
      using tape = new Tape(device);
      using tensor = Tensor.zeros(device, [SIZE]);
      using parameter = new Parameter(device, 'w', [SIZE]);
      using freed = Tensor.zeros(device, [SIZE]);
      freed.free(); // by hand before the end of the block
      expect([squared(tape, tensor).size, parameter.value.size]).toEqual([SIZE, SIZE]);
    }
    expect(inUse()).toBe(0);
  });
});

describe('a leak', () => {
  it('is reported with the place that allocated it', () => {
    device.pool.trace();
    const forgotten = Tensor.zeros(device, [SIZE]);
    const report = leakReport(device.pool.allocations);
    forgotten.free();
    expect(report).toMatch(/^4096 bytes were not freed, allocated\nat .*tape\.test\.ts:\d+:\d+/);
    expect(device.pool.allocations).toEqual([]);
  });
});
