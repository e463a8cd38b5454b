/** The bytes of a file, decompressed by the ending of its name, in chunks. */

import { createReadStream } from 'node:fs';
import { type Duplex, Readable } from 'node:stream';
import * as zlib from 'node:zlib';
import { Decompress } from 'fzstd';
import { UsageError } from '../../errors.js';

const READ_BYTES = 1 << 18;

export async function* readBytes(path: string): AsyncGenerator<Uint8Array> {
  try {
    const raw: AsyncIterable<Uint8Array> = createReadStream(path, { highWaterMark: READ_BYTES });
    if (path.endsWith('.gz')) yield* pipeThrough(raw, zlib.createGunzip());
    else if (path.endsWith('.zst')) yield* decompressZstandard(raw);
    else yield* raw;
  } catch (error) {
    throw new UsageError(`data.path: cannot read ${path}: ${(error as Error).message}`, { cause: error });
  }
}

/** Node has zstd from 22.15 on; older versions use fzstd, which is slower. */
function decompressZstandard(raw: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  const create = (zlib as { createZstdDecompress?: () => Duplex }).createZstdDecompress;
  return create === undefined ? decompressInJavaScript(raw) : pipeThrough(raw, create());
}

async function* decompressInJavaScript(raw: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
  const ready: Uint8Array[] = [];
  const decompressor = new Decompress((chunk) => ready.push(chunk));
  for await (const chunk of raw) {
    decompressor.push(chunk);
    yield* ready.splice(0);
  }
  // The final push is what detects a file that was cut short.
  decompressor.push(new Uint8Array(0), true);
  yield* ready.splice(0);
}

async function* pipeThrough(raw: AsyncIterable<Uint8Array>, transform: Duplex): AsyncGenerator<Uint8Array> {
  const source = Readable.from(raw, { objectMode: false });
  // pipe() does not carry errors over: a failing read must reach the reader of the decompressed bytes.
  source.on('error', (error) => transform.destroy(error));
  try {
    yield* source.pipe(transform);
  } finally {
    source.destroy();
    transform.destroy();
  }
}
