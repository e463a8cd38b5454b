import { expect, test } from 'vitest';
import { firstHost } from './identity.js';

test.each([
  ['node1', 'node1'],
  ['a,b,c', 'a'],
  ['node[1-3]', 'node1'],
  ['node[08-11]', 'node08'],
  ['gpu[1,3-4,07],login', 'gpu1'],
  ['r[1-2]n[1-2]', 'r1n1'],
  ['rack-[1-2]-x.example.org', 'rack-1-x.example.org'],
])('the first host of %s', (list, host) => expect(firstHost(list)).toBe(host));

test.each(['', 'node[1-2', 'node1]', 'node[[1]]', 'node[a-b]', 'a,,b'])('%s is refused', (list) =>
  expect(() => firstHost(list)).toThrow('cannot be read'),
);
