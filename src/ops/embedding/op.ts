/** Embedding: row `ids[t]` of the table for every token. */
import { defineKernels } from '../../device/device.js';
import { UsageError } from '../../errors.js';
import type { Tape } from '../../tensor/tape.js';
import { type Dtype, Tensor } from '../../tensor/tensor.js';
import { expectFloats, expectShape } from '../common/shapes.js';
import { PackedMatrix } from '../linear/packed.js';
import { launchers } from './cuda.js';

export const signatures = {
  embedding_forward: ['ptr', 'ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64'],
  embedding_backward: ['ptr', 'ptr', 'ptr', 'i64', 'i64', 'i64', 'i64'],
} as const;
const kernels = defineKernels(import.meta.url, signatures, { cuda: launchers });

/** `table` f32 [vocab, dim], `ids` i32 [tokens] -> [tokens, dim] of `dtype`. */
export function embedding(tape: Tape, table: Tensor, ids: Tensor, dtype: Dtype = 'f32'): Tensor {
  const [vocab, dim] = expectShape('embedding: table', table, [-1, -1]);
  const [tokens] = expectShape('embedding: ids', ids, [-1], 'i32');
  const kernel = tape.device.kernels(kernels);
  const y = tape.empty([tokens, dim], dtype);
  expectFloats('embedding: the result', y, [tokens, dim]);
  const firstBad = Tensor.empty(tape.device, [1], 'i32');
  try {
    if (table instanceof PackedMatrix) table.copyRows(ids, y, firstBad);
    else kernel.embedding_forward(table, ids, y, firstBad, tokens, vocab, dim);
    // On the CPU only: reading the result from a GPU would make the host wait inside a step.
    if (tape.device.kind === 'cpu') checkIds(ids, firstBad.item(), vocab);
  } finally {
    firstBad.free();
  }
  tape.record([table], [y], [ids], () => {
    const dy = tape.gradient(y);
    const dTable = dy && tape.gradientTarget(table);
    if (dTable) kernel.embedding_backward(ids, dy, dTable.gradient, tokens, vocab, dim, Number(dTable.accumulate));
  });
  return y;
}

function checkIds(ids: Tensor, bad: number, vocab: number): void {
  if (bad >= 0)
    throw new UsageError(`embedding: token ${bad} has id ${ids.item(bad)}, outside the vocabulary of ${vocab}`);
}
