import { describe, expect, it } from 'vitest';
import { bfloat16ToFloat32, float32ToBfloat16 } from '../../tensor/bfloat16.js';
import { Tensor } from '../../tensor/tensor.js';
import { devices } from '../../testing/devices.js';
import { castInto } from './op.js';

const halvesOf = (tensor: Tensor) => new Uint16Array(tensor.readBytes().buffer);

describe.each(devices())('cast on $name', ({ device }) => {
  /** The bits that the device makes of these float32 bits. */
  const narrowed = (bits: Uint32Array) => {
    const from = Tensor.from(device(), new Float32Array(bits.buffer), [bits.length]);
    const into = Tensor.empty(device(), [bits.length], 'bf16');
    castInto(device(), from, into);
    const halves = halvesOf(into);
    from.free();
    into.free();
    return halves;
  };

  it('rounds every upper half with every kind of lower half as the host does', () => {
    const lows = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    const bits = new Uint32Array(2 ** 16 * lows.length);
    for (let i = 0; i < bits.length; i++) bits[i] = (Math.floor(i / lows.length) << 16) | lows[i % lows.length];
    const expected = float32ToBfloat16(new Float32Array(bits.buffer));
    expect(Buffer.compare(Buffer.from(narrowed(bits).buffer), Buffer.from(expected.buffer))).toBe(0);
  });

  it('rounds ties to even, overflows to infinity and keeps NaN', () => {
    const cases: [number, number][] = [
      [0x3f808000, 0x3f80], // halfway, to even below
      [0x3f818000, 0x3f82], // halfway, to even above
      [0x7f7fffff, 0x7f80], // the largest float32 is nearer to infinity
      [0xff800000, 0xff80], // -infinity
      [0x7f800001, 0x7fc0], // NaN whose mark is in the lower half
      [0x80000000, 0x8000], // -0
      [0x00000001, 0x0000],
    ];
    const halves = narrowed(Uint32Array.from(cases, ([bits]) => bits));
    expect([...halves]).toEqual(cases.map(([, half]) => half));
  });

  it('widens every bfloat16 exactly and back', () => {
    const all = Uint16Array.from({ length: 2 ** 16 }, (_, i) => i);
    const from = Tensor.empty(device(), [2 ** 16], 'bf16');
    const wide = Tensor.empty(device(), [256, 256]);
    from.writeBytes(new Uint8Array(all.buffer));
    castInto(device(), from, wide);
    expect(Buffer.compare(wide.readBytes(), new Uint8Array(bfloat16ToFloat32(all).buffer))).toBe(0);
    castInto(device(), wide, from);
    const quiet = all.map((half) => ((half & 0x7fff) > 0x7f80 ? half | 0x40 : half));
    expect(Buffer.compare(from.readBytes(), new Uint8Array(quiet.buffer))).toBe(0);
    from.free();
    wide.free();
  });

  it.each([0, 1, 7, 33])('writes %i numbers and not one more', (count) => {
    const from = Tensor.from(device(), new Float32Array(count).fill(2), [count]);
    const into = Tensor.zeros(device(), [count + 1], 'bf16');
    castInto(device(), from, into.rows(0, count));
    expect([...into.read()]).toEqual([...new Array(count).fill(2), 0]);
    from.free();
    into.free();
  });

  it('names what it cannot cast', () => {
    const [f32, i32, bf16] = (['f32', 'i32', 'bf16'] as const).map((dtype) => Tensor.zeros(device(), [3], dtype));
    expect(() => castInto(device(), f32, i32)).toThrow('cast: there is no cast from f32 to i32');
    expect(() => castInto(device(), f32, bf16.rows(0, 2))).toThrow('cast: [3] does not fill [2]');
    for (const tensor of [f32, i32, bf16]) tensor.free();
    expect(device().pool.bytesInUse).toBe(0);
  });
});
