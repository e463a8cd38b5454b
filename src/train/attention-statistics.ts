/**
 * Statistics of sparse attention by layer: a line of attention.jsonl. Gates are summed on the device in every step anyway;
 * the selection is judged from a sample of token pairs.
 */
import type { Batch } from '../data/batch.js';
import { summarizeGates } from '../ops/attention/gate/op.js';
import { sampledToken } from '../ops/attention/selection-sample/op.js';
import { type ForcedBlocks, forcedBlocks } from '../ops/attention/shape.js';

/** Statistics of sparse attention. Arrays are by sparse layer; shares and overlaps are between 0 and 1. */
export interface AttentionStatistics {
  /** Indices of the layers in the arrays, if others have only a window (`model.layer_pattern`); absent if all are. */
  readonly sparse_layers?: readonly number[];
  /** Mean entropy of the gates in nats. */
  readonly entropy: readonly number[];
  /** Share of (token, head) rows whose gate has collapsed. */
  readonly collapse: readonly number[];
  /** Mean share of the compressed branch. */
  readonly cmp: readonly number[];
  /** Mean share of the selected branch. */
  readonly sel: readonly number[];
  /** Mean share of the window branch. */
  readonly win: readonly number[];
  /** Share of selected blocks that every token reads: by default the first, the previous and its own. */
  readonly forced: readonly number[];
  /** Share of a token's blocks that the previous token selected too. */
  readonly neighbours: readonly number[];
  /** Entry i: share of the blocks of sparse layer i + 1 that sparse layer i selected too, for the same token and group. */
  readonly layers: readonly number[];
  /** [layer][bin]: selected blocks by distance. Bin 0: the own block; bin b: 2^(b-1) to 2^b - 1 blocks back. */
  readonly distance: readonly (readonly number[])[];
}

/** What was collected for one layer in the first micro-batch of a step. */
export interface LayerSample {
  /** Of `gateSums`. */
  readonly gates: ArrayLike<number>;
  /** Of `sampleSelection`, [pairs, 2, G, n]. */
  readonly selection: ArrayLike<number>;
}

export interface SampleShape extends ForcedBlocks {
  readonly groups: number;
  /** Blocks per token and group. */
  readonly slots: number;
  /** Tokens per block. */
  readonly blockSize: number;
}

export function attentionStatistics(
  layers: readonly LayerSample[],
  shape: SampleShape,
  { cuSeqlens, inputs }: Pick<Batch, 'cuSeqlens' | 'inputs'>,
): AttentionStatistics {
  const { groups, slots, blockSize } = shape;
  const { initBlocks, localBlocks } = forcedBlocks(shape);
  const gates = layers.map((layer) => summarizeGates([layer.gates]));
  const width = groups * slots;
  const pairs = (layers[0]?.selection.length ?? 0) / (2 * width);
  const blocksOf = ({ selection }: LayerSample, row: number): number[] => {
    const blocks: number[] = [];
    for (let i = row * slots; i < (row + 1) * slots && selection[i] >= 0; i++) blocks.push(selection[i]);
    return blocks;
  };
  const sampled = layers.map((layer, l) => {
    const distance: number[] = [];
    let [total, forced, compared, same, above, shared] = [0, 0, 0, 0, 0, 0];
    for (let pair = 0; pair < pairs; pair++) {
      const token = sampledToken(pair, pairs, inputs.length);
      const start = sequenceStart(cuSeqlens, token);
      const own = Math.floor((token - start) / blockSize);
      for (let group = 0; group < groups; group++) {
        const row = (2 * pair + 1) * groups + group;
        const blocks = blocksOf(layer, row);
        total += blocks.length;
        for (const block of blocks) {
          const bin = block >= own ? 0 : Math.floor(Math.log2(own - block)) + 1;
          while (distance.length <= bin) distance.push(0);
          distance[bin] += 1;
          forced += Number(block < initBlocks || block > own - localBlocks);
        }
        // The first token of a sequence has no neighbour in it.
        if (token > start) {
          compared += blocks.length;
          same += common(blocks, blocksOf(layer, 2 * pair * groups + group));
        }
        if (l > 0) {
          above += blocks.length;
          shared += common(blocks, blocksOf(layers[l - 1], row));
        }
      }
    }
    return { distance, forced: share(forced, total), neighbours: share(same, compared), below: share(shared, above) };
  });
  return {
    entropy: gates.map(({ entropyMean }) => digits(entropyMean)),
    collapse: gates.map(({ collapseFraction }) => digits(collapseFraction)),
    cmp: gates.map(({ shares }) => digits(shares[0])),
    sel: gates.map(({ shares }) => digits(shares[1])),
    win: gates.map(({ shares }) => digits(shares[2])),
    forced: sampled.map(({ forced }) => forced),
    neighbours: sampled.map(({ neighbours }) => neighbours),
    layers: sampled.slice(1).map(({ below }) => below),
    distance: sampled.map(({ distance }) => distance),
  };
}

/** The first token of the sequence that holds `token`. */
function sequenceStart(cuSeqlens: ArrayLike<number>, token: number): number {
  let start = 0;
  for (let i = 0; i < cuSeqlens.length && cuSeqlens[i] <= token; i++) start = cuSeqlens[i];
  return start;
}

/** How many elements two ascending lists share. */
function common(a: readonly number[], b: readonly number[]): number {
  let [count, j] = [0, 0];
  for (const value of a) {
    while (j < b.length && b[j] < value) j++;
    count += Number(b[j] === value);
  }
  return count;
}

function share(part: number, whole: number): number {
  return whole === 0 ? 0 : digits(part / whole);
}

function digits(value: number): number {
  return Number(value.toFixed(4));
}
