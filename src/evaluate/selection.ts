/** Statistics of a model reading a text: which blocks it selects, how far back they are, and the weights of its branches. */
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { sparseLayers, sparseShapeOf } from '../model/shape.js';
import { type Coverage, type Covered, coverageOf, meanCoverage, tokensToCover } from '../ops/attention/coverage.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { Tape } from '../tensor/tape.js';

type Shares = Record<'cmp' | 'sel' | 'win', number>;

export interface LayerSelection {
  readonly layer: number;
  /** Share of (token, group) that selected the block `i` blocks back, of all that have one; index 0 is their own block. */
  readonly rate_by_distance: readonly number[];
  /** Mean shares of the branches, gates normalised to sum 1. */
  readonly gates: Shares;
  /** The same by position, per selection block. */
  readonly gates_by_block: readonly Shares[];
  readonly selection_map: SelectionMap;
}

/** Which blocks the tokens of a layer selected. */
export interface SelectionMap {
  /** Consecutive tokens of one row. */
  readonly tokens_per_row: number;
  /** [row, block]: share of the row's (token, group) pairs that selected the block. */
  readonly share: readonly (readonly number[])[];
}

/** How much of the attention the chosen blocks of a layer cover (ops/attention/coverage.ts), means over the sampled tokens. */
export interface LayerCoverage extends Coverage {
  readonly layer: number;
  readonly groups: readonly Coverage[];
  /** By distance of the blocks, from `from` to `to` blocks back; all shares are of the whole attention. */
  readonly by_distance: readonly (Coverage & { readonly from: number; readonly to: number; readonly all: number })[];
}

export interface ModelCoverage {
  /** Tokens that were sampled. */
  readonly tokens: number;
  /** Blocks that a token chooses, and their tokens. */
  readonly n_sel: number;
  readonly l_sel: number;
  readonly layers: readonly LayerCoverage[];
}

/**
 * Reads `tokens` in one pass and compares the blocks that a sample of `most` tokens chose with where their attention would
 * go. Dense attention chooses nothing: `chosen` is null, and `best` says how much that many blocks could hold.
 */
export function inspectCoverage(
  model: LanguageModel,
  tokens: readonly number[],
  most: number,
  kernels: SparseOptions = {},
): ModelCoverage {
  const { shape } = model;
  const sparse = sparseShapeOf(shape);
  const sample = tokensToCover([0, tokens.length], sparse, most);
  if (sample.length === 0)
    throw new UsageError(
      `nothing to choose in ${tokens.length} tokens: every token reads all of its blocks; give a text of more than ` +
        `${sparse.nSel * sparse.lSel} tokens (nsa.n_sel * nsa.l_sel)`,
    );
  const layers: LayerCoverage[] = [];
  const tape = new Tape(model.device, { record: false });
  try {
    model.logits(tape, tape.from(tokens, [tokens.length], 'i32'), [tokens.length - 1], {
      lengths: [tokens.length],
      kernels,
      observer: {
        attended: (layer, given) => void layers.push(layerCoverage(layer, coverageOf(given, sample, sparse))),
      },
    });
  } finally {
    tape.end();
  }
  return { tokens: sample.length, n_sel: sparse.nSel, l_sel: sparse.lSel, layers };
}

/** `covered` [tokens][groups]. */
function layerCoverage(layer: number, covered: readonly (readonly Covered[])[]): LayerCoverage {
  const all = covered.flat();
  const bins = Math.max(...all.map(({ distance }) => distance.length));
  const nothing = { all: 0, forced: 0, random: 0, chosen: 0, best: 0 };
  return {
    layer,
    ...meanCoverage(all),
    groups: covered[0].map((_, group) => meanCoverage(covered.map((groups) => groups[group]))),
    by_distance: Array.from({ length: bins }, (_, bin) => {
      const inBin = all.map(({ distance }) => distance[bin] ?? nothing);
      const [from, to] = bin === 0 ? [0, 0] : [2 ** (bin - 1), 2 ** bin - 1];
      return { from, to, all: inBin.reduce((sum, one) => sum + one.all, 0) / all.length, ...meanCoverage(inBin) };
    }),
  };
}

