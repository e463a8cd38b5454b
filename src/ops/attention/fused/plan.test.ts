import { describe, expect, it } from 'vitest';
import { sourceConstants } from '../../../device/cuda/testing/source-constants.js';
import {
  batchRefusal,
  type FusedShape,
  fusedMacros,
  gatherRefusal,
  gatherShared,
  headsRefusal,
  mayUseOuter,
  PLANNED,
  packedTileBytes,
  planBatch,
  rowLanes,
  scoringSplit,
  selectedLimits,
  shapeRefusal,
  sharedBytes,
  sharedLimit,
  unionTokens,
} from './plan.js';

const PAPER: FusedShape = {
  heads: { heads: 12, groups: 2, dk: 64, dv: 64 },
  sparse: { l: 32, d: 16, lSel: 64, nSel: 16, w: 512 },
};
const SHARED = { queryMajor: false, mmaSync: false };
const shaped = (heads: Partial<FusedShape['heads']>, sparse: Partial<FusedShape['sparse']> = {}): FusedShape => ({
  heads: { ...PAPER.heads, ...heads },
  sparse: { ...PAPER.sparse, ...sparse },
});

/** The formulas of the kernels' own harness (dev/cuda/nsa.h), in its words. */
function harness(lengths: readonly number[], { heads: { heads: H, groups: G }, sparse: s }: FusedShape) {
  const h = H / G;
  let [T, Tc, NB, longest] = [0, 0, 0, 0];
  for (const L of lengths) {
    T += L;
    Tc += L < s.l ? 0 : Math.trunc((L - s.l) / s.d) + 1;
    NB += Math.trunc((L + s.lSel - 1) / s.lSel);
    longest = Math.max(longest, L);
  }
  const wish = longest <= 16384 ? 2048 : 8192;
  const stretch = Math.max(wish, Math.trunc((Math.trunc((T + 127) / 128) + 15) / 16) * 16);
  const stretches = Math.trunc((T + stretch - 1) / stretch);
  const lists = NB * G;
  const tiles = (per: number) => lengths.reduce((n, L) => n + Math.trunc((L * h + per - 1) / per), 0);
  const tokenTiles = (per: number) => lengths.reduce((n, L) => n + Math.trunc((L + per - 1) / per), 0);
  return {
    counts: {
      tokens: T,
      compressed: Tc,
      blocks: NB,
      longest,
      lists,
      stretch,
      stretches,
      words: Math.trunc((Math.trunc((longest + s.lSel - 1) / s.lSel) + 31) / 32),
      choices: T * G * s.nSel,
      forwardItems: Math.trunc((T * G * s.nSel) / 128) + Math.min(lists * stretches, T * G * s.nSel),
      backwardItems: Math.trunc((T * G * s.nSel) / 512) + NB * G,
      compressedTiles: lengths.reduce(
        (n, L) => n + Math.trunc(((L < s.l ? 0 : Math.trunc((L - s.l) / s.d) + 1) + 63) / 64),
        0,
      ),
      compressedChunks: Math.trunc((longest + 511) / 512),
    },
    ring: 4 * stretch * H * Math.max(1, s.nSel - 3),
    tiles,
    tokenTiles,
  };
}

const BATCHES = [
  [],
  [0],
  [1],
  [31],
  [32],
  [65],
  [512],
  [513],
  [1300, 0, 7, 577],
  [65_536],
  [30_000, 1, 35_535],
  Array(8).fill(8192),
  Array(300).fill(4096),
];
const SHAPES = [
  PAPER,
  shaped({ heads: 10, dk: 128, dv: 128 }, { l: 16, d: 8, nSel: 5, w: 100 }),
  shaped({ heads: 3, groups: 3, dk: 32, dv: 32 }, { l: 8, d: 4, lSel: 16, nSel: 3 }),
  shaped({ heads: 16, groups: 1 }, { lSel: 48, nSel: 10 }),
];

describe('the plan of a batch', () => {
  it.each(BATCHES.map((lengths) => [lengths.slice(0, 4).join(' '), lengths] as const))(
    'has the counts of the harness: %s',
    (_, lengths) => {
      for (const shape of SHAPES) {
        const plan = planBatch(lengths, shape);
        const expected = harness(lengths, shape);
        expect(plan).toMatchObject(expected.counts);
        // The ring is no longer than the batch: the harness has the whole of it always.
        expect(plan.partialRows).toBe(
          Math.min(expected.ring, expected.counts.tokens * shape.heads.heads * Math.max(1, shape.sparse.nSel - 3)),
        );
        for (const per of [21, 64, 128, 192]) {
          expect(plan.rowTiles(per)).toBe(expected.tiles(per));
          expect(plan.tokenTiles(per)).toBe(expected.tokenTiles(per));
        }
      }
    },
  );

  it('never has more stretches than there are places for', () => {
    expect(planBatch(Array(300).fill(8192), PAPER).stretches).toBeLessThanOrEqual(128);
  });
});

