import { expect, test } from 'vitest';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../tensor/bfloat16.js';
import fc from '../testing/properties.js';
import { type SafeDtype, tensorBytes, toFloat64 } from './safetensors-format.js';

function bytesOf(array: ArrayBufferView): Uint8Array {
  return new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
}

test('every dtype reads as the numbers it holds, at any alignment', () => {
  const cases: [SafeDtype, ArrayBufferView, number[]][] = [
    ['F64', new Float64Array([1.1, -2]), [1.1, -2]],
    ['F32', new Float32Array([0.5, -2]), [0.5, -2]],
    ['BF16', new Uint16Array([0x3f80, 0xc000, 0x7f80]), [1, -2, Number.POSITIVE_INFINITY]],
    ['F16', new Uint16Array([0x3c00, 0xc000, 0x0001, 0xfc00, 0x7bff]), [1, -2, 2 ** -24, -Infinity, 65504]],
    ['I64', new BigInt64Array([-3n, 5n]), [-3, 5]],
    ['U64', new BigUint64Array([3n]), [3]],
    ['I32', new Int32Array([-7]), [-7]],
    ['U32', new Uint32Array([0xffffffff]), [0xffffffff]],
    ['I16', new Int16Array([-300]), [-300]],
    ['U16', new Uint16Array([65535]), [65535]],
    ['I8', new Int8Array([-128]), [-128]],
    ['U8', new Uint8Array([255]), [255]],
    ['BOOL', new Uint8Array([0, 1]), [0, 1]],
  ];
  for (const [dtype, array, expected] of cases) {
    const shifted = new Uint8Array(array.byteLength + 1);
    shifted.set(bytesOf(array), 1);
    expect([...toFloat64({ dtype, shape: [expected.length], data: shifted.subarray(1) })], dtype).toEqual(expected);
  }
});

test('F16 NaN is NaN', () => {
  expect(toFloat64({ dtype: 'F16', shape: [1], data: new Uint8Array([0x01, 0x7c]) })[0]).toBeNaN();
});

test('bf16 survives the way to float32 and back', () => {
  const all = Uint16Array.from({ length: 65536 }, (_, i) => i);
  const isSignallingNan = (bits: number): boolean => (bits & 0x7fff) > 0x7f80 && (bits & 0x40) === 0;
  expect(float32ToBfloat16(bfloat16ToFloat32(all))).toEqual(
    all.map((bits) => (isSignallingNan(bits) ? bits | 0x40 : bits)),
  );
});

test('float32 to bf16 takes the nearest value, and the even one of two', () => {
  const tie = new Float32Array([1 + 2 ** -8, 1 + 3 * 2 ** -8]);
  expect([...bfloat16ToFloat32(float32ToBfloat16(tie))]).toEqual([1, 1 + 2 ** -6]);
  fc.assert(
    fc.property(fc.float({ noNaN: true, min: Math.fround(-1e30), max: Math.fround(1e30) }), (value) => {
      const rounded = bfloat16ToFloat32(float32ToBfloat16(new Float32Array([value])))[0];
      expect(Math.abs(rounded - value)).toBeLessThanOrEqual(Math.max(Math.abs(value) * 2 ** -8, 2 ** -134));
    }),
  );
});

test('sizes beyond the exact integers are no sizes', () => {
  expect(tensorBytes('F32', [2, 3])).toBe(24);
  expect(tensorBytes('F64', [])).toBe(8);
  expect(tensorBytes('F32', [0, 5])).toBe(0);
  expect(tensorBytes('F32', [2 ** 51, 2 ** 51])).toBeUndefined();
  expect(tensorBytes('F32', [-1])).toBeUndefined();
  expect(tensorBytes('F32', [1.5])).toBeUndefined();
  expect(tensorBytes('F32', ['2'])).toBeUndefined();
});
