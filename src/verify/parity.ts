/** Invariants 1 and 9: every kernel equals the float64 reference, outputs and gradients, for all edge-case shapes. */
import type { Device } from '../device/device.js';
import { denseAttention } from '../ops/attention/dense/op.js';
import { denseBackward, denseForward } from '../ops/attention/dense/reference.js';
import type { NsaInputs } from '../ops/attention/reference.js';
import { SELECTION_KERNELS, type SelectionKernel } from '../ops/attention/selected/op.js';
import { AWKWARD, type CaseShapes, outputSize, randomInputs, SMALL } from './cases.js';
import { check, type Finding, TOLERANCE, type VerifyCheck, Worst } from './check.js';
import { compareCore } from './compare.js';
import { gradientOf, record, runCore, withSequences } from './core.js';
import { randomValues, relativeError, startsOf, sum } from './numbers.js';

/** Long enough for `adaptive` to take its kernel for long sequences, in blocks of the paper's proportions. */
const TYPICAL: CaseShapes = {
  lengths: [1061, 90],
  heads: { heads: 6, groups: 2, dk: 16, dv: 16 },
  sparse: { l: 16, d: 8, lSel: 32, nSel: 6, w: 64 },
};

const DENSE: CaseShapes = { lengths: [130, 0, 77], heads: { heads: 6, groups: 2, dk: 24, dv: 16 }, sparse: SMALL };

export function parityChecks(device: Device): VerifyCheck[] {
  const limit = TOLERANCE;
  return [
    check('1 reference', `core, kernels ${SELECTION_KERNELS.join(', ')}`, limit, () =>
      parity(device, TYPICAL, SELECTION_KERNELS),
    ),
    check('1 reference', 'dense baseline', limit, () =>
      compareDense(device, DENSE, randomInputs(DENSE, 2), randomValues(outputSize(DENSE), 98)),
    ),
    ...AWKWARD.map((shapes) => check('9 shapes', shapes.name, limit, () => parity(device, shapes, ['v1', 'v2']))),
  ];
}

function parity(device: Device, shapes: CaseShapes, kernels: readonly SelectionKernel[]): Finding {
  const inputs = randomInputs(shapes, 1);
  const dOut = randomValues(outputSize(shapes), 99);
  const results = record(kernels, (kernel) => runCore(device, inputs, shapes, dOut, { kernel }));
  return compareCore(results, inputs, shapes, dOut);
}

/** The caller has rounded `inputs` and `dOut` to `dtype`. */
export function compareDense(
  device: Device,
  { lengths, heads }: CaseShapes,
  inputs: Pick<NsaInputs, 'q' | 'kSel' | 'vSel'>,
  dOut: Float64Array,
  dtype: 'f32' | 'bf16' = 'f32',
): Finding {
  const { q, kSel: k, vSel: v } = inputs;
  const tokens = sum(lengths);
  const starts = startsOf(lengths);
  return withSequences(device, lengths, (sequences, tape) => {
    const tensors = {
      q: tape.watch(tape.from(q, [tokens, heads.heads, heads.dk], dtype)),
      k: tape.watch(tape.from(k, [tokens, heads.groups, heads.dk], dtype)),
      v: tape.watch(tape.from(v, [tokens, heads.groups, heads.dv], dtype)),
    };
    const out = denseAttention(tape, tensors, sequences);
    const worst = new Worst();
    worst.add(relativeError(out.read(), denseForward(q, k, v, starts, heads).out), 'the output is off');
    tape.backward(out, dOut);
    const { dq, dk, dv } = denseBackward(q, k, v, starts, heads, dOut);
    worst.add(relativeError(gradientOf(tape, tensors.q), dq), 'dq is off');
    worst.add(relativeError(gradientOf(tape, tensors.k), dk), 'dk is off');
    worst.add(relativeError(gradientOf(tape, tensors.v), dv), 'dv is off');
    return worst.finding;
  });
}
