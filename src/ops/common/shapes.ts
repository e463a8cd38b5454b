/** Checks of shapes and dtypes that every operation makes before a kernel sees a pointer. */
import { UsageError } from '../../errors.js';
import type { Dtype, Shape, Tensor } from '../../tensor/tensor.js';

/** Throws unless `tensor` has this shape; -1 matches any size. Returns the shape. */
export function expectShape(what: string, tensor: Tensor, shape: Shape, dtype: Dtype = 'f32'): Shape {
  const fits =
    tensor.shape.length === shape.length && shape.every((size, i) => size === -1 || size === tensor.shape[i]);
  if (!fits)
    throw new UsageError(
      `${what} must have shape [${shape.map((s) => (s === -1 ? '*' : s)).join(', ')}], not [${tensor.shape.join(', ')}]`,
    );
  if (tensor.dtype !== dtype) throw new UsageError(`${what} must be ${dtype}, not ${tensor.dtype}`);
  return tensor.shape;
}

/** Like `expectShape` for floats: f32, or bf16 on CUDA. Returns the shape. */
export function expectFloats(what: string, tensor: Tensor, shape: Shape): Shape {
  const bf16 = tensor.dtype === 'bf16' && tensor.device.kind === 'cuda';
  return expectShape(what, tensor, shape, bf16 ? 'bf16' : 'f32');
}