/** Reads `tokens` in one pass; returns an entry for each layer with sparse attention. */
export function inspectSelection(
  model: LanguageModel,
  tokens: readonly number[],
  kernels: SparseOptions = {},
): LayerSelection[] {
  const { device, shape } = model;
  if (shape.attention !== 'nsa')
    throw new UsageError('a model with dense attention selects nothing: it sees every token');
  const tape = new Tape(device, { record: false });
  const [rates, gates, maps]: [number[][], Shares[][], SelectionMap[]] = [[], [], []];
  const observer = {
    selected: (layer: number, selected: { read(): ArrayLike<number> }) => {
      const blocks = selected.read();
      rates[layer] = rateByDistance(blocks, tokens.length, shape.nKvGroups, shape.nsa);
      maps[layer] = selectionMap(blocks, tokens.length, shape.nKvGroups, shape.nsa);
    },
    gates: (layer: number, values: { read(): ArrayLike<number> }) => {
      gates[layer] = sharesByBlock(values.read(), tokens.length, shape.nHeads, shape.nsa.lSel);
    },
  };
  try {
    model.logits(tape, tape.from(tokens, [tokens.length], 'i32'), [tokens.length - 1], {
      lengths: [tokens.length],
      kernels,
      observer,
    });
  } finally {
    tape.end();
  }
  return sparseLayers(shape).map((layer) => ({
    layer,
    rate_by_distance: rates[layer],
    gates: weightedMean(gates[layer], tokens.length, shape.nsa.lSel),
    gates_by_block: gates[layer],
    selection_map: maps[layer],
  }));
}

/** `selected` [T, G, nSel]. */
export function rateByDistance(
  selected: ArrayLike<number>,
  tokens: number,
  groups: number,
  { lSel, nSel }: { readonly lSel: number; readonly nSel: number },
): number[] {
  const blocks = Math.ceil(tokens / lSel);
  const [chosen, possible] = [new Array<number>(blocks).fill(0), new Array<number>(blocks).fill(0)];
  for (let token = 0; token < tokens; token++) {
    const current = Math.floor(token / lSel);
    for (let distance = 0; distance <= current; distance++) possible[distance] += groups;
    const first = token * groups * nSel;
    for (let slot = first; slot < first + groups * nSel; slot++)
      if (selected[slot] >= 0) chosen[current - selected[slot]] += 1;
  }
  return chosen.map((count, distance) => count / possible[distance]);
}

const MAP_ROWS = 128;

/** `selected` [T, G, nSel]; -1 marks an empty slot. At most 128 rows. */
function selectionMap(
  selected: ArrayLike<number>,
  tokens: number,
  groups: number,
  { lSel, nSel }: { readonly lSel: number; readonly nSel: number },
): SelectionMap {
  const tokensPerRow = Math.ceil(tokens / MAP_ROWS);
  const blocks = Math.ceil(tokens / lSel);
  const counts = Array.from({ length: Math.ceil(tokens / tokensPerRow) }, () => new Array<number>(blocks).fill(0));
  for (let slot = 0; slot < tokens * groups * nSel; slot++) {
    const block = selected[slot];
    if (block >= 0) counts[Math.floor(slot / (groups * nSel) / tokensPerRow)][block] += 1;
  }
  const share = counts.map((row, r) => {
    const pairs = groups * Math.min(tokensPerRow, tokens - r * tokensPerRow);
    return row.map((count) => Number((count / pairs).toFixed(4)));
  });
  return { tokens_per_row: tokensPerRow, share };
}

/** `gates` [T, H, 3]. */
export function sharesByBlock(gates: ArrayLike<number>, tokens: number, heads: number, size: number): Shares[] {
  const sums = Array.from({ length: Math.ceil(tokens / size) }, () => ({ cmp: 0, sel: 0, win: 0 }));
  for (let row = 0; row < tokens * heads; row++) {
    const [cmp, sel, win] = [gates[3 * row], gates[3 * row + 1], gates[3 * row + 2]];
    const into = sums[Math.floor(row / heads / size)];
    const total = cmp + sel + win;
    into.cmp += cmp / total;
    into.sel += sel / total;
    into.win += win / total;
  }
  return sums.map((sum, block) => scaled(sum, 1 / (heads * Math.min(size, tokens - block * size))));
}

function weightedMean(blocks: readonly Shares[], tokens: number, size: number): Shares {
  const mean = { cmp: 0, sel: 0, win: 0 };
  for (const [block, shares] of blocks.entries()) {
    const weight = Math.min(size, tokens - block * size) / tokens;
    for (const name of ['cmp', 'sel', 'win'] as const) mean[name] += weight * shares[name];
  }
  return mean;
}

function scaled({ cmp, sel, win }: Shares, factor: number): Shares {
  return { cmp: cmp * factor, sel: sel * factor, win: win * factor };
}
