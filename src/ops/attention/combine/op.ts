/** The gated sum of the branches: out[t,head] = sum over b of gates[t,head,b] * branches[b][t,head]. */
import { defineKernels } from '../../../device/device.js';
import type { GradientTarget, Tape } from '../../../tensor/tape.js';
import type { Tensor } from '../../../tensor/tensor.js';
import { expectFloats, expectShape } from '../../common/shapes.js';
import { launchers } from './cuda.js';

export const signatures = {
  combine_forward: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64'],
  combine_backward_gates: ['ptr', 'ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
  combine_backward_branch: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `gates` f32 [T,H,3], `cmp`, `sel`, `win` [T,H,dv] of one dtype -> [T,H,dv]. */
export function combine(tape: Tape, gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor): Tensor {
  const [tokens, heads] = expectShape('combine: gates', gates, [-1, -1, 3]);
  const [, , size] = expectFloats('combine: cmp', cmp, [tokens, heads, -1]);
  expectShape('combine: sel', sel, [tokens, heads, size], cmp.dtype);
  expectShape('combine: win', win, [tokens, heads, size], cmp.dtype);
  const rows = tokens * heads;
  const kernel = tape.device.kernels(kernels);
  const out = tape.empty([tokens, heads, size], cmp.dtype);
  kernel.combine_forward(gates, cmp, sel, win, out, rows, size);
  tape.record([gates, cmp, sel, win], [out], [gates, cmp, sel, win], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const dGates = tape.gradientTarget(gates);
    if (dGates) {
      const { gradient, accumulate } = dGates;
      kernel.combine_backward_gates(dOut, cmp, sel, win, gradient, rows, size, Number(accumulate));
    }
    [cmp, sel, win].forEach((branch, b) => {
      const target: GradientTarget | null = tape.gradientTarget(branch);
      if (!target) return;
      kernel.combine_backward_branch(dOut, gates, target.gradient, b, rows, size, Number(target.accumulate));
    });
  });
  return out;
}
