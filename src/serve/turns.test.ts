import { setImmediate } from 'node:timers/promises';
import { expect, it } from 'vitest';
import { Turns } from './turns.js';

it('work is done in order, short pieces together and long ones in turns of their own', async () => {
  const turns = new Turns();
  const done: string[] = [];
  const wait = (ms: number) => {
    const until = performance.now() + ms;
    while (performance.now() < until);
  };
  for (const name of ['a', 'b'])
    turns.add(() => {
      done.push(name);
      wait(5);
      if (name === 'a') turns.add(() => done.push('c'));
    });
  expect(done).toEqual([]);
  await setImmediate();
  expect(done).toEqual(['a']);
  while (done.length < 3) await setImmediate();
  expect(done).toEqual(['a', 'b', 'c']);
  turns.add(() => done.push('d')); // after a pause
  while (done.length < 4) await setImmediate();
});
