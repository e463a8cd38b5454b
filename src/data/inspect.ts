/** Statistics of a source: number of documents, their lengths, and samples. */

import { ShardReader } from './shards/reader.js';
import { firstEpoch, LaneDocuments } from './sources/documents.js';
import { CorpusOrder } from './sources/order.js';
import { documentBytes, documentText } from './sources/reader.js';
import type { CorpusSpec } from './sources/spec.js';
import type { Tokenizer } from './tokenizer.js';

export interface Inspection {
  /** False if the source has more documents than were read. */
  readonly complete: boolean;
  readonly documents: number;
  readonly empty: number;
  readonly tokens: number;
  /** Null for shards, which hold no text. */
  readonly bytes: number | null;
  /** Tokens of a document, without its separator. */
  readonly lengths: {
    readonly min: number;
    readonly mean: number;
    readonly p50: number;
    readonly p95: number;
    readonly max: number;
  };
  /** Documents of [from, to) tokens, in powers of two. */
  readonly histogram: readonly { readonly from: number; readonly to: number; readonly documents: number }[];
  readonly samples: readonly { readonly tokens: number; readonly text: string }[];
}

export interface InspectOptions {
  readonly samples: number;
  readonly sampleLength: number;
}

/** The first `limit` documents of a corpus, in its order. */
export async function inspectCorpus(
  spec: CorpusSpec,
  tokenizer: Tokenizer,
  limit: number,
  { samples, sampleLength }: InspectOptions,
): Promise<Inspection> {
  const order = new CorpusOrder(spec);
  const lanes = Array.from(
    { length: spec.lanes },
    (_, lane) => new LaneDocuments(order, lane, { side: 'all', fetchAhead: false }),
  );
  const lengths: number[] = [];
  const shown: Inspection['samples'][number][] = [];
  let complete = true;
  let empty = 0;
  let bytes = 0;
  try {
    for await (const { placed } of firstEpoch(lanes)) {
      const text = documentText(placed.document);
      const { length } = tokenizer.encode(text);
      bytes += documentBytes(placed.document);
      if (length === 0) empty++;
      else lengths.push(length);
      if (length > 0 && shown.length < samples) shown.push({ tokens: length, text: text.slice(0, sampleLength) });
      complete = lengths.length + empty < limit;
      if (!complete) break;
    }
  } finally {
    await Promise.all(lanes.map((lane) => lane.close()));
  }
  const around = 1 + (tokenizer.documentStart?.length ?? 0);
  const tokens = lengths.reduce((sum, length) => sum + length + around, 0);
  return { complete, empty, tokens, bytes, ...describeLengths(lengths), samples: shown };
}

/** All documents of a folder of shards; hashes are compared while it is opened. */
export function inspectShards(
  folder: string,
  tokenizer: Tokenizer,
  { samples, sampleLength }: InspectOptions,
): Inspection {
  const reader = ShardReader.open(folder);
  try {
    const { documentStarts: starts, index } = reader;
    const lengthOf = (document: number) => (starts[document + 1] ?? index.tokens) - starts[document] - 1;
    const count = Math.min(samples, starts.length);
    const shown = Array.from({ length: count }, (_, sample) => {
      const document = Math.floor((sample * starts.length) / count);
      const tokens = reader.readTokens(starts[document], Math.min(lengthOf(document), sampleLength));
      return { tokens: lengthOf(document), text: tokenizer.decode(tokens).slice(0, sampleLength) };
    });
    const lengths = Float64Array.from(starts, (_, document) => lengthOf(document));
    return { complete: true, empty: 0, tokens: index.tokens, bytes: null, ...describeLengths(lengths), samples: shown };
  } finally {
    reader.close();
  }
}

function describeLengths(lengths: ArrayLike<number>): Pick<Inspection, 'documents' | 'lengths' | 'histogram'> {
  const sorted = Float64Array.from(lengths).sort();
  const count = sorted.length;
  const at = (share: number) => (count === 0 ? 0 : sorted[Math.min(count - 1, Math.floor(share * count))]);
  const buckets = new Map<number, number>();
  let sum = 0;
  for (const length of sorted) {
    sum += length;
    const bucket = length < 1 ? 0 : Math.floor(Math.log2(length));
    buckets.set(bucket, (buckets.get(bucket) ?? 0) + 1);
  }
  return {
    documents: count,
    lengths: { min: at(0), mean: count === 0 ? 0 : sum / count, p50: at(0.5), p95: at(0.95), max: at(1) },
    histogram: [...buckets].map(([bucket, documents]) => ({ from: 2 ** bucket, to: 2 ** (bucket + 1), documents })),
  };
}
