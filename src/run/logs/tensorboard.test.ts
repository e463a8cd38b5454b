import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { hostname, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, test } from 'vitest';
import { openTensorboard } from './log.js';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'trefoil-tb-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

/** A second implementation, bit by bit: it shares no code and no table with the writer's. */
function maskedChecksum(bytes: Uint8Array): number {
  let crc = 0xffffffffn;
  for (const byte of bytes) {
    crc ^= BigInt(byte);
    for (let i = 0; i < 8; i++) crc = crc & 1n ? (crc >> 1n) ^ 0x82f63b78n : crc >> 1n;
  }
  crc ^= 0xffffffffn;
  return Number((((crc >> 15n) | (crc << 17n)) + 0xa282ead8n) & 0xffffffffn);
}

type Field = { field: number; value: bigint | number | Buffer };

function decodeMessage(bytes: Buffer): Field[] {
  const fields: Field[] = [];
  let at = 0;
  const varint = (): bigint => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      value |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < bytes.length) {
    const key = Number(varint());
    const field = key >> 3;
    switch (key & 7) {
      case 0:
        fields.push({ field, value: varint() });
        break;
      case 1:
        fields.push({ field, value: bytes.readDoubleLE(at) });
        at += 8;
        break;
      case 5:
        fields.push({ field, value: bytes.readFloatLE(at) });
        at += 4;
        break;
      case 2: {
        const length = Number(varint());
        fields.push({ field, value: bytes.subarray(at, at + length) });
        at += length;
        break;
      }
      default:
        throw new Error(`wire type ${key & 7}`);
    }
  }
  return fields;
}

/** Splits a record file and checks both checksums of each record. */
function decodeRecords(content: Buffer): Buffer[] {
  const records: Buffer[] = [];
  for (let at = 0; at < content.length; ) {
    const length = Number(content.readBigUInt64LE(at));
    expect(content.readUInt32LE(at + 8)).toBe(maskedChecksum(content.subarray(at, at + 8)));
    const data = content.subarray(at + 12, at + 12 + length);
    expect(content.readUInt32LE(at + 12 + length)).toBe(maskedChecksum(data));
    records.push(data);
    at += 16 + length;
  }
  return records;
}

function find(fields: Field[], field: number): Field['value'] | undefined {
  return fields.find((candidate) => candidate.field === field)?.value;
}

test('the file begins with its version and holds the scalars by tag', () => {
  const writer = openTensorboard(join(folder, 'tb'), { clock: () => 1_700_000_000_250 });
  writer.write({ step: 300, scalars: { 'train/loss': 2.5, 'sel/größe': Number.NaN } });
  writer.write({ step: 2 ** 40, scalars: { 'val/loss': -1 } });
  writer.close();
  const events = decodeRecords(readFileSync(writer.path)).map(decodeMessage);
  expect(events).toHaveLength(3);
  expect(find(events[0], 1)).toBe(1_700_000_000.25);
  expect(String(find(events[0], 3))).toBe('brain.Event:2');
  expect(find(events[1], 2)).toBe(300n);
  expect(find(events[2], 2)).toBe(2n ** 40n);
  const values = decodeMessage(find(events[1], 5) as Buffer).map(({ field, value }) => {
    expect(field).toBe(1);
    const entry = decodeMessage(value as Buffer);
    return [String(find(entry, 1)), find(entry, 2)];
  });
  expect(values).toEqual([
    ['train/loss', 2.5],
    ['sel/größe', Number.NaN],
  ]);
});

test('the name is one that TensorBoard looks for', () => {
  const writer = openTensorboard(folder, { clock: () => 1_700_000_000_250 });
  writer.close();
  expect(readdirSync(folder)).toEqual([`events.out.tfevents.1700000000.${hostname()}.${process.pid}.0`]);
});

test('a resumed run tells TensorBoard from which step it begins again', () => {
  const writer = openTensorboard(folder, { resumedFromStep: 500 });
  writer.close();
  const [, start] = decodeRecords(readFileSync(writer.path)).map(decodeMessage);
  expect(find(start, 2)).toBe(501n);
  expect(decodeMessage(find(start, 7) as Buffer)).toEqual([{ field: 1, value: 1n }]);
});

test('each event is on disk as a whole when the call returns', () => {
  // A clock that stands still: a busy machine must not look like a slow disk, after which writers pause.
  const writer = openTensorboard(folder, { now: () => 0 });
  for (let step = 1; step <= 20; step++) {
    writer.write({ step, scalars: { loss: step } });
    expect(decodeRecords(readFileSync(writer.path))).toHaveLength(step + 1);
  }
  expect(writer.flush()).toBe(true);
  writer.close();
  expect(writer.drops).toBe(0);
});
