/** Writes a Parquet file with one uncompressed text column, as input of `bench data`. */
import { closeSync, openSync, writeSync } from 'node:fs';

/** Types of the Thrift compact protocol, in which Parquet writes its metadata. */
const INT32 = 5;
const INT64 = 6;
const BINARY = 8;
const LIST = 9;
const STRUCT = 12;

type Field = readonly [id: number, type: number, bytes: readonly number[]];

function varint(value: number): number[] {
  const bytes: number[] = [];
  let rest = value;
  for (; rest >= 128; rest = Math.floor(rest / 128)) bytes.push((rest % 128) + 128);
  return [...bytes, rest];
}

/** Zigzag encoding of a non-negative number. */
const integer = (value: number): number[] => varint(2 * value);
const text = (value: string): number[] => [...varint(Buffer.byteLength(value)), ...Buffer.from(value)];

function list(type: number, items: readonly (readonly number[])[]): number[] {
  const head = items.length < 15 ? [(items.length << 4) | type] : [0xf0 | type, ...varint(items.length)];
  return [...head, ...items.flat()];
}

function struct(fields: readonly Field[]): number[] {
  let last = 0;
  const bytes = fields.flatMap(([id, type, content]) => {
    const head = ((id - last) << 4) | type;
    last = id;
    return [head, ...content];
  });
  return [...bytes, 0];
}

interface WrittenGroup {
  readonly offset: number;
  readonly bytes: number;
  readonly rows: number;
}

/** Each inner list becomes a row group. */
export function writeTextParquet(path: string, groups: readonly (readonly string[])[]): void {
  const descriptor = openSync(path, 'w');
  try {
    let offset = 0;
    const put = (bytes: Uint8Array): void => {
      for (let done = 0; done < bytes.length; ) done += writeSync(descriptor, bytes, done);
      offset += bytes.length;
    };
    put(Buffer.from('PAR1'));
    const written: WrittenGroup[] = groups.map((documents) => {
      const start = offset;
      const values = Buffer.concat(
        documents.flatMap((document) => {
          const bytes = Buffer.from(document);
          const length = Buffer.alloc(4);
          length.writeUInt32LE(bytes.length);
          return [length, bytes];
        }),
      );
      put(Uint8Array.from(pageHeader(documents.length, values.length)));
      put(values);
      return { offset: start, bytes: offset - start, rows: documents.length };
    });
    const footer = Uint8Array.from(fileMetadata(written));
    put(footer);
    const tail = Buffer.alloc(8);
    tail.writeUInt32LE(footer.length);
    tail.write('PAR1', 4);
    put(tail);
  } finally {
    closeSync(descriptor);
  }
}

/** A page of plain values; the encodings of levels are named although a required column has none. */
function pageHeader(rows: number, bytes: number): number[] {
  const RLE = 3;
  const data = struct([
    [1, INT32, integer(rows)],
    [2, INT32, integer(0)],
    [3, INT32, integer(RLE)],
    [4, INT32, integer(RLE)],
  ]);
  return struct([
    [1, INT32, integer(0)],
    [2, INT32, integer(bytes)],
    [3, INT32, integer(bytes)],
    [5, STRUCT, data],
  ]);
}

function fileMetadata(groups: readonly WrittenGroup[]): number[] {
  const BYTE_ARRAY = 6;
  const root = struct([
    [4, BINARY, text('schema')],
    [5, INT32, integer(1)],
  ]);
  const column = struct([
    [1, INT32, integer(BYTE_ARRAY)],
    [3, INT32, integer(0)],
    [4, BINARY, text('text')],
    [6, INT32, integer(0)],
  ]);
  const rowGroups = groups.map(({ offset, bytes, rows }) => {
    const metadata = struct([
      [1, INT32, integer(BYTE_ARRAY)],
      [2, LIST, list(INT32, [integer(0)])],
      [3, LIST, list(BINARY, [text('text')])],
      [4, INT32, integer(0)],
      [5, INT64, integer(rows)],
      [6, INT64, integer(bytes)],
      [7, INT64, integer(bytes)],
      [9, INT64, integer(offset)],
    ]);
    const chunk = struct([
      [2, INT64, integer(offset)],
      [3, STRUCT, metadata],
    ]);
    return struct([
      [1, LIST, list(STRUCT, [chunk])],
      [2, INT64, integer(bytes)],
      [3, INT64, integer(rows)],
    ]);
  });
  return struct([
    [1, INT32, integer(1)],
    [2, LIST, list(STRUCT, [root, column])],
    [3, INT64, integer(groups.reduce((sum, { rows }) => sum + rows, 0))],
    [4, LIST, list(STRUCT, rowGroups)],
    [6, BINARY, text('trefoil bench')],
  ]);
}
