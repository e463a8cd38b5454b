import { describe, expect, it } from 'vitest';
import { Tensor } from '../../tensor/tensor.js';
import { cpu, devices } from '../../testing/devices.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { randomNumbers } from '../../testing/random.js';
import { checksums } from './op.js';
import { checksumReference } from './reference.js';

const gpu = new EmulatedCuda();
const emulated = { name: 'emulated GPU', device: () => gpu };

function randomBytes(count: number): Uint8Array {
  const next = randomNumbers(count + 1);
  return Uint8Array.from({ length: count }, () => Math.floor(next() * 256));
}

describe.each([...devices(), emulated])('checksum on $name', ({ device }) => {
  const of = (bytes: Uint8Array) => {
    const tensor = Tensor.empty(device(), [bytes.length / 2], 'bf16');
    tensor.writeBytes(bytes);
    const [sum] = checksums(tensor.device, [tensor]);
    tensor.free();
    return sum;
  };

  it.each([0, 2, 6, 8, 10, 4096, 100_002])('of %i bytes equals the reference', (count) => {
    const bytes = randomBytes(count);
    expect(of(bytes)).toBe(checksumReference(bytes));
  });

  it('changes with every bit, with the order of words and with zeros at the end', () => {
    const bytes = randomBytes(64);
    const sums = new Set([of(bytes)]);
    for (let bit = 0; bit < 512; bit++) {
      const other = bytes.slice();
      other[bit >> 3] ^= 1 << (bit & 7);
      sums.add(of(other));
    }
    expect(sums.size).toBe(513);
    sums.add(of(Uint8Array.from([...bytes.subarray(8, 16), ...bytes.subarray(0, 8), ...bytes.subarray(16)])));
    sums.add(of(Uint8Array.from([...bytes, 0, 0])));
    expect(sums.size).toBe(515);
  });
});

it('sums several tensors at once', () => {
  const tensors = [randomBytes(40), randomBytes(400_000), randomBytes(6)].map((bytes) => {
    const tensor = Tensor.empty(cpu(), [bytes.length / 2], 'bf16');
    tensor.writeBytes(bytes);
    return tensor;
  });
  expect(checksums(cpu(), tensors)).toEqual(tensors.map((tensor) => checksumReference(tensor.readBytes())));
  expect(() => checksums(cpu(), [tensors[1].rows(1, 5)])).toThrow('not aligned');
  for (const tensor of tensors) tensor.free();
});
