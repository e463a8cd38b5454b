/** The scorer loss of a case by the kernels of a device, and by the reference. */
import type { Device } from '../../../../device/device.js';
import { Tape } from '../../../../tensor/tape.js';
import { type AttentionCase, randomInputs, starts, upload } from '../../../../testing/attention.js';
import { cpu } from '../../../../testing/devices.js';
import { Sequences } from '../../../common/sequences.js';
import { startCompressed } from '../../compressed/op.js';
import { selectBlocks } from '../../select/op.js';
import { type SelectionKernel, selectedAttention } from '../../selected/op.js';
import { scorerLoss, tokensWithChoice } from '../op.js';
import { scorerLoss as reference } from '../reference.js';

/** Gradients of the compressed branch with and without the scorer loss, and the reference's. */
export function compareScorerLoss(
  example: AttentionCase,
  weight: number,
  kernel: SelectionKernel,
  { device = cpu() as Device } = {},
) {
  const { q, kCmp, vCmp, kSel, vSel, dOut } = randomInputs(example, 3);
  const { sparse, heads } = example;
  using tokens = new Sequences(device, example.lengths);
  const blocks = tokens.compressed(sparse);
  const pass = (isScored: boolean) => {
    using tape = new Tape(device);
    const [tq, tk, tv] = [q, kCmp, vCmp].map((input) => tape.watch(tape.own(upload(device, input))));
    const [ts, tvs] = [kSel, vSel].map((input) => tape.own(upload(device, input)));
    const { out, lse: lseCmp, record } = startCompressed(tape, { q: tq, k: tk, v: tv }, tokens, sparse);
    const selected = selectBlocks(tape, { q: tq, k: tk, lse: lseCmp }, tokens, sparse);
    const mass = tape.empty(selected.shape);
    selectedAttention(tape, { q: tape.own(upload(device, q)), k: ts, v: tvs }, selected, tokens, sparse.lSel, {
      mass,
      kernel,
    });
    const blocksOf = selected.read();
    const scored = { q: tq, kCmp: tk, lseCmp, selected, mass };
    const scorer = isScored ? scorerLoss(tape, scored, tokens, sparse, weight) : null;
    record(scorer ?? undefined);
    const loss = scorer?.loss.item() ?? 0;
    tape.backward(out, dOut.values);
    return { loss, blocks: blocksOf, gradients: [tq, tk, tv].map((x) => tape.gradient(x)!.read()) };
  };
  const [plain, scored] = [pass(false), pass(true)];
  const expected = reference(
    { q: q.values, kCmp: kCmp.values, kSel: kSel.values, selected: scored.blocks },
    { starts: starts(example.lengths), cmpStarts: blocks.starts, heads, sparse },
  );
  const added = scored.gradients.map((values, i) => values.map((value, j) => value - plain.gradients[i][j]));
  const pairs = tokensWithChoice(tokens, sparse) * heads.groups;
  return { loss: scored.loss, added, pairs, expected };
}
