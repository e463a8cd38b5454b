/** A parameter as an operand of a matrix product: in the dtype of what it is multiplied with. */
import { castInto } from '../ops/cast/op.js';
import type { Parameter } from '../tensor/parameter.js';
import type { Tensor } from '../tensor/tensor.js';

export function operand(parameter: Parameter, beside: Tensor): Tensor {
  return parameter.as(beside.dtype, (from, into) => castInto(from.device, from, into));
}
