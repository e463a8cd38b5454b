/** TensorBoard event files: scalars only, in the few protobuf fields that they need. */
import { hostname } from 'node:os';
import { join } from 'node:path';
import { ensureFolder, fileError } from '../../files.js';
import { AppendFile } from './log-file.js';

/** The values of one step by tag, or one of the marks at the beginning of a file. */
export type TensorboardEvent = { readonly step: number } & (
  | { readonly scalars: Readonly<Record<string, number>> }
  | { readonly mark: 'version' | 'start' }
);

// Field numbers of tensorflow/core/util/event.proto and framework/summary.proto.
const EVENT_WALL_TIME = 1;
const EVENT_STEP = 2;
const EVENT_FILE_VERSION = 3;
const EVENT_SUMMARY = 5;
const EVENT_SESSION_LOG = 7;
const SESSION_LOG_STATUS = 1;
const SESSION_START = 1;
const SUMMARY_VALUE = 1;
const VALUE_TAG = 1;
const VALUE_SIMPLE = 2;

/** Creates a file for a start of a run. `at`: the time in milliseconds since 1970. */
export function openEventFile(folder: string, at: number): AppendFile {
  const name = `events.out.tfevents.${Math.floor(at / 1000)}.${hostname()}.${process.pid}.0`;
  try {
    ensureFolder(folder);
  } catch (error) {
    throw fileError('create', folder, error);
  }
  return new AppendFile(join(folder, name), 'binary');
}

/** `ts` in seconds since 1970. */
export function encodeEvent(event: TensorboardEvent, ts: number): Uint8Array {
  return frame(Buffer.concat([double(EVENT_WALL_TIME, ts), varintField(EVENT_STEP, event.step), content(event)]));
}

function content(event: TensorboardEvent): Buffer {
  if ('mark' in event)
    return event.mark === 'version'
      ? text(EVENT_FILE_VERSION, 'brain.Event:2')
      : message(EVENT_SESSION_LOG, varintField(SESSION_LOG_STATUS, SESSION_START));
  const entries = Object.entries(event.scalars).map(([tag, value]) =>
    message(SUMMARY_VALUE, Buffer.concat([text(VALUE_TAG, tag), float(VALUE_SIMPLE, value)])),
  );
  return message(EVENT_SUMMARY, Buffer.concat(entries));
}

/** A record: length, checksum of the length, data, checksum of the data. */
function frame(data: Buffer): Buffer {
  const record = Buffer.alloc(16 + data.length);
  record.writeBigUInt64LE(BigInt(data.length), 0);
  record.writeUInt32LE(maskedCrc32c(record.subarray(0, 8)), 8);
  data.copy(record, 12);
  record.writeUInt32LE(maskedCrc32c(data), 12 + data.length);
  return record;
}

/** Wire types of protobuf: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes. */
function key(field: number, wireType: 0 | 1 | 2 | 5): Buffer {
  return varint(field * 8 + wireType);
}

function varint(value: number): Buffer {
  const bytes: number[] = [];
  let rest = value;
  while (rest >= 0x80) {
    bytes.push((rest % 0x80) | 0x80);
    rest = Math.floor(rest / 0x80);
  }
  bytes.push(rest);
  return Buffer.from(bytes);
}

function varintField(field: number, value: number): Buffer {
  return Buffer.concat([key(field, 0), varint(value)]);
}

function double(field: number, value: number): Buffer {
  const bytes = Buffer.alloc(8);
  bytes.writeDoubleLE(value);
  return Buffer.concat([key(field, 1), bytes]);
}

function float(field: number, value: number): Buffer {
  const bytes = Buffer.alloc(4);
  bytes.writeFloatLE(value);
  return Buffer.concat([key(field, 5), bytes]);
}

function message(field: number, content: Buffer): Buffer {
  return Buffer.concat([key(field, 2), varint(content.length), content]);
}

function text(field: number, value: string): Buffer {
  return message(field, Buffer.from(value));
}

const POLYNOMIAL = 0x82f63b78;
const TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  let value = byte;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ POLYNOMIAL : value >>> 1;
  return value;
});

/** CRC-32C (Castagnoli), as TensorBoard files need it; the crc32 of Node has another polynomial. */
export function crc32c(bytes: Uint8Array): number {
  let value = 0xffffffff;
  for (const byte of bytes) value = TABLE[(value ^ byte) & 0xff] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

/** The masked form that is stored in record files. */
export function maskedCrc32c(bytes: Uint8Array): number {
  const checksum = crc32c(bytes);
  return (((checksum >>> 15) | (checksum << 17)) + 0xa282ead8) >>> 0;
}
