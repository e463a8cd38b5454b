import { expect, test } from 'vitest';
import { expandNodeList } from './nodelist.js';

test.each([
  ['node1', ['node1']],
  ['a,b,c', ['a', 'b', 'c']],
  ['node[1-3]', ['node1', 'node2', 'node3']],
  ['node[08-11]', ['node08', 'node09', 'node10', 'node11']],
  ['gpu[1,3-4,07],login', ['gpu1', 'gpu3', 'gpu4', 'gpu07', 'login']],
  ['r[1-2]n[1-2]', ['r1n1', 'r1n2', 'r2n1', 'r2n2']],
  ['rack-[1-2]-x.example.org', ['rack-1-x.example.org', 'rack-2-x.example.org']],
])('%s', (list, hosts) => expect(expandNodeList(list)).toEqual(hosts));

test.each([
  ['', 'names no host'],
  ['node[1-2', 'brackets do not match'],
  ['node1]', 'brackets do not match'],
  ['node[[1]]', 'brackets do not match'],
  ['node[a-b]', 'is not a range'],
  ['node[3-1]', 'runs backwards'],
  ['node[0-99999999]', 'more than'],
])('%s is refused', (list, reason) => expect(() => expandNodeList(list)).toThrow(reason));
