import { describe, expect, it } from 'vitest';
import type { Device } from '../../../../device/device.js';
import { Tape } from '../../../../tensor/tape.js';
import type { Tensor } from '../../../../tensor/tensor.js';
import {
  type AttentionCase,
  AWKWARD,
  addressTable,
  randomInputs,
  starts,
  upload,
} from '../../../../testing/attention.js';
import { devices, type Precision, tolerance } from '../../../../testing/devices.js';
import { relativeError } from '../../../../testing/numbers.js';
import { differentSelections } from '../../../../testing/selection.js';
import { compressedCount, Sequences } from '../../../common/sequences.js';
import { compressedAttention } from '../../compressed/op.js';
import { denseAttention } from '../../dense/op.js';
import { nativeSparseAttention } from '../../nsa.js';
import { importance, selectBlocks as selectReference } from '../../select/reference.js';
import { selectedAttention } from '../../selected/op.js';
import { windowAttention } from '../../window/op.js';
import { windowForward } from '../../window/reference.js';
import {
  joinTail,
  keepTail,
  loadPages,
  type NewTokens,
  type Pages,
  pagedCompressed,
  pagedSelected,
  pagedWindow,
  pageNumbers,
  pageSizes,
  storePages,
} from './op.js';

/** Scores within float32 rounding of each other. */
const NEAR_TIE = 1e-5;

/** Sequences' tables with pages of their own, in falling order of address, the layer behind another one. */
function emptyPages(
  tape: Tape,
  lengths: readonly number[],
  size: number,
  numbers: number,
  missing = 0,
  dtype: Precision = 'f32',
): Pages {
  const addresses = lengths.map((length) => {
    const count = Math.ceil(length / size);
    const memory = tape.zeros([Math.max(1, count), 2 * numbers], dtype);
    const pages = Array.from({ length: count }, (_, i) =>
      i < missing ? 0n : memory.rows(count - 1 - i, count - i).pointer,
    );
    return addressTable(tape, pages).pointer;
  });
  return { tables: addressTable(tape, addresses), place: numbers, size };
}

/** Sequences of `counts` tokens that begin at `first`. */
function newTokens(tape: Tape, counts: readonly number[], first: readonly number[]): NewTokens {
  return { sequences: new Sequences(tape.device, counts), starts: tape.from(first, [first.length], 'i32') };
}

function prepared(example: AttentionCase, device: () => Device, dtype: Precision) {
  const { lengths, heads, sparse } = example;
  const tape = new Tape(device(), { record: false });
  const inputs = randomInputs(example, 1, dtype);
  const [q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates] = [
    ...[inputs.q, inputs.kCmp, inputs.vCmp, inputs.kSel, inputs.vSel, inputs.kWin, inputs.vWin, inputs.gates],
  ].map((input) => tape.own(upload(device(), input)));
  const tokens = new Sequences(device(), lengths);
  const blocks = tokens.compressed(sparse);
  const { block, lanes } = pageSizes(device());
  const none = lengths.map(() => 0);
  const filled = (size: number, k: Tensor, v: Tensor, counts: readonly number[]) => {
    const pages = emptyPages(tape, counts, size, pageNumbers(heads, size, lanes), 0, dtype);
    storePages(device(), k, v, pages, newTokens(tape, counts, none));
    return pages;
  };
  const pages = {
    cmp: filled(block, kCmp, vCmp, blocks.lengths),
    sel: filled(sparse.lSel, kSel, vSel, lengths),
    win: filled(block, kWin, vWin, lengths),
  };
  return { tape, values: inputs, q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates, tokens, blocks, pages };
}

