import { describe, expect, it } from 'vitest';
import { cudaAbsence } from '../../device/cuda/cuda.js';
import type { Device } from '../../device/device.js';
import { Tape } from '../../tensor/tape.js';
import { Tensor } from '../../tensor/tensor.js';
import { cuda, reportNoGpu, rounded } from '../../testing/devices.js';
import { EmulatedCuda } from '../../testing/emulated-cuda.js';
import { randomValues, relativeError } from '../../testing/numbers.js';
import { RecordingCuda } from '../../testing/recording-cuda.js';
import { fp8Refusal } from '../linear/fp8.js';
import { quantised, roundToFp8 } from '../linear/fp8-reference.js';
import { linearBackward, linearForward } from '../linear/reference.js';
import { Fp8Head, headPays } from './fp8.js';
import { IGNORED, linearCrossEntropy } from './op.js';
import { crossEntropyBackward, crossEntropyForward } from './reference.js';

const absence = cudaAbsence() ?? fp8Refusal(cuda());
const GPU = absence === null ? [{ name: 'cuda', device: cuda as () => Device }] : [];
if (absence !== null) reportNoGpu(absence);
const emulated = new EmulatedCuda();

const bf16 = (count: number, seed: number, scale: number) =>
  rounded(
    randomValues(count, seed).map((value) => value * scale),
    'bf16',
  );

describe.each([{ name: 'the emulator', device: (): Device => emulated }, ...GPU])('FP8 on $name', ({ device }) => {
  it('gives the losses, and gradients of logits rounded to e5m2', () => {
    const [rows, vocab, dim] = [48, 160, 32];
    const [logits, x, w] = [bf16(rows * vocab, 1, 9), bf16(rows * dim, 2, 1), bf16(vocab * dim, 3, 0.1)];
    const targets = Int32Array.from({ length: rows }, (_, i) => (i % 7 === 3 ? IGNORED : (i * 37) % vocab));
    const counted = targets.filter((target) => target !== IGNORED).length;
    const before = device().pool.bytesInUse;
    const tape = new Tape(device());
    const weight = tape.from(w, [vocab, dim], 'bf16');
    const head = new Fp8Head(tape, weight, rows);
    const tLogits = tape.from(logits, [rows, vocab], 'bf16');
    expect(head.fits(tLogits)).toBe(true);
    const [losses, dx] = [tape.empty([rows]), tape.empty([rows, dim], 'bf16')];
    const dw = tape.from(new Float64Array(vocab * dim).fill(1e-3), [vocab, dim]);
    const inverseCount = tape.from([1 / counted], [1]);
    const chunk = { logits: tLogits, targets: tape.from(targets, [rows], 'i32'), inverseCount, losses };
    const computed = tape.empty([rows, vocab], 'bf16');
    const x8 = head.forward(tape.from(x, [rows, dim], 'bf16'), computed);
    const rounded8 = [x, w].map((values) => quantised(values, 'e4m3'));
    expect(relativeError(computed.read(), linearForward(rounded8[0], rounded8[1], rows, vocab, dim))).toBeLessThan(
      3e-3,
    );
    head.backward(chunk, x8, dx, { gradient: dw, accumulate: true });

    expect(relativeError(losses.read(), crossEntropyForward(logits, targets, vocab).losses)).toBeLessThan(2e-5);
    const one = 2 ** 15;
    const slopes = crossEntropyBackward(logits, targets, vocab, 1);
    const codes = slopes.map((slope) => roundToFp8(slope * counted * one, 'e5m2') / (counted * one));
    const expected = linearBackward(quantised(x, 'e4m3'), quantised(w, 'e4m3'), codes, rows, vocab, dim);
    // Exponentials of the GPU are approximate: a few codes are rounded to the other side.
    expect(relativeError(dx.read(), expected.dx)).toBeLessThan(5e-3);
    expect(
      relativeError(
        dw.read(),
        expected.dw.map((value) => value + 1e-3),
      ),
    ).toBeLessThan(5e-3);
    head.free();
    tape.end();
    expect(device().pool.bytesInUse).toBe(before);
  });

  it('shows a target outside the vocabulary and a logit that is not finite', () => {
    const [rows, vocab, dim] = [16, 32, 16];
    for (const [target, logit] of [
      [99, 1],
      [3, Number.POSITIVE_INFINITY],
    ]) {
      const tape = new Tape(device());
      const weight = tape.from(bf16(vocab * dim, 1, 1), [vocab, dim], 'bf16');
      const logits = bf16(rows * vocab, 2, 1);
      logits[5 * vocab + 3] = logit;
      const targets = new Int32Array(rows).fill(1);
      targets[5] = target;
      const head = new Fp8Head(tape, weight, rows);
      const [losses, dx, dw] = [tape.empty([rows]), tape.empty([rows, dim], 'bf16'), tape.empty([vocab, dim])];
      const chunk = { logits: tape.from(logits, [rows, vocab], 'bf16'), targets: tape.from(targets, [rows], 'i32') };
      const x = tape.from(bf16(rows * dim, 3, 1), [rows, dim], 'bf16');
      const rest = { inverseCount: tape.from([1 / rows], [1]), losses };
      const x8 = head.forward(x, tape.empty([rows, vocab], 'bf16'));
      head.backward({ ...chunk, ...rest }, x8, dx, { gradient: dw, accumulate: false });
      expect(losses.item(5)).toBeNaN();
      expect(dx.item(5 * dim)).toBeNaN();
      expect(dx.item(0)).not.toBeNaN();
      expect(dw.item(0)).toBeNaN();
      head.free();
      tape.end();
    }
  });
});

