import { expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import { UsageError } from '../errors.js';
import { cpu } from '../testing/devices.js';
import { RecordingCuda } from '../testing/recording-cuda.js';
import { expectFp8 } from './device-stepper.js';

const runtime = (values: object) => parseConfig({ runtime: values }).runtime;
const gpu = (architecture: number) => new RecordingCuda(() => 0, architecture);

it('refuses runtime.fp8 where there are no FP8 products, and names what is missing', () => {
  const on = runtime({ fp8: true, precision: 'bf16' });
  expect(() => expectFp8(on, cpu())).toThrow('runtime.fp8: the CPU has no FP8 products; leave it out');
  expect(() => expectFp8(on, gpu(80))).toThrow('runtime.fp8: no GPU has compute capability 8: FP8 products need 8.9');
  expect(() => expectFp8(runtime({ fp8: true }), gpu(90))).toThrow(UsageError);
  expect(() => expectFp8(runtime({ fp8: true }), gpu(90))).toThrow('runtime.fp8: needs runtime.precision bf16');
});

it('accepts it on Ada and Hopper in bf16, and everything without it', () => {
  for (const architecture of [89, 90, 120])
    expect(() => expectFp8(runtime({ fp8: true, precision: 'bf16' }), gpu(architecture))).not.toThrow();
  expect(() => expectFp8(runtime({}), cpu())).not.toThrow();
});
