/**
 * A worker thread of `data prepare`: tokenises parts until none is left. A program of its own, because every thread loads
 * it: what only some corpora need is imported when they do.
 */

import { parentPort, workerData } from 'node:worker_threads';
import { describeFailure } from '../pipeline/failure.js';
import { BlobOpener } from '../sources/blob.js';
import { CorpusOrder } from '../sources/order.js';
import type { CorpusSpec } from '../sources/spec.js';
import { createBuiltInTokenizer, isBuiltInTokenizer } from '../tokenizers/built-in.js';
import { type SharedUnits, takeUnit } from '../unit-threads.js';
import { PartWriter, partFile } from './part.js';
import { tokeniseUnit, type UnitProgress } from './tokenise.js';

export interface PrepareTask extends SharedUnits {
  readonly spec: CorpusSpec;
  readonly tokenizer: string;
  readonly folder: string;
}

export interface FromPrepareWorker {
  readonly kind: 'unit';
  readonly unit: number;
  readonly progress: UnitProgress;
}

async function main(task: PrepareTask): Promise<void> {
  const { spec, tokenizer: name, folder } = task;
  const order = new CorpusOrder(spec);
  const opener = new BlobOpener(spec, { keptOpen: 1, sync: true });
  const tokenizer = isBuiltInTokenizer(name)
    ? createBuiltInTokenizer(name)
    : (await import('../tokenizer.js')).createTokenizer(name);
  const next = (): number | undefined => takeUnit(task);
  for (let unit = next(); unit !== undefined; unit = next()) {
    const number = unit;
    const send = (progress: UnitProgress): void =>
      parentPort!.postMessage({ kind: 'unit', unit: number, progress } satisfies FromPrepareWorker);
    const writer = new PartWriter(partFile(folder, unit), tokenizer);
    try {
      const last = await tokeniseUnit({ order, opener, tokenizer, unit, writer, send });
      writer.finish(last.skipped === undefined ? 0 : 1);
      send(last);
    } catch (error) {
      writer.abandon();
      throw error;
    }
  }
}

main(workerData as PrepareTask).catch((error) => {
  parentPort!.postMessage(describeFailure(error));
  process.exit(1);
});
