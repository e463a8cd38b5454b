import { expect, it } from 'vitest';
import { SteadyAges, wallAges } from './ages.js';
import { resolveThresholds, THRESHOLD_ENTRIES } from './thresholds.js';

it('a single look believes the wall clock', () => {
  const ageOf = wallAges(1000);
  expect(ageOf('a', 900)).toBe(100);
  expect(ageOf('a', 1100)).toBe(-100);
});

it('repeated looks count their own time', () => {
  let [wall, steady] = [1000, 0];
  const ages = new SteadyAges(
    () => wall,
    () => steady,
  );
  expect(ages.look()('a', 990)).toBe(10); // first sight: the wall clock is all there is
  [wall, steady] = [1000 + 5 + 3600, 5]; // an hour ahead within five seconds
  expect(ages.look()('a', 990)).toBe(15);
  [wall, steady] = [wall + 5, 10];
  expect(ages.look()('a', 1003)).toBe(5); // new since the last look, so at most five seconds old
  [wall, steady] = [0, 20]; // back to 1970
  expect(ages.look()('a', 1003)).toBe(15);
  expect(ages.look()('b', 999)).toBe(0); // in the future: as old as nothing
});

it('thresholds: flag over variable over default, every variable known, none negative', () => {
  expect(resolveThresholds({}).heartbeatStall).toBe(180);
  expect(resolveThresholds({ NSA_WATCH_HEARTBEAT_STALL_S: '60' }).heartbeatStall).toBe(60);
  expect(resolveThresholds({ NSA_WATCH_HEARTBEAT_STALL_S: '60' }, { heartbeatStall: 5 }).heartbeatStall).toBe(5);
  for (const [name, { variable }] of THRESHOLD_ENTRIES) expect(resolveThresholds({ [variable]: '7' })[name]).toBe(7);
  expect(() => resolveThresholds({ NSA_WATCH_FETCH_S: '-1' })).toThrow('NSA_WATCH_FETCH_S');
});
