/** A hash that another thread computes is the hash of the bytes, whatever pieces they come in. */
import { createHash } from 'node:crypto';
import { expect, it } from 'vitest';
import { HashThread } from './hash-thread.js';

/** Bytes that differ from slot to slot, so that a slot hashed twice or too early shows. */
function bytes(length: number, seed: number): Uint8Array {
  const all = new Uint8Array(length);
  for (let i = 0; i < length; i++) all[i] = (i * 31 + (i >> 12) * 7 + seed) & 255; // Uint8Array.from takes seconds
  return all;
}

it('hashes pieces of any size, also more than the ring holds', () => {
  const large = bytes(21 << 20, 1);
  const pieces = [bytes(3, 2), new Uint8Array(0), large.subarray(0, 19_000_001), large.subarray(5), bytes(4 << 20, 3)];
  const [thread, hash] = [new HashThread(), createHash('sha256')];
  for (const piece of pieces) {
    const memory = piece.slice();
    thread.update(memory);
    memory.fill(0); // the caller may reuse its memory at once
    hash.update(piece);
  }
  expect(thread.digest()).toBe(hash.digest('hex'));
  thread.free();
});

it('has the hash of nothing without a piece', () => {
  const thread = new HashThread();
  expect(thread.digest()).toBe(createHash('sha256').digest('hex'));
  thread.free();
});
