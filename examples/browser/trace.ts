/** A trace as the dashboard's reader shows it. */
import type { TraceSource } from '../../src/dashboard/web/reader-page.js';
import type { TraceReaders, TraceText, TraceToken } from '../../src/evaluate/trace-view.js';
import type { TraceArrays } from './protocol.js';

const BRANCHES = 3;

export function traceSource(key: string, trace: TraceArrays): TraceSource {
  return {
    key,
    text: async () => textOf(trace),
    token: async (index) => tokenOf(trace, index),
    readers: async (block) => readersOf(trace, block),
  };
}

function textOf({ pieces, logprobs, layers, groups, slots, blockSize, window, selected }: TraceArrays): TraceText {
  const perLayer = pieces.length * groups * slots;
  const counts = Array.from({ length: layers }, (_, layer) => {
    const blocks = new Array<number>(Math.ceil(pieces.length / blockSize)).fill(0);
    for (const block of selected.subarray(layer * perLayer, (layer + 1) * perLayer)) if (block >= 0) blocks[block]++;
    return blocks;
  });
  const known = Array.from(logprobs, (value) => (Number.isNaN(value) ? null : value));
  return {
    ...{ layers, groups, slots, blockSize, window, pieces, counts },
    logprobs: known,
    model: 'this page',
    step: null,
  };
}

function tokenOf({ pieces, layers, groups, slots, selected, gates }: TraceArrays, index: number): TraceToken {
  const places = (layer: number) =>
    Array.from({ length: groups }, (_, group) => (layer * pieces.length + index) * groups + group);
  const layersOf = <Value>(of: (place: number) => Value) =>
    Array.from({ length: layers }, (_, layer) => places(layer).map(of));
  return {
    selected: layersOf((place) => {
      const blocks = selected.subarray(place * slots, (place + 1) * slots);
      return Array.from(blocks.filter((block) => block >= 0)).sort((a, b) => a - b);
    }),
    gates: layersOf((place) =>
      Array.from(gates.subarray(place * BRANCHES, (place + 1) * BRANCHES), (part) => part / 255),
    ),
  };
}

function readersOf({ pieces, layers, groups, slots, selected }: TraceArrays, block: number): TraceReaders {
  const counts = new Map<number, number>();
  const perToken = groups * slots;
  for (let layer = 0; layer < layers; layer++)
    for (let token = 0; token < pieces.length; token++) {
      const at = (layer * pieces.length + token) * perToken;
      const count = selected.subarray(at, at + perToken).filter((one) => one === block).length;
      if (count > 0) counts.set(token, (counts.get(token) ?? 0) + count);
    }
  return { readers: [...counts].sort(([a], [b]) => a - b) };
}
