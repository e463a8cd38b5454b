import type { IncomingMessage } from 'node:http';
import { describe, expect, it } from 'vitest';
import { bearerKey, hostName, isLoopback, Keys } from './access.js';

it.each(['localhost', '::1', '127.0.0.1', '127.8.9.10'])('%s is loopback', (host) =>
  expect(isLoopback(host)).toBe(true),
);
it.each([
  '',
  '0.0.0.0',
  '::',
  '10.0.0.1',
  '127.0.0.1.evil.example',
  '127.evil.example',
  '127.0.0',
  'localhost.evil.example',
])('%j is not loopback', (host) => expect(isLoopback(host)).toBe(false));

it.each([
  ['localhost', 'localhost'],
  ['LocalHost:80', 'localhost'],
  ['[::1]:7070', '::1'],
  ['[::1]', '::1'],
  ['127.0.0.1:1', '127.0.0.1'],
  ['', ''],
  [undefined, ''],
  [':80', ''],
  ['::1', ''],
  ['[localhost', ''],
  ['localhost]', ''],
  ['[localhost]', ''],
  ['a:b', ''],
  ['a:1:2', ''],
])('the name in the Host header %j is %j', (header, name) => expect(hostName(header)).toBe(name));

it.each([
  ['Bearer k-1', 'k-1'],
  ['bearer  k', 'k'],
  ['Bearer k junk', ''],
  ['Bearer', ''],
  ['Basic k', ''],
  [undefined, ''],
])('the key of %j is %j', (authorization, key) =>
  expect(bearerKey({ headers: { authorization } } as IncomingMessage)).toBe(key),
);

describe('keys', () => {
  it('are found whole', () => {
    const keys = new Keys(['one', 'another']);
    expect(['one', 'another', 'on', 'ones', '', 'One'].map((key) => keys.has(key))).toEqual([
      ...[true, true, false, false, false, false],
    ]);
    expect(new Keys([]).isEmpty).toBe(true);
    expect(new Keys([]).has('')).toBe(false);
  });
});
