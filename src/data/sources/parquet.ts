/** Reads the text column of a Parquet file, one row group at a time. */

import {
  type AsyncBuffer,
  type FileMetaData,
  parquetMetadataAsync,
  parquetRead,
  parquetSchema,
  type SchemaTree,
} from 'hyparquet';
import { parquetHeader } from 'hyparquet/src/column.js';
import { compressors } from 'hyparquet-compressors';
import { TrefoilError, UsageError } from '../../errors.js';
import { SourceGaveUp } from '../../hub/http.js';
import type { Blob } from './blob.js';
import type { PartReader, RawDocument, ReadRequest } from './reader.js';

/** The first request. Covers the footer of most files: a thousand row groups take some hundred kilobytes. */
const FOOTER_BYTES = 1 << 19;
/** A group is held in memory, one place per row, before its bytes show whether the rows are there. */
const MAX_GROUP_ROWS = 1 << 24;
/** With those of its dictionary. */
const MAX_VALUES = 2 * MAX_GROUP_ROWS;
/** Limit of a column in a group when its pages are unpacked: a few bytes can claim any size. */
const MAX_GROUP_BYTES = 2 ** 32;
const MAX_PAGE_BYTES = 2 ** 30;

// Documents stay bytes until they are tokenised: a block takes half the memory, and skipped documents are not decoded.
const parsers = { stringFromBytes: (bytes: Uint8Array) => bytes };

export async function openParquet({ file, part, textField, opener }: ReadRequest): Promise<PartReader> {
  const blob = await opener.open(file);
  try {
    const buffer = asyncBuffer(blob);
    const metadata = await opener.remember(file, () =>
      decode(file.name, blob, 'footer', () => readFooter(file.name, buffer)),
    );
    const { column, path } = await decode(file.name, blob, 'schema', async () =>
      findText(file.name, metadata, textField),
    );
    const groups = metadata.row_groups.length;
    const first = Math.floor((part * groups) / file.parts);
    const end = Math.floor(((part + 1) * groups) / file.parts);
    const starts = groupStarts(metadata);
    return {
      async read(position) {
        const group = first + position;
        if (group >= end) return undefined;
        const values = await decode(file.name, blob, `row group ${group}`, () =>
          readColumn(file.name, buffer, metadata, column, starts[group], group),
        );
        const documents = values.map((value) => pick(value, path, file.name));
        expectSize(file.name, group, documents);
        return { documents, next: position + 1 };
      },
      close: () => blob.close(),
    };
  } catch (error) {
    await blob.close();
    throw error;
  }
}

/** Number of row groups, and the bytes of text in the largest one, which a reader holds in memory. */
export async function inspectParquet(request: ReadRequest): Promise<{ groups: number; largestGroup: number }> {
  const { file, textField, opener } = request;
  const blob = await opener.open(file);
  try {
    const metadata = await decode(file.name, blob, 'footer', () => readFooter(file.name, asyncBuffer(blob)));
    const { column } = await decode(file.name, blob, 'schema', async () => findText(file.name, metadata, textField));
    const sizes = metadata.row_groups.map((group) =>
      group.columns
        .filter((chunk) => chunk.meta_data?.path_in_schema[0] === column)
        .reduce((sum, chunk) => sum + Number(chunk.meta_data!.total_uncompressed_size), 0),
    );
    return { groups: sizes.length, largestGroup: sizes.reduce((most, size) => Math.max(most, size), 0) };
  } finally {
    await blob.close();
  }
}

async function readFooter(name: string, buffer: AsyncBuffer): Promise<FileMetaData> {
  const metadata = await parquetMetadataAsync(buffer, { initialFetchSize: FOOTER_BYTES, geoparquet: false });
  for (const [index, { num_rows: rows }] of metadata.row_groups.entries())
    if (rows < 0 || rows > MAX_GROUP_ROWS)
      throw new UsageError(
        `${name}: row group ${index} claims ${rows} rows, the limit is ${MAX_GROUP_ROWS}; write it with smaller row groups`,
      );
  return metadata;
}

function groupStarts({ row_groups }: FileMetaData): number[] {
  const starts = [0];
  for (const group of row_groups) starts.push(starts[starts.length - 1] + Number(group.num_rows));
  return starts;
}

/**
 * Reads the bytes of a column in a row group and checks what its pages claim, before memory is taken for it. Returns the
 * file with these bytes at hand.
 */
