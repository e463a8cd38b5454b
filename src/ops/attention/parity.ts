/**
 * The attention core by its float64 reference, instead of all kernels (runtime.reference_kernels), and the comparison of
 * the kernels with it (runtime.debug_compare). Slow: for debugging only.
 */
import type { Tape } from '../../tensor/tape.js';
import type { Tensor } from '../../tensor/tensor.js';
import { relativeError } from '../common/distance.js';
import type { Sequences } from '../common/sequences.js';
import type { SparseInputs, SparseOutputs } from './nsa.js';
import { type NsaInputs, type NsaLayout, nsaBackward, nsaForward } from './reference.js';
import { type HeadShape, type SparseShape, validateShapes } from './shape.js';

const NAMES = ['q', 'kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin', 'gates'] as const;

export function referenceSparseAttention(
  tape: Tape,
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
): SparseOutputs {
  const heads = headsOf(inputs);
  validateShapes(heads, sparse);
  const values = hostValues(inputs);
  const place = referenceLayout(tokens, heads, sparse);
  const result = nsaForward(values, place);
  const shape = [tokens.total, heads.heads, heads.dv];
  const [out, oCmp, oSel, oWin] = [result.out, result.oCmp, result.oSel, result.oWin].map((x) =>
    tape.from(x, shape, inputs.q.dtype),
  );
  const selected = tape.from(result.selected, [tokens.total, heads.groups, sparse.nSel], 'i32');
  const given = [...NAMES.map((name) => inputs[name]), ...(inputs.qWin ? [inputs.qWin] : [])];
  tape.record(given, [out], [], () => {
    const dOut = tape.gradient(out);
    if (!dOut) return;
    const g = nsaBackward(values, place, result, Float64Array.from(dOut.read()));
    const gradients = [
      g.dq,
      g.dkCmp,
      g.dvCmp,
      g.dkSel,
      g.dvSel,
      g.dkWin,
      g.dvWin,
      g.dGates,
      ...(g.dqWin ? [g.dqWin] : []),
    ];
    given.forEach((tensor, i) => {
      const target = tape.gradientTarget(tensor);
      if (!target) return;
      const held = target.accumulate ? target.gradient.read() : null;
      target.gradient.write(held ? gradients[i].map((value, j) => value + held[j]) : gradients[i]);
    });
  });
  return { out, oCmp, oSel, oWin, selected };
}

/** ‖kernel - reference‖/‖reference‖ of the output, with the kernel's own selection. */
export function compareWithReference(
  inputs: SparseInputs,
  tokens: Sequences,
  sparse: SparseShape,
  outputs: SparseOutputs,
): number {
  const selected = outputs.selected.read() as Int32Array;
  const expected = nsaForward(hostValues(inputs), referenceLayout(tokens, headsOf(inputs), sparse), selected).out;
  return relativeError(outputs.out.read(), expected);
}

function headsOf({ q, kSel, vSel }: SparseInputs): HeadShape {
  return { heads: q.shape[1], groups: kSel.shape[1], dk: q.shape[2], dv: vSel.shape[2] };
}

function hostValues(inputs: SparseInputs): NsaInputs {
  const read = (tensor: Tensor) => Float64Array.from(tensor.read());
  const values = Object.fromEntries(NAMES.map((name) => [name, read(inputs[name])])) as unknown as NsaInputs;
  return { ...values, qWin: inputs.qWin ? read(inputs.qWin) : null };
}

function referenceLayout(tokens: Sequences, heads: HeadShape, sparse: SparseShape): NsaLayout {
  return { starts: tokens.starts, cmpStarts: tokens.compressed(sparse).starts, heads, sparse };
}
