/** Parquet files for tests, with the columns of a web corpus. */

import { spawnSync } from 'node:child_process';
import { type FileMetaData, type PageHeader, parquetMetadata } from 'hyparquet';
import { parquetHeader } from 'hyparquet/src/column.js';
import { ByteWriter, type ColumnSource, parquetWriteBuffer } from 'hyparquet-writer';
import { writePageHeader } from 'hyparquet-writer/src/datapage.js';
import { writeMetadata } from 'hyparquet-writer/src/metadata.js';

export interface ParquetRequest {
  /** Null is a missing value; bytes need not be UTF-8. */
  readonly documents: readonly (string | Uint8Array | null)[];
  readonly codec?: 'UNCOMPRESSED' | 'SNAPPY' | 'ZSTD';
  readonly rowsPerGroup?: number;
  /** Default "text"; `meta.body` puts the text into a struct. */
  readonly textField?: string;
}

export function parquetFile({
  documents,
  codec = 'SNAPPY',
  rowsPerGroup = 10,
  textField = 'text',
}: ParquetRequest): Uint8Array {
  const ids = documents.map((_, index) => `id-${index}`);
  const texts = documents.map((text) => (typeof text === 'string' ? new TextEncoder().encode(text) : text));
  const [outer, inner] = textField.split('.');
  const common = { codec, rowGroupSize: rowsPerGroup, compressors: { ZSTD: zstandard } };
  if (inner !== undefined) {
    const schema = [
      { name: 'root', num_children: 2 },
      { name: 'id', type: 'BYTE_ARRAY', converted_type: 'UTF8', repetition_type: 'REQUIRED' },
      { name: outer, num_children: 2, repetition_type: 'OPTIONAL' },
      { name: inner, type: 'BYTE_ARRAY', converted_type: 'UTF8', repetition_type: 'OPTIONAL' },
      { name: 'score', type: 'DOUBLE', repetition_type: 'OPTIONAL' },
    ] as const;
    const structs = documents.map((text, index) => ({ [inner]: text, score: index / 2 }));
    const columnData = [
      { name: 'id', data: ids },
      { name: outer, data: structs },
    ];
    return new Uint8Array(parquetWriteBuffer({ ...common, columnData, schema: [...schema] }));
  }
  const columnData: ColumnSource[] = [
    { name: 'id', data: ids, type: 'STRING' },
    { name: textField, data: texts as Uint8Array[], type: 'BYTE_ARRAY', nullable: true },
    { name: 'score', data: documents.map((_, index) => index / 2), type: 'DOUBLE' },
    { name: 'meta', data: documents.map((_, index) => ({ url: `u${index}`, tags: [index] })), type: 'JSON' },
  ];
  return new Uint8Array(parquetWriteBuffer({ ...common, columnData }));
}

/** The same file, whose column of texts begins with a page that claims other numbers, and may have more bytes at its end. */
export function withPage(
  bytes: Uint8Array,
  change: (page: Mutable<PageHeader>) => void,
  more = new Uint8Array(0),
): Uint8Array {
  const chunkOf = (metadata: FileMetaData) => metadata.row_groups[0].columns[1].meta_data!;
  const { buffer } = bytes.slice();
  const { data_page_offset: offset, total_compressed_size: size } = chunkOf(parquetMetadata(buffer));
  const reader = { view: new DataView(buffer, Number(offset), Number(size)), offset: 0 };
  const page = parquetHeader(reader);
  change(page);
  const writer = new ByteWriter();
  writePageHeader(writer, page);
  writer.appendBytes(new Uint8Array(buffer, Number(offset) + reader.offset, Number(size) - reader.offset));
  const chunk = Buffer.concat([new Uint8Array(writer.getBuffer()), more]);
  const point = (metadata: FileMetaData) => {
    const forged = chunkOf(metadata);
    forged.data_page_offset = BigInt(footerStart(bytes));
    forged.total_compressed_size = BigInt(chunk.length);
    delete forged.dictionary_page_offset;
  };
  return withFooter(bytes, point, chunk);
}

type Mutable<Fields> = { -readonly [Name in keyof Fields]: Fields[Name] };

function footerStart(bytes: Uint8Array): number {
  return bytes.length - 8 - new DataView(bytes.buffer, bytes.byteOffset).getUint32(bytes.length - 8, true);
}

/** The same file with another footer, and more bytes before it. */
export function withFooter(
  bytes: Uint8Array,
  change: (metadata: FileMetaData) => void,
  more = new Uint8Array(0),
): Uint8Array {
  const { buffer } = bytes.slice();
  const metadata = parquetMetadata(buffer);
  change(metadata);
  const writer = new ByteWriter();
  writeMetadata(writer, metadata);
  const head = bytes.subarray(0, footerStart(bytes));
  return Buffer.concat([head, more, new Uint8Array(writer.getBuffer()), Buffer.from('PAR1')]);
}

/** By the zstd program where it is there, else a frame of blocks that are stored as they are. */
function zstandard(input: Uint8Array): Uint8Array {
  const { status, stdout } = spawnSync('zstd', ['-q', '-c'], { input, maxBuffer: 1 << 28 });
  if (status === 0) return stdout;
  const head = Buffer.alloc(9);
  head.writeUInt32LE(0xfd2fb528, 0);
  head.writeUInt8(0xa0, 4); // one segment, a content size of four bytes
  head.writeUInt32LE(input.length, 5);
  const parts: Uint8Array[] = [head];
  for (let at = 0; at < input.length || at === 0; at += 1 << 17) {
    const piece = input.subarray(at, at + (1 << 17));
    const last = at + piece.length >= input.length ? 1 : 0;
    const block = Buffer.alloc(3);
    block.writeUIntLE((piece.length << 3) | last, 0, 3);
    parts.push(block, piece);
  }
  return Buffer.concat(parts);
}
