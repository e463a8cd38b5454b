/** Invariant 5: a selection or a window that covers all tokens equals dense causal attention. */
import type { Device } from '../device/device.js';
import { compressedAttention } from '../ops/attention/compressed/op.js';
import { denseAttention } from '../ops/attention/dense/op.js';
import { selectBlocks } from '../ops/attention/select/op.js';
import { selectedAttention } from '../ops/attention/selected/op.js';
import { windowAttention } from '../ops/attention/window/op.js';
import type { Sequences } from '../ops/common/sequences.js';
import type { Tape } from '../tensor/tape.js';
import type { Tensor } from '../tensor/tensor.js';
import { type CaseShapes, inputShapes, outputSize, randomInputs, SMALL } from './cases.js';
import { check, type Finding, TOLERANCE, type VerifyCheck, Worst } from './check.js';
import { gradientOf, withSequences } from './core.js';
import { randomValues, relativeError } from './numbers.js';

const HEADS = { heads: 6, groups: 2, dk: 16, dv: 12 };

/** The branch that covers all tokens in this check. */
type Branch = (tape: Tape, inputs: { q: Tensor; k: Tensor; v: Tensor }, tokens: Sequences) => Tensor;

export function denseLimitChecks(device: Device): VerifyCheck[] {
  const limit = TOLERANCE;
  const lengths = [[96], [95], [100, 0, 33, 1]];
  return lengths.flatMap((some): VerifyCheck[] => {
    const longest = Math.max(...some);
    const nSel = Math.max(3, Math.ceil(longest / SMALL.lSel));
    const shapes: CaseShapes = { lengths: some, heads: HEADS, sparse: { ...SMALL, nSel, w: longest } };
    return [
      ...(['v1', 'v2'] as const).map((kernel) =>
        check(
          '5 dense',
          `n*l' = ${nSel * SMALL.lSel} >= S = ${longest}: selected ${kernel} = dense, ${some.length} sequences`,
          limit,
          () => equalsDense(device, shapes, selectedBranch(shapes, kernel)),
        ),
      ),
      check('5 dense', `w = S = ${longest}: window = dense, ${some.length} sequences`, limit, () =>
        equalsDense(device, shapes, (tape, inputs, tokens) => windowAttention(tape, inputs, tokens, longest)),
      ),
    ];
  });
}

function selectedBranch(shapes: CaseShapes, kernel: 'v1' | 'v2'): Branch {
  const { sparse } = shapes;
  return (tape, inputs, tokens) => {
    const { kCmp, vCmp } = inputShapes(shapes);
    const [k, v] = [tape.zeros(kCmp), tape.zeros(vCmp)];
    const { lse } = compressedAttention(tape, { q: inputs.q, k, v }, tokens, sparse);
    const selected = selectBlocks(tape, { q: inputs.q, k, lse }, tokens, sparse);
    return selectedAttention(tape, inputs, selected, tokens, sparse.lSel, { kernel }).out;
  };
}

function equalsDense(device: Device, shapes: CaseShapes, branch: Branch): Finding {
  const { q, kSel, vSel } = randomInputs(shapes, 31);
  const sizes = inputShapes(shapes);
  const dOut = randomValues(outputSize(shapes), 32);
  const run = (attend: Branch) =>
    withSequences(device, shapes.lengths, (tokens, tape) => {
      const inputs = {
        q: tape.watch(tape.from(q, sizes.q)),
        k: tape.watch(tape.from(kSel, sizes.kSel)),
        v: tape.watch(tape.from(vSel, sizes.vSel)),
      };
      const out = attend(tape, inputs, tokens);
      const values = out.read();
      tape.backward(out, dOut);
      return {
        out: values,
        dq: gradientOf(tape, inputs.q),
        dk: gradientOf(tape, inputs.k),
        dv: gradientOf(tape, inputs.v),
      };
    });
  const [sparse, dense] = [run(branch), run(denseAttention)];
  const worst = new Worst();
  for (const name of ['out', 'dq', 'dk', 'dv'] as const)
    worst.add(relativeError(sparse[name], dense[name]), `${name} is not that of dense attention`);
  return worst.finding;
}
