import { afterEach, describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { devices } from '../testing/devices.js';
import fc from '../testing/properties.js';
import { bfloat16ToFloat32, float32ToBfloat16 } from './bfloat16.js';
import { DTYPE_BYTES, type Dtype, elements, Tensor } from './tensor.js';

const float32 = fc.float({ noNaN: true });

describe('bfloat16 on the host', () => {
  it('is the nearest bfloat16 of every float32', () => {
    fc.assert(
      fc.property(float32, (value) => {
        const [half] = float32ToBfloat16([value]);
        const [chosen] = bfloat16ToFloat32(Uint16Array.of(half));
        if (!Number.isFinite(chosen)) return Math.abs(value) > 3.3895e38 && Math.sign(chosen) === Math.sign(value);
        const neighbours = [half - 1, half + 1].filter((h) => (h & 0x7fff) <= 0x7f80 && h >= 0 && h <= 0xffff);
        const distances = bfloat16ToFloat32(Uint16Array.from(neighbours)).map((near) => Math.abs(near - value));
        return distances.every((distance) => Math.abs(chosen - value) <= distance);
      }),
      { numRuns: 2000 },
    );
  });

  it('keeps NaN, infinities and the sign of zero', () => {
    const values = [Number.NaN, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY, -0, 0];
    expect([...bfloat16ToFloat32(float32ToBfloat16(values))]).toEqual(values);
  });
});

describe.each(devices())('Tensor on $name', ({ device }) => {
  const made: Tensor[] = [];
  const own = <T extends Tensor>(tensor: T): T => {
    made.push(tensor);
    return tensor;
  };
  afterEach(() => {
    for (const tensor of made.splice(0)) tensor.free();
    expect(device().pool.bytesInUse).toBe(0);
  });

  it.each<[Dtype, number[]]>([
    ['f32', [1.5, -0, 3e38, Number.NaN, Number.NEGATIVE_INFINITY]],
    ['f64', [1 / 3, -1e300, Number.NaN]],
    ['i32', [0, -(2 ** 31), 2 ** 31 - 1]],
    ['bf16', [1, -2.5, 0.15625, Number.POSITIVE_INFINITY]],
  ])('reads back the %s values it was given', (dtype, values) => {
    const tensor = own(Tensor.from(device(), values, [values.length], dtype));
    expect([...tensor.read()]).toEqual(values.map((value) => (dtype === 'f32' ? Math.fround(value) : value)));
    expect(tensor.bytes).toBe(values.length * DTYPE_BYTES[dtype]);
    expect(tensor.item(1)).toBe(tensor.read()[1]);
    const copy = own(Tensor.empty(device(), [values.length], dtype));
    copy.writeBytes(tensor.readBytes());
    expect([...copy.read()]).toEqual([...tensor.read()]);
  });

  it('holds addresses of its device', () => {
    const page = own(Tensor.from(device(), [5, 6], [2]));
    using table = Tensor.empty(device(), [3], 'address');
    table.write([page.pointer, 0n, page.rows(1, 2).pointer]);
    expect(table.toString()).toBe('tensor address[3]');
    expect(table.read()[2] - table.read()[0]).toBe(4n);
    const copy = own(Tensor.zeros(device(), [2]));
    device().copy(copy.pointer, table.read()[0], copy.bytes);
    expect([...copy.read()]).toEqual([5, 6]);
  });

  it('item() without an index is for a tensor of one element', () => {
    expect(own(Tensor.from(device(), [7], [1, 1])).item()).toBe(7);
    const two = own(Tensor.from(device(), [1, 2], [1, 2]));
    expect(() => two.item()).toThrow(UsageError);
    expect(() => two.item()).toThrow('item() reads one element, but the shape is [1, 2]: give an index, or use read()');
  });

  it('rounds to bfloat16 once: writing what was read changes nothing', () => {
    fc.assert(
      fc.property(fc.array(fc.float(), { maxLength: 50 }), (values) => {
        const tensor = Tensor.from(device(), values, [values.length], 'bf16');
        const once = tensor.read();
        const bytes = tensor.readBytes();
        tensor.write(once);
        const same = Buffer.compare(tensor.readBytes(), bytes) === 0;
        tensor.free();
        return same && values.every((value, i) => Object.is(Number.isNaN(value), Number.isNaN(once[i])));
      }),
    );
  });

  it.each([[[]], [[0]], [[3, 0, 2]], [[2, 3, 4]]])('has the size of its shape %j', (shape) => {
    const tensor = own(Tensor.zeros(device(), shape));
    expect(tensor.size).toBe(elements(shape));
    expect([...tensor.read()]).toEqual(new Array(elements(shape)).fill(0));
  });

  it.each([[[-1]], [[1.5]], [[2, Number.NaN]], [[2 ** 60]]])('refuses the shape %j', (shape) => {
    expect(() => Tensor.empty(device(), shape)).toThrow(UsageError);
  });

  it('refuses an unknown dtype by name, and leaves the accounting of the pool a number', () => {
    const dtype = 'float32' as 'f32'; // as a JavaScript program may write it
    expect(() => Tensor.from(device(), [1], [1], dtype)).toThrow('unknown dtype float32: use f32, bf16, i32, f64');
    expect(() => Tensor.zeros(device(), [1], dtype)).toThrow(UsageError);
    expect(device().pool.bytesInUse).toBeGreaterThanOrEqual(0);
  });

  it('reads the typed array of its dtype, without casts', () => {
    const floats: Float32Array = own(Tensor.from(device(), [1.5], [1])).read();
    const halves: Float32Array = own(Tensor.from(device(), [1.5], [1], 'bf16')).read();
    const integers: Int32Array = own(Tensor.from(device(), [1], [1], 'i32')).read();
    const doubles: Float64Array = own(Tensor.from(device(), [1.5], [1], 'f64')).read();
    expect([floats, halves, integers, doubles].map((values) => values.constructor.name)).toEqual([
      'Float32Array',
      'Float32Array',
      'Int32Array',
      'Float64Array',
    ]);
  });

  it('refuses values that do not fill it, and gives its memory back', () => {
    expect(() => Tensor.from(device(), [1, 2], [3])).toThrow('2 values do not fill a tensor of shape [3]');
    const tensor = own(Tensor.zeros(device(), [3]));
    expect(() => tensor.writeBytes(new Uint8Array(11))).toThrow('11 bytes do not fill a tensor of 12 bytes');
  });

  it('reshapes on the same memory', () => {
    const tensor = own(Tensor.from(device(), [1, 2, 3, 4, 5, 6], [2, 3]));
    const view = tensor.reshape([3, 2]);
    view.write([6, 5, 4, 3, 2, 1]);
    expect(view.shape).toEqual([3, 2]);
    expect([...tensor.read()]).toEqual([6, 5, 4, 3, 2, 1]);
    expect(() => tensor.reshape([4])).toThrow('cannot reshape [2, 3] to [4]: the sizes differ');
  });

  it('shows rows on the same memory, also of rows', () => {
    const tensor = own(Tensor.from(device(), [0, 1, 2, 3, 4, 5, 6, 7], [4, 2]));
    const middle = tensor.rows(1, 4);
    expect([...middle.read()]).toEqual([2, 3, 4, 5, 6, 7]);
    const last = middle.rows(2, 3);
    expect([...last.read()]).toEqual([6, 7]);
    last.zero();
    expect([...tensor.read()]).toEqual([0, 1, 2, 3, 4, 5, 0, 0]);
    expect(middle.item(1)).toBe(3);
    expect(tensor.rows(2, 2).size).toBe(0);
    for (const [from, to] of [
      [-1, 2],
      [3, 2],
      [0, 5],
    ])
      expect(() => tensor.rows(from, to)).toThrow(`rows ${from} to ${to} are not inside a tensor of 4 rows`);
  });

  it('shows rows of every dtype at the right bytes', () => {
    for (const dtype of ['f32', 'bf16', 'i32', 'f64'] as const) {
      const tensor = own(Tensor.from(device(), [1, 2, 3, 4, 5, 6], [3, 2], dtype));
      expect([...tensor.rows(1, 2).read()]).toEqual([3, 4]);
    }
  });

  it('copies from a tensor of the same size and type', () => {
    const from = own(Tensor.from(device(), [1, 2, 3, 4], [2, 2]));
    const into = own(Tensor.zeros(device(), [4]));
    into.copyFrom(from);
    expect([...into.read()]).toEqual([1, 2, 3, 4]);
    expect(() => own(Tensor.zeros(device(), [4], 'i32')).copyFrom(from)).toThrow('cannot copy f32[2, 2] to i32[4]');
    expect(() => into.rows(0, 2).copyFrom(from)).toThrow('cannot copy f32[2, 2] to f32[2]');
  });

  it('has parts with a storage of their own, which are freed with the whole', () => {
    const whole = own(Tensor.from(device(), [1, 2, 3, 4, 5, 6], [3, 2]));
    const part = whole.rows(1, 3).withOwnStorage();
    expect([...part.read()]).toEqual([3, 4, 5, 6]);
    expect([part.storage === whole.storage, part.storage.bytes, part.bytes]).toEqual([false, 16, 16]);
    part.rows(1, 2).write([7, 8]);
    expect([...whole.read()]).toEqual([1, 2, 3, 4, 7, 8]);
    const used = device().pool.bytesInUse;
    const other = whole.rows(0, 1).withOwnStorage();
    other.free();
    expect(device().pool.bytesInUse).toBe(used);
    expect(() => other.read()).toThrow('after its memory was freed');
    const gone = Tensor.zeros(device(), [2]);
    const rest = gone.withOwnStorage();
    gone.free();
    expect(() => rest.read()).toThrow('after its memory was freed');
  });

  it('throws when used or freed after it was freed, and so do its views', () => {
    const tensor = Tensor.zeros(device(), [2]);
    const view = tensor.reshape([1, 2]);
    tensor.free();
    expect(tensor.storage.isFreed).toBe(true);
    for (const use of [() => tensor.read(), () => view.read(), () => tensor.write([1, 2]), () => tensor.pointer])
      expect(use).toThrow('was used after its memory was freed by free()');
    expect(() => tensor.free()).toThrow('tensor f32[2] was freed twice: by free(), then by free()');
  });
});
