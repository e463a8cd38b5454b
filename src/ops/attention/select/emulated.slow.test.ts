/** The branch kernel of CUDA and the paged one on the thread emulator: forced blocks other than the default. */
import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { AWKWARD, addressTable, randomInputs, starts, upload } from '../../../testing/attention.js';
import { EmulatedCuda } from '../../../testing/emulated-cuda.js';
import { differentSelections } from '../../../testing/selection.js';
import { Sequences } from '../../common/sequences.js';
import { compressedForward } from '../compressed/reference.js';
import { type Pages, pagedCompressed, pageNumbers, pageSizes, storePages } from '../decode/paged/op.js';
import { selectBlocks } from './op.js';
import { importance, selectBlocks as selectReference } from './reference.js';

const cuda = new EmulatedCuda();

describe.each(AWKWARD.filter(({ name }) => /^forced|^no multiple/.test(name)))('$name', (example) => {
  const { heads, sparse, lengths } = example;
  const { q, kCmp, vCmp } = randomInputs(example, 1);
  const tape = new Tape(cuda, { record: false });
  const tokens = new Sequences(cuda, lengths);
  const blocks = tokens.compressed(sparse);
  const place = [starts(lengths), starts(blocks.lengths), heads, sparse] as const;
  const reference = [q.values, kCmp.values, ...place] as const;
  const [tq, k, v] = [q, kCmp, vCmp].map((input) => tape.own(upload(cuda, input)));
  const expectSelection = (selected: ArrayLike<number>) =>
    expect(
      differentSelections(selected, selectReference(...reference), example, importance(...reference), 1e-5),
    ).toEqual([]);

  it('is selected by the branch kernel', () => {
    const { lse } = compressedForward(q.values, kCmp.values, vCmp.values, ...place);
    const inputs = { q: tq, k, lse: tape.from(lse, [tokens.total, heads.heads]) };
    expectSelection(selectBlocks(tape, inputs, tokens, sparse).read());
  });

  it('is selected over pages', () => {
    const { block, lanes } = pageSizes(cuda);
    const numbers = pageNumbers(heads, block, lanes);
    const tables = blocks.lengths.map((count) => {
      const pages = Math.ceil(count / block);
      const memory = tape.zeros([pages, numbers]);
      const addresses = Array.from({ length: pages }, (_, i) => memory.rows(i, i + 1).pointer);
      return addressTable(tape, addresses).pointer;
    });
    const pages: Pages = { tables: addressTable(tape, tables), place: 0, size: block };
    const none = tape.from(
      lengths.map(() => 0),
      [lengths.length],
      'i32',
    );
    storePages(cuda, k, v, pages, { sequences: blocks, starts: none });
    expectSelection(
      pagedCompressed(tape, tq, pages, { sequences: tokens, starts: none }, heads, sparse).selected.read(),
    );
  });
});
