/** Speed of the tokenizer alone, for `bench data`: documents are in memory before the measurement. */

import { BlobOpener } from '../sources/blob.js';
import { LaneDocuments } from '../sources/documents.js';
import { CorpusOrder } from '../sources/order.js';
import { documentText } from '../sources/reader.js';
import { createTokenizer } from '../tokenizer.js';
import type { BaselineTask, FromWorker } from './messages.js';

/** Limit of the text in memory per thread. */
export const BASELINE_BYTES = 64e6;

export async function measureTokenizer(task: BaselineTask, send: (message: FromWorker) => void): Promise<void> {
  // Every thread has all documents, as in a long run: with a share of them the word cache would hit more often.
  const order = new CorpusOrder({ ...task.spec, lanes: 1 });
  const opener = new BlobOpener(task.spec);
  const documents = new LaneDocuments(order, 0, { side: 'all', opener });
  const tokenizer = createTokenizer(task.tokenizer);
  const texts: string[] = [];
  for (let size = 0; size < BASELINE_BYTES; ) {
    const placed = await documents.next();
    if (placed === undefined || placed.epoch > 0) break;
    const text = documentText(placed.document);
    texts.push(text);
    size += text.length;
  }
  await documents.close();
  const sizes = texts.map((text) => Buffer.byteLength(text));
  const run = (seconds: number) => {
    const started = performance.now();
    const done = { tokens: 0, bytes: 0 };
    const first = Math.floor((task.worker * texts.length) / task.workers);
    for (let index = first; performance.now() - started < 1000 * seconds; index = (index + 1) % texts.length) {
      done.tokens += tokenizer.encode(texts[index]).length + 1;
      done.bytes += sizes[index];
    }
    return { ...done, seconds: (performance.now() - started) / 1000 };
  };
  // One pass warms the word cache, as the first minutes of a run do.
  for (const text of texts) tokenizer.encode(text);
  send({ kind: 'ready' });
  Atomics.wait(new Int32Array(task.go), 0, 0);
  send({ kind: 'rate', ...run(task.seconds) });
}