describe.each(devices())('attention over pages on $name', ({ device, dtype }) => {
  /** A GPU adds up in another order than its kernels over whole sequences do. */
  const expectSame = (actual: Tensor, expected: ArrayLike<number>) => {
    if (device().kind === 'cpu') expect(Array.from(actual.read())).toEqual(Array.from(expected));
    else if (actual.size > 0) expect(relativeError(actual.read(), expected)).toBeLessThan(tolerance(dtype));
  };

  it.each(AWKWARD)(
    'is that over whole sequences (bit for bit on the CPU), for all tokens and for the last ones: $name',
    (example) => {
      const { heads, sparse, lengths } = example;
      const { tape, q, tokens, blocks, pages, values, ...all } = prepared(example, device, dtype);
      const { kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = all;
      const sparseInputs = { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates };
      const whole = nativeSparseAttention(tape, sparseInputs, tokens, sparse, { fusedFrom: Number.POSITIVE_INFINITY });
      const dense = denseAttention(tape, { q, k: kWin, v: vWin }, tokens, { fusedFrom: Number.POSITIVE_INFINITY });
      let chosenBlocks: Tensor | null = null;
      const expected = windowForward(
        values.q.values,
        values.kWin.values,
        values.vWin.values,
        starts(lengths),
        heads,
        sparse.w,
      );
      const cmpStarts = starts(blocks.lengths);
      const reference = [values.q.values, values.kCmp.values, starts(lengths), cmpStarts, heads, sparse] as const;
      const scores = importance(...reference);
      const select = () => selectReference(...reference);
      for (const most of [Number.POSITIVE_INFINITY, 3]) {
        const counts = lengths.map((length) => Math.min(most, length));
        const rows = lengths.flatMap((length, s) =>
          Array.from({ length: counts[s] }, (_, i) => tokens.starts[s] + length - counts[s] + i),
        );
        const chosen = (x: Tensor) => {
          const size = x.size / Math.max(1, tokens.total);
          const read = Array.from(x.read());
          return rows.flatMap((row) => read.slice(row * size, (row + 1) * size));
        };
        const fresh = newTokens(
          tape,
          counts,
          lengths.map((length, s) => length - counts[s]),
        );
        const query = tape.from(chosen(q), [rows.length, heads.heads, heads.dk], dtype);
        const reads = tape.zeros([rows.length, heads.groups], 'i32');
        const cmp = pagedCompressed(tape, query, pages.cmp, fresh, heads, sparse, reads);
        expectSame(cmp.out, chosen(whole.oCmp));
        const positions = rows.map((row) => row - Number(tokens.starts[sequenceOf(tokens, row)]));
        expect(Array.from(reads.read())).toEqual(
          positions.flatMap((t) => new Array(heads.groups).fill(compressedCount(t + 1, sparse.l, sparse.d))),
        );
        const { selected } = cmp;
        if (device().kind === 'cpu') expect(Array.from(selected.read())).toEqual(chosen(whole.selected));
        else if (!chosenBlocks)
          expect(differentSelections(selected.read(), select(), example, scores, NEAR_TIE)).toEqual([]);
        else expect(Array.from(selected.read())).toEqual(chosen(chosenBlocks));
        chosenBlocks ??= selected;
        const sel = pagedSelected(tape, query, selected, pages.sel, fresh, heads);
        const oSel =
          device().kind === 'cpu'
            ? whole.oSel
            : selectedAttention(tape, { q, k: kSel, v: vSel }, chosenBlocks, tokens, sparse.lSel).out;
        expectSame(sel.out, chosen(oSel));
        const win = pagedWindow(tape, query, pages.win, fresh, heads, sparse.w, reads);
        expectSame(win.out, chosen(whole.oWin));
        expect(Array.from(reads.read())).toEqual(
          positions.flatMap((t) => new Array(heads.groups).fill(Math.min(sparse.w, t + 1))),
        );
        const wide = pagedWindow(tape, query, pages.win, fresh, heads, Number.POSITIVE_INFINITY);
        expectSame(wide.out, chosen(dense));
        if (most > 3) expect(relativeError(win.out.read(), expected.out)).toBeLessThan(tolerance(dtype));
      }
      tape.end();
    },
  );

  it('reads nothing outside what a token sees, not even where that is infinite', () => {
    const example = { ...AWKWARD[4], lengths: [300] };
    const { tape, q, kWin, vWin, pages, tokens } = prepared(example, device, dtype);
    const { heads, sparse } = example;
    const at = 250;
    const spoiled = vWin.read();
    spoiled.fill(Number.POSITIVE_INFINITY, 0, (at - sparse.w + 1) * heads.groups * heads.dv);
    spoiled.fill(Number.NaN, (at + 1) * heads.groups * heads.dv);
    const expected = windowAttention(tape, { q, k: kWin, v: vWin }, tokens, sparse.w)
      .rows(at, at + 1)
      .read();
    storePages(device(), kWin, tape.from(spoiled, vWin.shape, dtype), pages.win, newTokens(tape, [300], [0]));
    const one = newTokens(tape, [1], [at]);
    expectSame(pagedWindow(tape, q.rows(at, at + 1), pages.win, one, heads, sparse.w).out, expected);
    tape.end();
  });

  it('no compressed block yet gives 0 and a sum of nothing', () => {
    const { tape, q, pages } = prepared(AWKWARD[1], device, dtype);
    const { heads, sparse } = AWKWARD[1];
    const { out, lse } = pagedCompressed(tape, q, pages.cmp, newTokens(tape, [7], [0]), heads, sparse);
    const whole = compressedAttention(
      tape,
      { q, k: tape.zeros([0, heads.groups, heads.dk], dtype), v: tape.zeros([0, heads.groups, heads.dv], dtype) },
      new Sequences(device(), [7]),
      sparse,
    );
    expect(out.read()).toEqual(whole.out.read());
    expect(lse.read().every((value) => value === Number.NEGATIVE_INFINITY)).toBe(true);
    tape.end();
  });

  it.each(AWKWARD)('pages give back what was stored: $name', (example) => {
    const { tape, pages, tokens, blocks, ...stored } = prepared(example, device, dtype);
    const load = (from: Pages, { lengths }: Sequences) => {
      const none = lengths.map(() => 0);
      return loadPages(tape, from, newTokens(tape, lengths, none), example.heads, dtype);
    };
    const same = (actual: Tensor, expected: Tensor) => expect([...actual.read()]).toEqual([...expected.read()]);
    const [cmp, sel, win] = [load(pages.cmp, blocks), load(pages.sel, tokens), load(pages.win, tokens)];
    same(cmp.k, stored.kCmp);
    same(cmp.v, stored.vCmp);
    same(sel.k, stored.kSel);
    same(sel.v, stored.vSel);
    same(win.k, stored.kWin);
    same(win.v, stored.vWin);
    tape.end();
  });

  it('tokens without a page are passed over', () => {
    const tape = new Tape(device(), { record: false });
    const heads = { heads: 1, groups: 1, dk: 2, dv: 2 };
    const { lanes } = pageSizes(device());
    const pages = emptyPages(tape, [12], 4, pageNumbers(heads, 4, lanes), 2, dtype);
    const rows = tape.from(
      Array.from({ length: 24 }, (_, i) => i),
      [12, 1, 2],
      dtype,
    );
    storePages(device(), rows, rows, pages, newTokens(tape, [12], [0]));
    const loaded = loadPages(tape, pages, newTokens(tape, [12], [0]), heads, dtype);
    const stored = Array.from({ length: 24 }, (_, i) => (i < 16 ? 0 : i));
    expect([Array.from(loaded.k.read()), Array.from(loaded.v.read())]).toEqual([stored, stored]);
    const query = tape.zeros([1, 1, 2], dtype);
    const { out } = pagedWindow(tape, query, pages, newTokens(tape, [1], [11]), heads, 4);
    expect(Array.from(out.read())).toEqual([19, 20]); // the mean of the last four rows
    tape.end();
  });
});

describe.each(devices())('raw rows on $name', ({ device, dtype }) => {
  it('are joined with the new ones, and those still needed are kept', () => {
    const tape = new Tape(device(), { record: false });
    const tail = emptyPages(tape, [4, 4], 4, 4, 0, dtype);
    const first = newTokens(tape, [3, 2], [0, 0]);
    const joined = new Sequences(device(), [3, 2]);
    const done = tape.from([1, 0], [2], 'i32');
    const a = joinTail(tape, tape.from([1, 2, 3, 11, 12], [5, 1], dtype), tail, first, joined);
    expect(Array.from(a.read())).toEqual([1, 2, 3, 11, 12]);
    keepTail(device(), a, joined, done, tail, first);
    const next = newTokens(tape, [1, 2], [3, 2]);
    const again = joinTail(tape, tape.from([4, 13, 14], [3, 1], dtype), tail, next, new Sequences(device(), [3, 4]));
    expect(Array.from(again.read())).toEqual([2, 3, 4, 11, 12, 13, 14]);
    tape.end();
  });
});

function sequenceOf({ starts: begins }: Sequences, row: number): number {
  let sequence = 0;
  while (begins[sequence + 1] <= row) sequence += 1;
  return sequence;
}