describe.each(GPU)('linearCrossEntropy on $name', ({ device }) => {
  it('differs from bf16 by the rounding to FP8', () => {
    const [tokens, vocab, dim] = [4096, 8192, 768];
    const [x, w] = [bf16(tokens * dim, 1, 2), bf16(vocab * dim, 2, 0.05)];
    const targets = Int32Array.from({ length: tokens }, (_, i) => (i * 7919) % vocab);
    const [exact, fp8] = [false, true].map((on) => {
      const tape = new Tape(device(), { fp8: on });
      const tx = tape.watch(tape.from(x, [tokens, dim], 'bf16'));
      const tw = tape.watch(tape.from(w, [vocab, dim], 'bf16'));
      const loss = linearCrossEntropy(tape, tx, tw, tape.from(targets, [tokens], 'i32'), { chunk: 2048 });
      tape.backward(loss);
      const result = { loss: loss.item(), dx: tape.gradient(tx)!.read(), dw: tape.gradient(tw)!.read() };
      tape.end();
      return result;
    });
    expect(Math.abs(fp8.loss - exact.loss)).toBeLessThan(0.02); // logits of size 2.8 are 0.1 off, the loss half the square
    for (const of of ['dx', 'dw'] as const) {
      expect(relativeError(fp8[of], exact[of])).toBeLessThan(0.08);
      expect(relativeError(fp8[of], exact[of])).toBeGreaterThan(1e-3); // FP8 was used
    }
  });
});

it('takes the loss of a model of GPT-2 size, chunk by chunk', () => {
  expect(headPays(16_384, 50_304, 768)).toBe(true);
  expect(headPays(16_384, 256, 768)).toBe(false);
  expect(headPays(512, 50_304, 768)).toBe(false);
  const kinds = [true, false].map((fp8) => {
    const device = new RecordingCuda(() => 0);
    const tape = new Tape(device, { fp8 });
    const x = tape.watch(tape.empty([65_536, 768], 'bf16'));
    const weight = tape.watch(tape.empty([50_304, 768], 'bf16'));
    linearCrossEntropy(tape, x, weight, Tensor.zeros(device, [65_536], 'i32'));
    tape.end();
    return device.launches.map(({ kernel }) => kernel).filter((kernel) => kernel.startsWith('crossentropy_'));
  });
  const chunks = (kernel: string) => new Array(4).fill(kernel);
  expect(kinds[0]).toEqual(['crossentropy_count', ...chunks('crossentropy_codes'), 'crossentropy_mean']);
  expect(kinds[1]).toEqual(['crossentropy_count', ...chunks('crossentropy_in_place'), 'crossentropy_mean']);
});
