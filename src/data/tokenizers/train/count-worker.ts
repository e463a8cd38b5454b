/** A worker thread of `data tokenizer`: counts the words of units of a corpus until none is left. */

import { parentPort, workerData } from 'node:worker_threads';
import { describeFailure } from '../../pipeline/failure.js';
import { BlobOpener } from '../../sources/blob.js';
import { CorpusOrder } from '../../sources/order.js';
import { documentBytes, documentText, openPart } from '../../sources/reader.js';
import type { CorpusSpec } from '../../sources/spec.js';
import { cutText } from '../../sources/text.js';
import { type SharedUnits, takeUnit } from '../../unit-threads.js';
import { countText } from './count-text.js';
import { WordCounter, type WordCounts } from './word-counter.js';

export interface CountTask extends SharedUnits {
  readonly spec: CorpusSpec;
}

export type FromCountWorker =
  | { readonly kind: 'read'; readonly bytes: number; readonly documents: number; readonly done: boolean }
  | { readonly kind: 'counts'; readonly counts: WordCounts };

async function main(task: CountTask): Promise<void> {
  const { spec } = task;
  const order = new CorpusOrder(spec);
  const opener = new BlobOpener(spec, { keptOpen: 1, sync: true });
  const words = new WordCounter();
  const post = (message: FromCountWorker, transfer: ArrayBuffer[] = []) => parentPort!.postMessage(message, transfer);
  for (let unit = takeUnit(task); unit !== undefined; unit = takeUnit(task)) {
    const { file, part } = order.plainUnit(unit);
    const reader = await openPart({ file, part, textField: spec.textField, opener });
    try {
      for (let position = 0; ; ) {
        const block = await reader.read(position);
        if (block === undefined) break;
        let bytes = 0;
        for (const document of block.documents) {
          for (const piece of cutText(documentText(document))) countText(piece, words);
          bytes += documentBytes(document);
        }
        position = block.next;
        post({ kind: 'read', bytes, documents: block.documents.length, done: false });
      }
    } finally {
      await reader.close();
    }
    post({ kind: 'read', bytes: 0, documents: 0, done: true });
  }
  const counts = words.result();
  post({ kind: 'counts', counts }, [counts.units.buffer, counts.begins.buffer, counts.counts.buffer] as ArrayBuffer[]);
}

main(workerData as CountTask).catch((error) => {
  parentPort!.postMessage(describeFailure(error));
  process.exit(1);
});
