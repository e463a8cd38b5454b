/**
 * A trace: what a model read while it went through a text. For every token it holds the blocks that each layer and group
 * selected, the gates of the branches, and the log-probability of the token that followed. The dashboard's reader shows it.
 */
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import type { SparseOptions } from '../ops/attention/nsa.js';
import { Tape } from '../tensor/tape.js';

/** Format name; readers of traces check it first. */
export const TRACE_FORMAT = 'trefoil-trace-1';

/** Blocks are stored as int16, which bounds the length of a text. */
const MAX_BLOCKS = 32_767;

export interface Trace {
  readonly tokens: readonly number[];
  /** Log-probability of the token after each token [T]; NaN for the last. */
  readonly logprobs: Float32Array;
  /** Selected blocks [L, T, G, nSel]; -1 marks an empty slot. */
  readonly selected: Int16Array;
  /** Share of each branch [L, T, G, 3] in 255ths: the mean over the heads of a group, normalised to sum 1. */
  readonly gates: Uint8Array;
}

/** Reads `tokens` in one pass. `onLayer` is called with the number of layers that are done. */
export function traceText(
  model: LanguageModel,
  tokens: readonly number[],
  kernels: SparseOptions = {},
  onLayer: (done: number) => void = () => {},
): Trace {
  const { device, shape } = model;
  const { nLayers: layers, nKvGroups: groups, nHeads: heads } = shape;
  const { nSel: slots, lSel } = shape.nsa;
  if (shape.attention !== 'nsa') throw new UsageError('a model with dense attention selects nothing: no trace');
  const length = tokens.length;
  if (length / lSel > MAX_BLOCKS) throw new UsageError(`a trace has at most ${MAX_BLOCKS * lSel} tokens`);
  // A layer with only a window selects nothing, and its window has the whole weight.
  const selected = new Int16Array(layers * length * groups * slots).fill(-1);
  const gates = new Uint8Array(layers * length * groups * 3).map((_, i) => (i % 3 === 2 ? 255 : 0));
  const observer = {
    selected: (layer: number, blocks: { read(): ArrayLike<number> }) => {
      selected.set(blocks.read(), layer * length * groups * slots);
    },
    gates: (layer: number, values: { read(): ArrayLike<number> }) => {
      gates.set(groupShares(values.read(), length, heads, groups), layer * length * groups * 3);
      onLayer(layer + 1);
    },
  };
  const tape = new Tape(device, { record: false });
  const logprobs = new Float32Array(length).fill(Number.NaN);
  try {
    const ids = tape.from(tokens, [length], 'i32');
    // The target after the last token is unknown; any will do, its loss is not used.
    const targets = tape.from([...tokens.slice(1), tokens[length - 1]], [length], 'i32');
    const losses = model.losses(ids, targets, { lengths: [length], kernels, observer });
    logprobs.set(Array.from(losses.read(), (loss) => -loss).slice(0, -1));
    losses.free();
  } finally {
    tape.end();
  }
  return { tokens, logprobs, selected, gates };
}

/** `gates` [T, H, 3] → shares [T, G, 3] in 255ths. */
function groupShares(gates: ArrayLike<number>, tokens: number, heads: number, groups: number): Uint8Array {
  const perGroup = heads / groups;
  const shares = new Uint8Array(tokens * groups * 3);
  for (let row = 0; row < tokens * groups; row++) {
    const sums = [0, 0, 0];
    for (let i = 3 * perGroup * row; i < 3 * perGroup * (row + 1); i++) sums[i % 3] += gates[i];
    const total = sums[0] + sums[1] + sums[2];
    for (let branch = 0; branch < 3; branch++) shares[3 * row + branch] = Math.round((255 * sums[branch]) / total);
  }
  return shares;
}
