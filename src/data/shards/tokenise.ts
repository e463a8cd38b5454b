/** Tokenises one part of a corpus. */

import type { BlobOpener } from '../sources/blob.js';
import type { CorpusOrder } from '../sources/order.js';
import { documentBytes, documentText, openPart } from '../sources/reader.js';
import { cutText } from '../sources/text.js';
import type { Tokenizer } from '../tokenizer.js';
import { TokenBuffer } from '../tokenizers/token-buffer.js';
import type { TokenWriter } from './token-writer.js';

/** Counts of a part. Counts are increments since the last message about it. */
export interface UnitProgress {
  readonly documents: number;
  readonly tokens: number;
  readonly bytes: number;
  readonly done: boolean;
  readonly skipped?: string;
  readonly replaced?: { file: string; count: number };
}

const PROGRESS_INTERVAL_MS = 100;

interface UnitJob {
  readonly order: CorpusOrder;
  readonly opener: BlobOpener;
  readonly tokenizer: Tokenizer;
  readonly unit: number;
  readonly writer: TokenWriter;
  /** Receives the progress while the part is being tokenised, now and then: a message costs both threads time. */
  readonly send: (progress: UnitProgress) => void;
}

/** Writes the tokens of a part, document after document in the order of the file. Returns the last progress. */
export async function tokeniseUnit(job: UnitJob): Promise<UnitProgress> {
  const { order, opener, tokenizer, unit, writer, send } = job;
  const { file, part } = order.plainUnit(unit);
  const tokens = new TokenBuffer();
  const sent = { documents: writer.documents, tokens: writer.tokens };
  let bytes = 0;
  let replaced = 0;
  let isSkipped = false;
  let told = performance.now();
  const counts = () => {
    const since = { documents: writer.documents - sent.documents, tokens: writer.tokens - sent.tokens, bytes };
    sent.documents = writer.documents;
    sent.tokens = writer.tokens;
    bytes = 0;
    return since;
  };
  const reader = await openPart({ file, part, textField: order.spec.textField, opener });
  try {
    for (let position = 0; ; ) {
      const block = await reader.read(position);
      if (block === undefined) break;
      replaced += block.replaced ?? 0;
      if (block.skipped !== undefined) isSkipped = true;
      for (const document of block.documents) {
        for (const piece of cutText(documentText(document))) {
          tokens.length = 0;
          if (tokenizer.encodeInto) tokenizer.encodeInto(piece, tokens);
          else tokens.append(tokenizer.encode(piece));
          writer.append(tokens.ids.subarray(0, tokens.length));
        }
        bytes += documentBytes(document);
        if (!block.isPartial) writer.endDocument();
      }
      position = block.next;
      if (performance.now() - told < PROGRESS_INTERVAL_MS) continue;
      told = performance.now();
      send({ ...counts(), done: false });
    }
  } finally {
    await reader.close();
  }
  return {
    ...counts(),
    done: true,
    ...(isSkipped && { skipped: file.name }),
    ...(replaced > 0 && { replaced: { file: file.name, count: replaced } }),
  };
}