async function checkedColumn(
  name: string,
  buffer: AsyncBuffer,
  metadata: FileMetaData,
  column: string,
  group: number,
): Promise<AsyncBuffer> {
  const { columns, num_rows: rows } = metadata.row_groups[group];
  const node = parquetSchema(metadata).children.find(({ element }) => element.name === column);
  // The library reads no page after the last row of a flat column, and all bytes of others.
  const isFlat = node?.children.length === 0 && node.element.repetition_type !== 'REPEATED';
  // A struct has several chunks, one beside the other.
  const chunks = columns.flatMap(({ meta_data: data }) => {
    if (data?.path_in_schema[0] !== column) return [];
    const offsets = [data.dictionary_page_offset, data.data_page_offset].map(Number).filter((offset) => offset > 0);
    return { start: Math.min(...offsets), bytes: Number(data.total_compressed_size) };
  });
  const begin = Math.min(...chunks.map(({ start }) => start));
  const end = Math.max(...chunks.map(({ start, bytes }) => start + bytes));
  const refuse = (claim: string) => {
    throw new UsageError(`${name}: row group ${group} ${claim}; write it with smaller row groups and pages`);
  };
  if (end - begin > MAX_GROUP_BYTES) refuse(`claims ${end - begin} bytes, the limit is ${MAX_GROUP_BYTES}`);
  const content = await buffer.slice(begin, end);
  for (const { start, bytes } of chunks) {
    const reader = { view: new DataView(content, start - begin, bytes), offset: 0 };
    let [values, size, seen] = [0, 0, 0];
    while (reader.offset < bytes - 1 && !(isFlat && seen >= rows)) {
      const page = parquetHeader(reader);
      const { compressed_page_size: packed, uncompressed_page_size: unpacked } = page;
      const header = page.data_page_header ?? page.data_page_header_v2 ?? page.dictionary_page_header;
      const count = header?.num_values ?? 0;
      if (!(packed >= 0 && unpacked >= 0 && count >= 0)) throw new Error('a page of negative size');
      reader.offset += packed;
      values += count;
      size += unpacked;
      if (page.type !== 'DICTIONARY_PAGE') seen += count;
      if (values > MAX_VALUES) refuse(`claims ${values} values, the limit is ${MAX_VALUES}`);
      if (unpacked > MAX_PAGE_BYTES) refuse(`has a page of ${unpacked} bytes, the limit is ${MAX_PAGE_BYTES}`);
      if (size > MAX_GROUP_BYTES) refuse(`claims ${size} bytes, the limit is ${MAX_GROUP_BYTES}`);
    }
  }
  return {
    byteLength: buffer.byteLength,
    slice(from, to = buffer.byteLength) {
      if (from === begin && to === end) return content;
      return from < begin || to > end ? buffer.slice(from, to) : content.slice(from - begin, to - begin);
    },
  };
}

async function readColumn(
  name: string,
  buffer: AsyncBuffer,
  metadata: FileMetaData,
  column: string,
  rowStart: number,
  group: number,
): Promise<unknown[]> {
  const rows = Number(metadata.row_groups[group].num_rows);
  const values: unknown[] = new Array(rows).fill(null);
  if (rows === 0) return values;
  await parquetRead({
    file: await checkedColumn(name, buffer, metadata, column, group),
    metadata,
    columns: [column],
    rowStart,
    rowEnd: rowStart + rows,
    compressors,
    parsers,
    geoparquet: false,
    onChunk: (chunk) => {
      for (let index = 0; index < chunk.columnData.length; index++)
        values[chunk.rowStart + index - rowStart] = chunk.columnData[index];
    },
  });
  return values;
}

/** A dictionary repeats a long text at a few bits each time: a small file would fill a disk with its tokens. */
function expectSize(name: string, group: number, documents: readonly RawDocument[]): void {
  const bytes = documents.reduce((sum, document) => sum + document.length, 0);
  if (bytes > MAX_GROUP_BYTES)
    throw new UsageError(
      `${name}: row group ${group} has ${bytes} bytes of text, the limit is ${MAX_GROUP_BYTES}; write it with smaller row groups`,
    );
}

/** The column of the text and the path inside it. Throws with the names of all columns if it is missing. */
function findText(name: string, metadata: FileMetaData, textField: string): { column: string; path: string[] } {
  const tree = parquetSchema(metadata);
  const whole = tree.children.find((child) => child.element.name === textField);
  const path = whole === undefined ? textField.split('.') : [textField];
  let node: SchemaTree | undefined = tree;
  for (const step of path) node = node?.children.find((child) => child.element.name === step);
  if (node === undefined) {
    const names = tree.children.map((child) => child.element.name).slice(0, 12);
    throw new UsageError(`${name}: no column "${textField}" (columns: ${names.join(', ')}); set data.text_field`);
  }
  if (node.children.length > 0 || node.element.type !== 'BYTE_ARRAY')
    throw new UsageError(`${name}: column "${textField}" holds no text; set data.text_field to a column of strings`);
  return { column: path[0], path: path.slice(1) };
}

/** A missing value is an empty document. */
function pick(value: unknown, path: readonly string[], name: string): RawDocument {
  let found = value;
  for (const step of path) found = (found as Record<string, unknown> | null | undefined)?.[step];
  if (found === null || found === undefined) return '';
  if (found instanceof Uint8Array || typeof found === 'string') return found;
  throw new UsageError(`${name}: the text column holds lists or structs; set data.text_field to a column of strings`);
}

function asyncBuffer(blob: Blob): AsyncBuffer {
  return {
    byteLength: blob.size,
    async slice(start, end = blob.size) {
      const bytes = await blob.read(start, Math.min(end, blob.size));
      const { buffer, byteOffset, byteLength } = bytes;
      // hyparquet needs an ArrayBuffer of exactly these bytes; most reads return one.
      if (byteOffset === 0 && byteLength === buffer.byteLength) return buffer as ArrayBuffer;
      return buffer.slice(byteOffset, byteOffset + byteLength) as ArrayBuffer;
    },
  };
}

/** Turns the library's errors about damaged bytes into an error that names the file; such bytes are not kept. */
async function decode<Value>(name: string, blob: Blob, what: string, run: () => Promise<Value>): Promise<Value> {
  try {
    return await run();
  } catch (error) {
    if (error instanceof TrefoilError || (error as NodeJS.ErrnoException).syscall !== undefined) throw error;
    await blob.forget?.();
    throw new SourceGaveUp(`${name}: ${what} is not readable as Parquet: ${(error as Error).message}`, {
      cause: error,
    });
  }
}
