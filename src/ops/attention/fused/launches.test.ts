import { describe, expect, it } from 'vitest';
import { Tape } from '../../../tensor/tape.js';
import { Tensor } from '../../../tensor/tensor.js';
import { exportedBy, type Launch, RecordingCuda } from '../../../testing/recording-cuda.js';
import { Sequences } from '../../common/sequences.js';
import { AttentionCounters } from '../counters.js';
import { nativeSparseAttention, type SparseInputs, type SparseOptions } from '../nsa.js';
import { fusedDenseAttention } from './dense.js';
import { fusedSparseAttentionFrom, type SelectedPath } from './op.js';
import { sharedBytes } from './plan.js';

const HEADS = { heads: 12, groups: 2, dk: 64, dv: 32 };
const SPARSE = { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
const LENGTHS = [3300, 0, 1, 500];
const TOKENS = 3801;

const SHARED: Readonly<Record<string, number>> = sharedBytes(
  { heads: HEADS, sparse: SPARSE },
  { queryMajor: false, mmaSync: false },
  21,
);
const constant = exportedBy({ heads: HEADS, sparse: SPARSE });

function missing(name: string): never {
  throw new Error(`${name} was not launched`);
}

function inputsOf(tape: Tape, compressed: number, tokens = TOKENS, isApart = false): SparseInputs {
  const { heads, groups, dk, dv } = HEADS;
  const bf16 = (...shape: number[]) => tape.watch(tape.empty(shape, 'bf16'));
  return {
    q: bf16(tokens, heads, dk),
    kCmp: bf16(compressed, groups, dk),
    vCmp: bf16(compressed, groups, dv),
    kSel: bf16(tokens, groups, dk),
    vSel: bf16(tokens, groups, dv),
    kWin: bf16(tokens, groups, dk),
    vWin: bf16(tokens, groups, dv),
    gates: tape.watch(tape.empty([tokens, heads, 3])),
    ...(isApart && { qWin: bf16(tokens, heads, dk) }),
  };
}

interface Trace {
  readonly forward: Launch[];
  readonly backward: Launch[];
  /** Bytes of the outputs and of what is kept for the backward pass. */
  readonly kept: number;
}

function trace(options: SparseOptions = {}, { uses = 1, record = true, isApart = false } = {}): Trace {
  const device = new RecordingCuda(constant);
  const tokens = new Sequences(device, LENGTHS);
  tokens.inBlocks(SPARSE.lSel);
  tokens.compressed(SPARSE);
  const before = device.pool.bytesInUse;
  const tape = new Tape(device, { record });
  const inputs = inputsOf(tape, tokens.compressed(SPARSE).total, TOKENS, isApart);
  const counters = new AttentionCounters(device);
  const given = device.pool.bytesInUse;
  const outputs = Array.from({ length: uses }, () =>
    nativeSparseAttention(tape, inputs, tokens, SPARSE, { ...options, counters }),
  );
  for (const { oCmp, oSel, oWin, selected, scorerLoss } of outputs)
    for (const tensor of [oCmp, oSel, oWin, selected, scorerLoss]) if (tensor) tape.drop(tensor);
  const kept = device.pool.bytesInUse - given;
  const forward = device.launches.splice(0);
  if (record) {
    const dOut = Tensor.zeros(device, outputs[0].out.shape, 'bf16');
    tape.backward(
      outputs.map(({ out }) => out),
      outputs.map(() => dOut),
    );
    dOut.free();
    for (const [name, tensor] of Object.entries(inputs) as [string, Tensor][])
      expect(tape.gradient(tensor)?.dtype, name).toBe(name === 'gates' ? 'f32' : 'bf16');
  }
  expect([...counters.refusals]).toEqual([]);
  tape.end();
  counters.free();
  expect(device.pool.bytesInUse).toBe(before);
  return { forward, backward: device.launches, kept };
}

const names = (launches: readonly Launch[]) => launches.map(({ kernel }) => kernel);
const find = (launches: readonly Launch[], kernel: string) =>
  launches.find((launch) => launch.kernel === kernel) ?? missing(kernel);

const LISTS = ['select_totals', 'select_index', 'select_finish'];
const BEGINNING = ['compressed_pack', 'compressed_forward', 'select_blocks', 'selected_pack', 'window_pack', ...LISTS];

describe('launches of the fused kernels', () => {
  it('come in the order that the kernels need, with arguments that fit their parameters', () => {
    const { forward, backward } = trace();
    expect(names(forward)).toEqual([...[...BEGINNING, 'selected_dense', 'selected_union', 'selected_outer']]);
    expect(names(backward)).toEqual([
      ...['combine_backward', 'compressed_backward', 'window_backward', 'compressed_pack', 'window_pack'],
      ...['compressed_window_query_gradient', 'selected_backward', 'selected_query_gradient', 'round_sums'],
    ]);
  });

  it('compute the window branch apart where it has queries of its own', () => {
    const { forward, backward } = trace({}, { isApart: true });
    const selected = ['selected_dense', 'selected_union', 'selected_outer'];
    expect(names(forward)).toEqual([...BEGINNING, ...selected, 'window_forward', 'combine_forward']);
    const macrosOf = (kernel: string) => find([...forward, ...backward], kernel).macros;
    for (const kernel of ['selected_union', 'compressed_forward'])
      expect(macrosOf(kernel)).toMatchObject({ WINDOW: 0 });
    expect(macrosOf('window_forward')).toMatchObject({ WINDOW: 512 });
    expect(names(backward)).toEqual([
      ...['combine_backward', 'window_backward', 'window_pack', 'window_query_gradient'],
      ...['compressed_backward', 'compressed_pack', 'compressed_window_query_gradient'],
      ...['selected_backward', 'selected_query_gradient', 'round_sums'],
    ]);
  });

  it('add the scorer loss: its values after the lists, its gradients where others read them', () => {
    const { forward, backward, kept } = trace({ scorerWeight: 0.1 });
    expect(names(forward).slice(-3)).toEqual(['scorer_masses', 'scorer_losses', 'scorer_mean']);
    const order = ['combine_backward', 'scorer_delta', 'compressed_backward', 'selected_backward', 'scorer_gradients'];
    const launched = names(backward);
    const places = [...order, 'scorer_key_sums', 'selected_query_gradient', 'round_sums'].map((name) =>
      launched.indexOf(name),
    );
    expect(places).toEqual([...places].sort((a, b) => a - b));
    expect(places).not.toContain(-1);
    // A number of each slot and one of each head.
    expect(kept - trace().kept).toBeLessThan(TOKENS * 4 * (2 * 16 + 12) * 1.2);
    const { backward: ordered } = trace({ scorerWeight: 0.1, deterministic: true });
    expect(find(ordered, 'scorer_key_sums').values[1]).toBeNull(); // no sums: added to the gradient
    expect(names(ordered).indexOf('compressed_sum')).toBeLessThan(names(ordered).indexOf('scorer_key_sums'));
    expect(names(trace({ scorerWeight: 0 }).forward)).not.toContain('scorer_masses');
  });

  it('leave out what a forced path does not need', () => {
    expect(names(trace({ path: 'union' }).forward)).toEqual([...BEGINNING, 'selected_union']);
    const outer = ['selected_dense', 'selected_outer'];
    expect(names(trace({ path: 'outer' }).forward)).toEqual([...BEGINNING, ...outer]);
  });

  it('include tile-gather where there is one', () => {
    const shape = { heads: { ...HEADS, dv: 64 }, sparse: SPARSE };
    const launched = (path: SelectedPath, lengths = LENGTHS) => {
      const device = new RecordingCuda(exportedBy(shape));
      const tokens = new Sequences(device, lengths);
      const tape = new Tape(device, { record: false });
      const { vCmp, vSel, vWin, ...rest } = inputsOf(tape, tokens.compressed(SPARSE).total, tokens.total);
      const wide = ({ shape: [rows, groups] }: Tensor) => tape.empty([rows, groups, 64], 'bf16');
      const inputs = { ...rest, vCmp: wide(vCmp), vSel: wide(vSel), vWin: wide(vWin) };
      nativeSparseAttention(tape, inputs, tokens, SPARSE, { path });
      tape.end();
      return device.launches;
    };
    const all = ['selected_dense', 'selected_union', 'selected_outer', 'selected_gather'];
    expect(names(launched('adaptive', [9601]))).toEqual([...BEGINNING, ...all]);
    const short = all.filter((name) => name !== 'selected_outer');
    expect(names(launched('adaptive', [9600]))).toEqual([...BEGINNING, ...short]);
    expect(names(launched('adaptive', [36 * 64]))).toEqual([...BEGINNING, 'selected_union']);
    const long = all.filter((name) => name !== 'selected_gather');
    expect(names(launched('adaptive', [262_145]))).toEqual([...BEGINNING, ...long]);
    expect(() => launched('gather', [262_145])).toThrow('tile-gather takes sequences of up to 262144 tokens');
    expect(names(launched('gather'))).toEqual([...BEGINNING, 'selected_dense', 'selected_gather']);
    expect(find(launched('gather'), 'selected_gather')).toMatchObject({
      shape: { grid: [52 + 1 + 8, 2], block: 544 },
    });
    expect(() => trace({ path: 'gather' })).toThrow('tile-gather needs head sizes and selection blocks of 64');
  });

  it('leave out KV-outer where no token sees enough blocks for it', () => {
    const launched = (length: number) => {
      const device = new RecordingCuda(constant);
      const tokens = new Sequences(device, [100, length]);
      const tape = new Tape(device, { record: false });
      nativeSparseAttention(tape, inputsOf(tape, tokens.compressed(SPARSE).total, 100 + length), tokens, SPARSE);
      tape.end();
      return device.launches;
    };
    expect(names(launched(50 * 64))).toEqual([...BEGINNING, 'selected_union']);
    expect(find(launched(50 * 64), 'selected_union').values[11]).toBeNull(); // no plan: all tokens
    const both = ['selected_dense', 'selected_union', 'selected_outer'];
    expect(names(launched(50 * 64 + 1))).toEqual([...BEGINNING, ...both]);
  });

  it('build v1 with a tile for every token', () => {
    const { forward } = trace({ kernel: 'v1' });
    expect(names(forward)).toEqual([...BEGINNING, 'selected_union']);
    expect(forward[0].macros).toMatchObject({ UNION_TOKENS: 1, UNION_WARPGROUPS: 1 });
    expect(trace({ mmaSync: true }).forward[0].macros).toMatchObject({ UNION_TOKENS: 21, MMA_SYNC: 1 });
  });

  it('sort lists and add parts in order in deterministic mode', () => {
    const { forward, backward } = trace({ deterministic: true });
    expect(names(forward)).toContain('select_sort');
    expect(names(backward)).toContain('compressed_sum');
    expect(names(backward)).toContain('selected_sum');
    expect(names(backward)).not.toContain('round_sums');
    expect(find(backward, 'selected_backward').values.at(-1)).toBe(1);
    expect(find(trace().backward, 'selected_backward').values.at(-1)).toBe(0);
    expect(names(trace({ deterministic: true }, { record: false }).forward)).not.toContain('select_sort');
  });

  it('compute the gradients of the compressed and the window branch at once where there is a kernel for it', () => {
    const launched = (options: SparseOptions = {}, architecture = 90, lSel = 64) => {
      const shape = { heads: { ...HEADS, dv: 64 }, sparse: { ...SPARSE, lSel } };
      const device = new RecordingCuda(exportedBy(shape), architecture);
      const tokens = new Sequences(device, [20_000, 100]);
      const tape = new Tape(device);
      const { vCmp, vSel, vWin, ...same } = inputsOf(tape, tokens.compressed(shape.sparse).total, 20_100);
      const wide = (tensor: Tensor) => tape.watch(tape.empty([tensor.shape[0], 2, 64], 'bf16'));
      const inputs = { ...same, vCmp: wide(vCmp), vSel: wide(vSel), vWin: wide(vWin) };
      const { out } = nativeSparseAttention(tape, inputs, tokens, shape.sparse, options);
      device.launches.length = 0;
      tape.backward(out, tape.zeros(out.shape, 'bf16'));
      tape.end();
      return device.launches;
    };
    const joint = launched();
    expect(names(joint)).toEqual([
      ...['combine_backward', 'joint_gradients', 'selected_backward', 'selected_query_gradient', 'round_sums'],
    ]);
    const grid = ((7 + 1) * 20 + 105 + 1) * 2;
    expect(find(joint, 'joint_gradients').shape).toEqual({ grid, block: 512, shared: 169_536 });
    const both = ['compressed_backward', 'compressed_window_query_gradient'];
    for (const others of [
      launched({ joint: false }),
      launched({ deterministic: true }),
      launched({ mmaSync: true }),
      launched({}, 80),
      launched({}, 90, 48),
    ])
      expect(names(others)).toEqual(expect.arrayContaining(both));
  });

  it('rank the blocks of a long sequence once when a block of the model is run again', () => {
    const launched = (length: number) => {
      const device = new RecordingCuda(constant);
      const tokens = new Sequences(device, [length]);
      const tape = new Tape(device);
      const inputs = inputsOf(tape, tokens.compressed(SPARSE).total, length);
      const out = tape.checkpoint(Object.values(inputs), (inner) => {
        const { out, ...rest } = nativeSparseAttention(inner, inputs, tokens, SPARSE);
        for (const tensor of Object.values(rest)) inner.drop(tensor);
        return out;
      });
      tape.backward(out, tape.zeros(out.shape, 'bf16'));
      tape.end();
      const all = names(device.launches);
      const count = (kernel: string) => all.filter((name) => name === kernel).length;
      return ['compressed_forward', 'select_blocks', 'selected_outer', 'compressed_backward'].map(count);
    };
    expect(launched(40_000)).toEqual([1, 1, 2, 1]);
    expect(launched(8192)).toEqual([2, 2, 2, 1]); // too cheap to be worth the memory
  });

  it('cover the batch', () => {
    const { forward, backward } = trace();
    expect(find(forward, 'compressed_forward').shape).toEqual({
      grid: [(Math.ceil((3300 * 6) / 128) + 1 + Math.ceil(3000 / 128)) / 2, 2], // two tiles for each thread block
      block: 256,
      shared: SHARED['compressed_forward_shared'],
    });
    expect(find(forward, 'select_blocks').shape.grid).toEqual([52 + 1 + 8, 2]);
    expect(find(forward, 'selected_union').shape).toMatchObject({
      grid: [158 + 1 + 24, 2],
      shared: SHARED['selected_union_shared'] + 2 * 4,
    });
    expect(find(forward, 'selected_outer').shape).toMatchObject({ grid: 132 * 4, block: 128 });
    expect(find(backward, 'compressed_backward').shape.grid).toEqual([4 + 1, 7, 2]);
    expect(find(backward, 'combine_backward').shape.grid).toBe(Math.ceil((TOKENS * 12 * 4) / 256));
  });

  it('begin with the tile of the first token when a sequence is continued, without lists', () => {
    const device = new RecordingCuda(constant);
    const tokens = new Sequences(device, [3000]);
    const tape = new Tape(device, { record: false });
    fusedSparseAttentionFrom(tape, inputsOf(tape, tokens.compressed(SPARSE).total, 3000), tokens, SPARSE, 2100);
    const { launches } = device;
    expect(names(launches)).toEqual([
      ...['compressed_pack', 'compressed_forward', 'select_blocks', 'selected_pack', 'window_pack', 'selected_union'],
    ]);
    const skipped = (kernel: string) => find(launches, kernel).values.at(-1) as number;
    // Tiles of 64 tokens are ranked, so the compressed branch begins at token 2,048; tiles have 128 rows of six heads.
    expect(skipped('select_blocks')).toBe(32);
    expect(skipped('compressed_forward')).toBe((2048 * 6) / 128);
    expect(skipped('selected_union')).toBe(100); // of 21 tokens
    expect(find(launches, 'select_blocks').shape.grid).toEqual([47 - 32, 2]);
    expect(find(launches, 'selected_union').shape.grid).toEqual([143 - 100, 2]);
    expect(find(launches, 'compressed_forward').shape.grid).toEqual([
      Math.ceil((Math.ceil((3000 * 6) / 128) - 96) / 2),
      2,
    ]);
    tape.end();
  });

  it('add to existing gradients through a temporary', () => {
    const adds = names(trace({}, { uses: 2 }).backward).filter((name) => name === 'add_forward');
    expect(adds).toHaveLength(8);
  });

  it('keep only what the backward pass reads', () => {
    const { kept } = trace();
    const bytes = TOKENS * (12 * 32 * 2 * 4 + 12 * 4 * 3 + 2 * 16 * 4 * 2); // four outputs, lse, selections and lists
    expect(kept).toBeGreaterThan(bytes);
    expect(kept).toBeLessThan(bytes * 1.2); // blocks of the pool are rounded up
    const { kept: inferred } = trace({}, { record: false });
    expect(inferred).toBeLessThan(TOKENS * 12 * 32 * 2 * 1.2); // the output alone
  });
});

describe('launches of fused dense attention', () => {
  it('fit their parameters, and all memory goes back', () => {
    const device = new RecordingCuda(constant);
    const sequences = new Sequences(device, LENGTHS);
    const before = device.pool.bytesInUse;
    const tape = new Tape(device);
    const { q, kSel: k, vSel: v } = inputsOf(tape, 0);
    const out = fusedDenseAttention(tape, { q, k, v }, sequences);
    expect(out.shape).toEqual([TOKENS, 12, 32]);
    tape.backward(out, tape.zeros(out.shape, 'bf16'));
    tape.end();
    expect(device.pool.bytesInUse).toBe(before);
    expect(names(device.launches)).toEqual([
      ...['window_pack', 'window_forward', 'dense_prepare', 'window_backward', 'window_pack', 'window_query_gradient'],
    ]);
    expect(device.launches[0].macros).toMatchObject({ WINDOW: 2 ** 30, LONGEST_FIRST: 1, DV: 32 });
  });
});
