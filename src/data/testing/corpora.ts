/** Corpora for the tests of streaming: documents, a plain reading of them, and settings with short limits. */

import type { Batch } from '../batch.js';
import { BlobOpener } from '../sources/blob.js';
import type { CorpusOptions } from '../sources/corpus.js';
import { CorpusOrder } from '../sources/order.js';
import { documentText, openPart } from '../sources/reader.js';
import type { CorpusSpec } from '../sources/spec.js';
import { createTokenizer } from '../tokenizer.js';

export const DATASET = 'owner/corpus';

export function hubOptions(endpoint: string, overrides: Partial<CorpusOptions> = {}): CorpusOptions {
  return {
    source: 'hub',
    hub: { dataset: DATASET, configuration: null, split: 'train', revision: 'main' },
    textField: 'text',
    shuffle: true,
    seed: 7,
    splitSeed: 7,
    valFraction: 0,
    timeoutSeconds: 20,
    cache: { folder: '', limitBytes: 0 },
    environment: { HF_ENDPOINT: endpoint },
    ...overrides,
  };
}

/** A local source as the cache and `data prepare` open it. */
export function localOptions(
  source: CorpusOptions['source'],
  path: string | readonly string[],
  overrides: Partial<CorpusOptions> = {},
): CorpusOptions {
  return { ...hubOptions(''), environment: {}, source, path, shuffle: false, partBytes: 'auto', ...overrides };
}

/** Texts of very different lengths, each recognisable. */
export function numberedDocuments(count: number, tag = 'd'): string[] {
  return Array.from({ length: count }, (_, index) => {
    const words = Array.from({ length: (index * 7919) % 60 }, (_, word) => `w${(index * word) % 97}`);
    return `<${tag}${index}> ${words.join(' ')}`;
  });
}

/**
 * The tokens of every lane up to a number of tokens, the obvious way: read all documents of a part, put them in order, drop
 * validation, tokenise, join. It shares the order with the pipeline, but none of its reading ahead, packing or resuming.
 */
export async function plainLanes(spec: CorpusSpec, tokenizerName: string, tokensPerLane: number): Promise<number[][]> {
  const order = new CorpusOrder(spec);
  const tokenizer = createTokenizer(tokenizerName);
  const opener = new BlobOpener(spec);
  const lanes: number[][] = [];
  for (let lane = 0; lane < spec.lanes; lane++) {
    const tokens: number[] = [];
    for (let turn = 0; tokens.length < tokensPerLane; turn++) {
      const unit = order.unit(lane, turn);
      const reader = await openPart({ file: unit.file, part: unit.part, textField: spec.textField, opener });
      for (let position = 0; ; ) {
        const block = await reader.read(position);
        if (block === undefined) break;
        const place = order.blockOrder(unit, position, block.documents.length);
        for (let index = 0; index < block.documents.length; index++) {
          const row = place(index);
          if (order.isValidation(unit, position, row)) continue;
          const ids = tokenizer.encode(documentText(block.documents[row]));
          for (const id of ids) tokens.push(id);
          if (ids.length > 0) tokens.push(tokenizer.separator);
        }
        position = block.next;
      }
      await reader.close();
    }
    lanes.push(tokens);
  }
  return lanes;
}

/** The expected sample k: S + 1 tokens of lane k mod L. */
export function plainSample(lanes: readonly (readonly number[])[], sample: number, length: number): number[] {
  const start = Math.floor(sample / lanes.length) * length;
  return lanes[sample % lanes.length].slice(start, start + length + 1);
}

/** The rows of a batch as windows of S + 1 tokens, by sample number. */
export function rowsOf(batch: Batch, length: number): Map<number, number[]> {
  return new Map(
    batch.sampleIds.map((id, row) => {
      const inputs = Array.from(batch.inputs.subarray(row * length, (row + 1) * length));
      return [id, [...inputs, batch.targets[(row + 1) * length - 1]]];
    }),
  );
}
