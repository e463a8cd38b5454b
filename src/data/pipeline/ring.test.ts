import { describe, expect, it } from 'vitest';
import { createRing, Ring } from './ring.js';

const CURSOR = { turn: 1, block: 2, document: 3, token: 4 };
const ringOf = (lanes: number, workers: number) =>
  new Ring(createRing({ lanes, slots: 4, sequenceLength: 8, workers }));

describe('news by message', () => {
  it('is sent once by each worker, when all of its lanes have what is wanted', () => {
    const ring = ringOf(5, 2); // lanes 0, 2, 4 and 1, 3
    const publish = (lane: number, sample: number) => ring.publish(lane, sample, CURSOR, 0);
    expect(publish(0, 0)).toBe(false); // there is no waiter
    ring.announceWait([2, 1, 1, 1, 0]);
    expect(publish(1, 0)).toBe(false);
    expect(publish(0, 1)).toBe(false);
    expect(publish(3, 0)).toBe(true); // lanes 1 and 3
    expect(publish(3, 1)).toBe(false); // said already
    expect(publish(4, 0)).toBe(false);
    expect(publish(2, 0)).toBe(true); // lanes 0 and 2; nothing was wanted of 4
  });

  it('is not sent by a worker that had everything before', () => {
    const ring = ringOf(2, 2);
    ring.publish(0, 0, CURSOR, 0);
    ring.announceWait([1, 1]);
    expect(ring.publish(0, 1, CURSOR, 0)).toBe(false);
    expect(ring.publish(1, 0, CURSOR, 0)).toBe(true);
  });

  it('is sent for a lane that ends: more will not come', () => {
    const ring = ringOf(1, 1);
    ring.announceWait([3]);
    expect(ring.publish(0, 0, CURSOR, 0)).toBe(false);
    expect(ring.end(0)).toBe(true);
  });

  it('a new wait replaces the one before', () => {
    const ring = ringOf(2, 1);
    ring.announceWait([5, 5]);
    ring.announceWait([0, 1]);
    expect(ring.publish(1, 0, CURSOR, 0)).toBe(true);
  });
});

it('a grant tells whether the worker of the lane sleeps, once', () => {
  const ring = ringOf(4, 2);
  ring.announceSleep(1);
  expect(ring.grant(0, 3)).toBe(false);
  expect(ring.grant(3, 3)).toBe(true);
  expect(ring.grant(1, 3)).toBe(false);
  expect([0, 1, 2, 3].map((lane) => ring.granted(lane))).toEqual([3, 3, 0, 3]);
});

it('a slot has its window and its place, and the counts are those of all workers', () => {
  const ring = ringOf(2, 2);
  ring.window(1, 5).fill(7);
  ring.publish(1, 5, CURSOR, 9);
  expect([...ring.window(1, 1)]).toEqual(new Array(9).fill(7)); // four slots: 5 is where 1 was
  expect(ring.place(1, 5)).toEqual({ cursor: CURSOR, epoch: 9 });
  ring.count(0, 2, 30);
  ring.count(1, 3, 40);
  expect(ring.counts).toEqual({ documents: 5, bytes: 70 });
});