describe('sizes', () => {
  it('of shared memory are those the kernels export', () => {
    // Read from compiled code; the test on the GPU compares all of them for all its shapes.
    expect(sharedBytes(PAPER, SHARED, 21)).toEqual({
      compressed_forward_shared: 99_456,
      compressed_backward_shared: 69_632,
      compressed_window_query_gradient_shared: 115_840,
      window_forward_shared: 83_072,
      window_backward_shared: 69_632,
      window_query_gradient_shared: 115_840,
      select_blocks_shared: 68_096,
      selected_union_shared: 84_676,
      selected_dense_shared: 83_072,
      selected_outer_shared: 48_128,
      selected_backward_shared: 74_752,
    });
    const queryMajor = { queryMajor: true, mmaSync: false };
    expect(sharedBytes(PAPER, queryMajor, 1).selected_union_shared).toBe(75_024);
    expect(sharedBytes(shaped({}, { lSel: 48, nSel: 10 }), SHARED, 21).select_blocks_shared).toBe(88_576);
  });

  it('of wide and of many heads', () => {
    const sizes = (heads: Partial<FusedShape['heads']>) => sharedBytes(shaped(heads), SHARED, 8);
    expect(sizes({ heads: 64, groups: 4, dk: 128, dv: 128 })).toMatchObject({
      selected_dense_shared: 164_992,
      selected_outer_shared: 75_776,
    });
    expect(sizes({ heads: 16, groups: 1 }).selected_outer_shared).toBe(43_008);
  });

  it('let heads share a tile of queries where all of a group do not fit', () => {
    const split = (heads: number, dk: number) => scoringSplit({ heads, groups: 1, dk, dv: 64 });
    expect([split(6, 64), split(16, 64), split(10, 128)]).toEqual([1, 1, 1]);
    expect([split(11, 128), split(16, 128), split(8, 192), split(16, 192)]).toEqual([2, 2, 2, 4]);
  });

  it('of rows and tiles', () => {
    expect([16, 32, 48, 64, 96, 128, 192].map(rowLanes)).toEqual([4, 4, 8, 8, 16, 16, 32]);
    expect(packedTileBytes(PAPER.heads)).toBe(2 * 2 * 8192);
    expect(packedTileBytes({ heads: 4, groups: 1, dk: 192, dv: 96 })).toBe(5 * 8192);
  });

  it('fill a tile of the union with tokens, as far as their lists fit', () => {
    const limit = sharedLimit(90);
    expect(unionTokens(PAPER, SHARED, limit)).toBe(21);
    expect(unionTokens(PAPER, { ...SHARED, queryMajor: true }, limit)).toBe(1);
    expect(unionTokens(shaped({ heads: 16, groups: 1 }), SHARED, limit)).toBe(8);
    const crowded = shaped({ heads: 2, groups: 2 }, { nSel: 64 });
    expect(unionTokens(crowded, SHARED, limit)).toBe(64);
    expect(sharedBytes(crowded, SHARED, 64).selected_union_shared).toBeLessThan(limit);
    expect(selectedLimits(PAPER, 21, false)).toEqual({ union: 50, gather: 0 });
    expect(selectedLimits(PAPER, 21, true)).toEqual({ union: 36, gather: 150 });
    expect(selectedLimits(crowded, 64, false).union).toBe(50 * 4 * 0.5);
  });
});

describe('tile-gather', () => {
  it('is for Hopper, heads and blocks of 64, up to 6 heads a group and 16 blocks a token', () => {
    const refusal = (shape: FusedShape, build = SHARED, architecture = 90, longest = 8192) =>
      gatherRefusal(shape, build, architecture, longest);
    expect(refusal(PAPER)).toBeNull();
    expect(refusal(PAPER, SHARED, 100)).toContain('Hopper');
    expect(refusal(PAPER, { ...SHARED, mmaSync: true })).toContain('Hopper');
    expect(refusal(shaped({ dk: 128 }))).toContain('of 64');
    expect(refusal(shaped({}, { lSel: 32 }))).toContain('of 64');
    expect(refusal(shaped({ heads: 16, groups: 1 }))).toContain('6 heads');
    expect(refusal(shaped({}, { nSel: 17 }))).toContain('16 blocks');
    expect(refusal(PAPER, SHARED, 90, 262_144)).toBeNull();
    expect(refusal(PAPER, SHARED, 90, 262_145)).toContain('up to 262144 tokens');
  });

  it('leaves nothing to KV-outer up to 9,600 tokens', () => {
    const limits = selectedLimits(PAPER, 21, true);
    expect(mayUseOuter('adaptive', PAPER, limits, 9600)).toBe(false);
    expect(mayUseOuter('adaptive', PAPER, limits, 9601)).toBe(true);
    expect(mayUseOuter('adaptive', PAPER, selectedLimits(PAPER, 21, false), 3201)).toBe(true);
    expect(mayUseOuter('outer', PAPER, limits, 100)).toBe(true);
    expect(mayUseOuter('gather', PAPER, limits, 65_536)).toBe(false);
  });

  it('has room for the masks of all candidates in its ring: three words for each', () => {
    const ring = 4 * packedTileBytes({ ...PAPER.heads, groups: 1 });
    expect((262_144 / 64) * 3 * 4).toBeLessThanOrEqual(ring);
  });

  it('fits the shared memory wherever it is not refused', () => {
    expect(gatherShared(PAPER)).toBeLessThanOrEqual(sharedLimit(90));
    expect(gatherShared(shaped({ heads: 1, groups: 1 }))).toBeLessThan(gatherShared(PAPER));
  });
});

