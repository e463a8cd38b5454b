/** The fused core as a whole, forward and backward, on a device beside the float64 reference. */
import type { Device } from '../../../../device/device.js';
import { Tape } from '../../../../tensor/tape.js';
import { type AttentionCase, randomInputs, upload } from '../../../../testing/attention.js';
import { nsaLayout } from '../../../../testing/nsa.js';
import { relativeError } from '../../../../testing/numbers.js';
import { Sequences } from '../../../common/sequences.js';
import type { SparseInputs, SparseOptions } from '../../nsa.js';
import { type NsaInputs, nsaBackward, nsaForward } from '../../reference.js';
import { tokensWithChoice } from '../../scorer-loss/op.js';
import { scorerLoss } from '../../scorer-loss/reference.js';
import { fusedRefusal, fusedSparseAttention } from '../op.js';

const NAMES = ['q', 'kCmp', 'vCmp', 'kSel', 'vSel', 'kWin', 'vWin', 'gates', 'qWin'] as const;
/** The weight of the scorer loss divided by its number of pairs: about as much gradient as the attention's own. */
const FACTOR = 40;

/**
 * Relative errors of outputs and gradients by name, and how large the gradient of the scorer loss is beside that of the
 * attention. `plain`: without queries of the window branch and the scorer loss.
 */
export function compareWhole(
  device: Device,
  example: AttentionCase,
  { plain = false, ...options }: SparseOptions & { readonly plain?: boolean } = {},
) {
  const { heads, sparse, lengths } = example;
  const given = randomInputs(example, 1, 'bf16');
  const values = { ...given, ...(!plain && { qWin: randomInputs(example, 2, 'bf16').q }) }; // any other queries will do
  const names = NAMES.filter((name) => values[name]);
  using tape = new Tape(device);
  using tokens = new Sequences(device, lengths);
  const inputs = Object.fromEntries(
    names.map((name) => [name, tape.watch(tape.own(upload(device, values[name]!)))]),
  ) as unknown as SparseInputs;
  const pairs = tokensWithChoice(tokens, sparse) * heads.groups;
  const scorerWeight = plain ? 0 : FACTOR * Math.max(1, pairs);
  const all = { ...options, scorerWeight };
  const refusal = fusedRefusal({ heads, sparse, dtype: 'bf16', tokens }, device, all);
  if (refusal !== null) throw new Error(refusal);
  const found = fusedSparseAttention(tape, inputs, tokens, sparse, all);
  const layout = nsaLayout(lengths, heads, sparse);
  const exact = Object.fromEntries(names.map((name) => [name, values[name]!.values])) as unknown as NsaInputs;
  const expected = nsaForward(exact, layout, found.selected.read() as Int32Array);
  const outputs = (['out', 'oCmp', 'oSel', 'oWin'] as const).map(
    (name) => [name, found[name], expected[name]] as const,
  );
  const errors: Record<string, number> = {};
  for (const [name, actual, wanted] of outputs) errors[name] = relativeError(actual.read(), wanted);
  const g = nsaBackward(exact, layout, expected, values.dOut.values);
  let size = 0;
  if (!plain) {
    const scorer = scorerLoss({ ...exact, selected: expected.selected }, layout);
    if (scorer.pairs !== pairs) throw new Error(`${pairs} pairs, not ${scorer.pairs}`);
    const loss = found.scorerLoss!.item();
    errors['loss'] = pairs > 0 ? Math.abs(loss - scorer.loss) / scorer.loss : Math.abs(loss);
    size = (scorerWeight * norm(scorer.dkCmp)) / norm(g.dkCmp);
    for (const [to, from] of [
      [g.dq, scorer.dq],
      [g.dkCmp, scorer.dkCmp],
    ])
      from.forEach((value, i) => {
        to[i] += scorerWeight * value;
      });
  }
  using dOut = upload(device, values.dOut);
  tape.backward([found.out], [dOut]);
  const gradients = [g.dq, g.dkCmp, g.dvCmp, g.dkSel, g.dvSel, g.dkWin, g.dvWin, g.dGates, g.dqWin];
  NAMES.forEach((name, i) => {
    const input = inputs[name];
    if (input) errors[`gradient of ${name}`] = relativeError(tape.gradient(input)!.read(), gradients[i]!);
  });
  return { errors, pairs, size };
}

function norm(x: Float64Array): number {
  return Math.sqrt(x.reduce((sum, value) => sum + value * value, 0));
}
