/**
 * Between float32 and bfloat16 on the device: to nearest, ties to even; NaN stays NaN. Also parameters as operands of a
 * matrix product, in the dtype of what they are multiplied with.
 */
import { type Device, defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Parameter } from '../../tensor/parameter.js';
import type { ParameterStack } from '../../tensor/parameter-stack.js';
import type { Tensor } from '../../tensor/tensor.js';
import { launchers } from './cuda.js';

export const signatures = {
  cast_f32_to_bf16: ['ptr', 'ptr', 'i64'],
  cast_bf16_to_f32: ['ptr', 'ptr', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** Writes `from` into `into`, whose dtype decides the direction. */
export function castInto(device: Device, from: Tensor, into: Tensor): void {
  if (from.size !== into.size)
    throw new UsageError(`cast: [${from.shape.join(', ')}] does not fill [${into.shape.join(', ')}]`);
  const kernel = device.kernels(kernels);
  if (from.dtype === 'f32' && into.dtype === 'bf16') kernel.cast_f32_to_bf16(from, into, from.size);
  else if (from.dtype === 'bf16' && into.dtype === 'f32') kernel.cast_bf16_to_f32(from, into, from.size);
  else throw new UsageError(`cast: there is no cast from ${from.dtype} to ${into.dtype}`);
}

/** A parameter in the dtype of the tensor it is multiplied with. */
export function operand(parameter: Parameter, beside: Tensor): Tensor {
  return parameter.as(beside.dtype, (from, into) => castInto(from.device, from, into));
}

export function stackedOperand(stack: ParameterStack): Tensor {
  return stack.operand((from, into) => castInto(from.device, from, into));
}