describe('macros', () => {
  it('name the shape and the build', () => {
    expect(fusedMacros(PAPER, SHARED, 21)).toEqual({
      HEADS: 12,
      GROUPS: 2,
      DK: 64,
      DV: 64,
      CMP_L: 32,
      CMP_D: 16,
      SEL_L: 64,
      SEL_N: 16,
      WINDOW: 512,
      UNION_TOKENS: 21,
    });
    expect(fusedMacros(PAPER, { queryMajor: true, mmaSync: true }, 1)).toMatchObject({
      UNION_TOKENS: 1,
      UNION_WARPGROUPS: 1,
      MMA_SYNC: 1,
    });
    expect(fusedMacros(shaped({}, { w: 2 ** 40 }), SHARED, 21)).toMatchObject({ WINDOW: 2 ** 30 });
  });
});

describe('refusals', () => {
  it.each([
    [PAPER, 90],
    [PAPER, 80],
    [PAPER, 100],
    [shaped({ heads: 16, groups: 1 }), 90],
    [shaped({ heads: 64, groups: 4, dk: 128, dv: 128 }), 90],
    [shaped({ heads: 16, groups: 1, dk: 192, dv: 128 }), 90],
    [shaped({ heads: 4, dk: 192, dv: 128 }), 90],
    [shaped({ heads: 4, groups: 4, dk: 16, dv: 48 }, { l: 8, d: 4, lSel: 16, nSel: 3, w: 1 }), 90],
    [shaped({ dk: 128, dv: 128 }), 80],
  ])('there are none for %o on %i', (shape, architecture) => {
    expect(shapeRefusal(shape, SHARED, architecture)).toBeNull();
  });

  it.each([
    ['34 heads in 2 groups', shaped({ heads: 34 })],
    ['d_k 24', shaped({ dk: 24 })],
    ['d_k 208', shaped({ dk: 208 })],
    ['d_v 144', shaped({ dv: 144 })],
    ['d_v 8', shaped({ dv: 8 })],
    ['l_sel 128', shaped({}, { lSel: 128 })],
    ['l_sel 8', shaped({}, { l: 8, d: 8, lSel: 8 })],
    ['n_sel 65', shaped({}, { nSel: 65 })],
    ['l 32 is 32 strides of d 1', shaped({}, { d: 1 })],
  ])('name %s', (reason, shape) => {
    expect(shapeRefusal(shape, SHARED, 90)).toContain(reason);
  });

  it('name a kernel that needs more shared memory than the GPU has', () => {
    expect(shapeRefusal(PAPER, SHARED, 89)).toBe(
      'compressed_window_query_gradient needs 115840 bytes of shared memory, and this GPU has 100352',
    );
    expect(shapeRefusal(shaped({ heads: 4, dk: 192, dv: 128 }), SHARED, 80)).toContain('bytes of shared memory');
  });

  it('of heads alone are enough for dense attention', () => {
    expect(headsRefusal(PAPER.heads)).toBeNull();
    expect(headsRefusal({ ...PAPER.heads, groups: 5 })).toContain('12 heads in 5 groups');
  });

  it('name a batch that is too large', () => {
    const refusal = (total: number, longest: number) => batchRefusal(PAPER, { total, longest }, sharedLimit(90));
    expect(refusal(2 ** 20, 2 ** 20)).toBeNull();
    expect(refusal(2 ** 26, 2 ** 16)).toBe('67108864 tokens: queries and choices of a batch are counted in 32 bits');
    expect(refusal(2 ** 22, 2 ** 22)).toContain('bitmap does not fit');
  });
});

it('has the constants of the sources', () => {
  const { CMP_CHUNK: _, ...planned } = PLANNED;
  const names = Object.keys(planned) as (keyof typeof planned)[];
  expect(sourceConstants(new URL('./plan.cuh', import.meta.url), names)).toEqual(planned);
  const { CMP_CHUNK } = sourceConstants(new URL('./compressed.cu', import.meta.url), ['CMP_CHUNK']);
  expect(CMP_CHUNK).toBe(PLANNED.CMP_CHUNK);
});
