/**
 * How much of its own attention a choice of blocks covers. The attention is the softmax of a token over all earlier tokens,
 * also those it did not read. Beside the choice stand the best one of as many blocks and a random one; forced blocks are
 * in all three. Computed on the host in float64, for a sample of tokens.
 */
import type { Tensor } from '../../tensor/tensor.js';
import { forcedBlocks, type SparseShape } from './shape.js';

/** Shares of the attention of a token and a group; 1 is all of it. */
export interface Coverage {
  readonly forced: number;
  /** Expected, with the slots that are left given to any blocks. */
  readonly random: number;
  readonly chosen: number;
  readonly best: number;
}

/** The coverage of one token and group, and the same by distance. */
export interface Covered extends Coverage {
  /** Bin 0: the own block; bin b: 2^(b-1) to 2^b - 1 blocks back. `all` is the attention in the bin. */
  readonly distance: readonly (Coverage & { readonly all: number })[];
}

/**
 * Queries and keys of the selected branch of a layer, or of dense attention: `q` [T, H, dk], `k` [T, G, dk].
 *
 * @opaque
 */
export interface AttendedWith {
  readonly q: Tensor;
  readonly k: Tensor;
  /** i32 [T, G, nSel]; null for dense attention, which chooses nothing. */
  readonly selected: Tensor | null;
}

/** A token of packed sequences and the first token of its sequence. */
export interface SampledToken {
  readonly token: number;
  readonly start: number;
}

/** At most `most` tokens, evenly spread over those that have more blocks than they may choose. */
export function tokensToCover(starts: ArrayLike<number>, { lSel, nSel }: SparseShape, most: number): SampledToken[] {
  const free = Array.from({ length: starts.length - 1 }, (_, s) =>
    Math.max(0, starts[s + 1] - starts[s] - nSel * lSel),
  );
  const total = free.reduce((sum, count) => sum + count, 0);
  const count = Math.min(most, total);
  return Array.from({ length: count }, (_, i) => {
    let index = Math.floor(((i + 0.5) * total) / count);
    let sequence = 0;
    while (index >= free[sequence]) index -= free[sequence++];
    return { token: starts[sequence] + nSel * lSel + index, start: starts[sequence] };
  });
}

/** The coverage of each token and group, [tokens][groups]. Without a selection `chosen` is NaN. */
export function coverageOf({ q, k, selected }: AttendedWith, tokens: readonly SampledToken[], sparse: SparseShape) {
  const [, heads, dk] = q.shape;
  const groups = k.shape[1];
  const perGroup = heads / groups;
  return tokens.map(({ token, start }) => {
    const queries = q.rows(token, token + 1).read();
    const keys = k.rows(start, token + 1).read();
    const blocks = selected?.rows(token, token + 1).read() ?? null;
    return Array.from({ length: groups }, (_, group): Covered => {
      const mass = new Float64Array(Math.floor((token - start) / sparse.lSel) + 1);
      for (let head = group * perGroup; head < (group + 1) * perGroup; head++) {
        const query = queries.subarray(head * dk, (head + 1) * dk);
        addBlockMass(mass, query, keys, { group, groups, lSel: sparse.lSel, share: 1 / perGroup });
      }
      const own = blocks && Array.from(blocks.subarray(group * sparse.nSel, (group + 1) * sparse.nSel));
      return coverageOfMass(mass, own?.filter((block) => block >= 0) ?? null, sparse);
    });
  });
}

interface MassPlace {
  readonly group: number;
  readonly groups: number;
  readonly lSel: number;
  readonly share: number;
}

/** Adds the softmax of one head over all its keys to the blocks they lie in. */
function addBlockMass(mass: Float64Array, query: ArrayLike<number>, keys: ArrayLike<number>, place: MassPlace): void {
  const { group, groups, lSel, share } = place;
  const dk = query.length;
  const scores = new Float64Array(keys.length / (groups * dk));
  let most = Number.NEGATIVE_INFINITY;
  for (let i = 0; i < scores.length; i++) {
    const at = (i * groups + group) * dk;
    let score = 0;
    for (let c = 0; c < dk; c++) score += query[c] * keys[at + c];
    scores[i] = score / Math.sqrt(dk);
    most = Math.max(most, scores[i]);
  }
  let total = 0;
  for (let i = 0; i < scores.length; i++) {
    scores[i] = Math.exp(scores[i] - most);
    total += scores[i];
  }
  for (let i = 0; i < scores.length; i++) mass[Math.floor(i / lSel)] += (share * scores[i]) / total;
}

/** The coverage of a choice, given the attention in each block. Without `selected` the rule's forced blocks are those of `best`. */
export function coverageOfMass(
  mass: Float64Array,
  selected: readonly number[] | null,
  sparse: Pick<SparseShape, 'nSel' | 'initBlocks' | 'localBlocks'>,
): Covered {
  const { initBlocks, localBlocks } = forcedBlocks(sparse);
  const own = mass.length - 1;
  const isForced = (block: number) => block < initBlocks || block > own - localBlocks;
  const candidates = Array.from(mass.keys()).filter((block) => !isForced(block));
  const slots = Math.min(candidates.length, (selected?.length ?? sparse.nSel) - (mass.length - candidates.length));
  const ranked = candidates.toSorted((a, b) => mass[b] - mass[a] || a - b);
  const best = new Set(ranked.slice(0, slots));
  const chosen = selected && new Set(selected);
  const distance: { -readonly [Name in keyof Coverage | 'all']: number }[] = [];
  for (const [block, share] of mass.entries()) {
    const bin = block === own ? 0 : Math.floor(Math.log2(own - block)) + 1;
    while (distance.length <= bin)
      distance.push({ all: 0, forced: 0, random: 0, chosen: chosen ? 0 : Number.NaN, best: 0 });
    const into = distance[bin];
    const forced = isForced(block);
    into.all += share;
    into.forced += forced ? share : 0;
    into.random += forced ? share : (share * slots) / candidates.length;
    into.best += forced || best.has(block) ? share : 0;
    if (chosen?.has(block)) into.chosen += share;
  }
  const sum = (name: keyof Coverage) => distance.reduce((total, bin) => total + bin[name], 0);
  return { forced: sum('forced'), random: sum('random'), chosen: sum('chosen'), best: sum('best'), distance };
}

/** The mean of several coverages. */
export function meanCoverage(all: readonly Coverage[]): Coverage {
  const mean = (name: keyof Coverage) => all.reduce((sum, one) => sum + one[name], 0) / all.length;
  return { forced: mean('forced'), random: mean('random'), chosen: mean('chosen'), best: mean('best') };
}
