/** Parameters as operands of a matrix product: in the dtype of what they are multiplied with. */
import { castInto } from '../ops/cast/op.js';
import type { Parameter } from '../tensor/parameter.js';
import type { ParameterStack } from '../tensor/parameter-stack.js';
import type { Tensor } from '../tensor/tensor.js';

export function operand(parameter: Parameter, beside: Tensor): Tensor {
  return parameter.as(beside.dtype, (from, into) => castInto(from.device, from, into));
}

export function stackedOperand(stack: ParameterStack): Tensor {
  return stack.operand((from, into) => castInto(from.device, from, into));
}
