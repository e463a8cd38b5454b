/** What a worker of `data prepare` does: tokenises one part of the corpus after the other, each into a folder of its own. */

import { rmSync } from 'node:fs';
import { join } from 'node:path';
import type { MessagePort } from 'node:worker_threads';
import { ensureFolder } from '../../folders.js';
import { BlobOpener } from '../corpus/blob.js';
import { CorpusOrder } from '../corpus/order.js';
import { documentBytes, documentText, openPart } from '../corpus/reader.js';
import { cutText } from '../documents/document.js';
import type { FromWorker, PrepareTask } from '../pipeline/messages.js';
import { createTokenizer, type Tokenizer } from '../tokenizer.js';
import { partialName, renameDurably } from './prepare.js';
import { ShardWriter } from './writer.js';

/** All tokens of a part in one file. */
const WITHOUT_LIMIT = Number.POSITIVE_INFINITY;

export function unitFolder(folder: string, unit: number): string {
  return join(folder, `unit-${String(unit).padStart(6, '0')}`);
}

/** Takes the numbers of parts from `port` until it gets null. */
export async function prepareUnits(
  task: PrepareTask,
  port: MessagePort,
  send: (message: FromWorker) => void,
): Promise<void> {
  const order = new CorpusOrder(task.spec);
  const opener = new BlobOpener(task.spec);
  const tokenizer = createTokenizer(task.tokenizer);
  const waiting: ((unit: number | null) => void)[] = [];
  port.on('message', (unit: number | null) => waiting.shift()?.(unit));
  for (;;) {
    const asked = new Promise<number | null>((resolve) => waiting.push(resolve));
    send({ kind: 'ready' });
    const unit = await asked;
    if (unit === null) break;
    await prepareUnit(order, opener, tokenizer, unit, task.folder, send);
  }
  port.close();
}

async function prepareUnit(
  order: CorpusOrder,
  opener: BlobOpener,
  tokenizer: Tokenizer,
  unit: number,
  folder: string,
  send: (message: FromWorker) => void,
): Promise<void> {
  const { file, part } = order.plainUnit(unit);
  const target = unitFolder(folder, unit);
  const aside = partialName(target);
  ensureFolder(aside);
  const writer = new ShardWriter(aside, tokenizer, WITHOUT_LIMIT);
  let sent = { documents: 0, tokens: 0 };
  let bytes = 0;
  const report = (done: boolean): void => {
    const { documents, tokens } = writer;
    send({ kind: 'unit', unit, documents: documents - sent.documents, tokens: tokens - sent.tokens, bytes, done });
    sent = { documents, tokens };
    bytes = 0;
  };
  try {
    const reader = await openPart({ file, part, textField: order.spec.textField, opener });
    try {
      for (let position = 0; ; ) {
        const block = await reader.read(position);
        if (block === undefined) break;
        for (const document of block.documents) {
          for (const piece of cutText(documentText(document))) writer.append(tokenizer.encode(piece));
          writer.endDocument();
          bytes += documentBytes(document);
        }
        position = block.next;
        report(false);
      }
    } finally {
      await reader.close();
    }
    writer.finish(file.kind === 'text' && writer.documents === 0 ? 1 : 0);
    renameDurably(aside, target);
    report(true);
  } catch (error) {
    writer.abandon();
    rmSync(aside, { recursive: true, force: true });
    throw error;
  }
}
