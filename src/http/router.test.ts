import type { IncomingMessage } from 'node:http';
import { describe, expect, it } from 'vitest';
import { HttpError } from './error.js';
import { addressOf, Router } from './router.js';

const router = new Router({
  'GET /': 'page',
  'GET /runs': 'list',
  'GET /runs/:run': 'run',
  'GET /runs/:run/trace/*': 'trace',
  'POST /runs/:run/halt': 'halt',
  'GET /jobs': 'jobs',
  'POST /jobs': 'add',
});

function refusal(method: string, path: string): HttpError {
  try {
    router.find(method, path);
  } catch (error) {
    if (error instanceof HttpError) return error;
    throw error;
  }
  throw new Error(`${method} ${path} was found`);
}

describe('a router', () => {
  it.each([
    ['GET', '/', 'page', []],
    ['GET', '/runs', 'list', []],
    ['HEAD', '/runs', 'list', []],
    ['GET', '/runs/a', 'run', ['a']],
    ['GET', '/runs/', 'run', ['']],
    ['GET', '/runs/a%2Fb%20c', 'run', ['a/b c']],
    ['GET', '/runs/a/trace/t/token/7', 'trace', ['a', 't', 'token', '7']],
    ['GET', '/runs/a/trace/', 'trace', ['a', '']],
    ['POST', '/runs/a/halt', 'halt', ['a']],
    ['POST', '/jobs', 'add', []],
  ])('%s %s', (method, path, handler, params) => expect(router.find(method, path)).toEqual({ handler, params }));

  it.each(['/other', '/runs/a/trace', '/runs/a/b', '/runs/a/halt/now', '//', '', '*', '/constructor', 'http://x/runs'])(
    'has no route for %j',
    (path) => expect(refusal('GET', path)).toMatchObject({ status: 404, detail: { code: 'unknown_url' } }),
  );

  it('names the methods of a path', () => {
    expect(refusal('POST', '/runs')).toMatchObject({ status: 405, detail: { headers: { allow: 'GET' } } });
    expect(refusal('PUT', '/jobs')).toMatchObject({ status: 405, message: 'use GET or POST for this route' });
    expect(refusal('HEAD', '/runs/a/halt').status).toBe(405);
  });

  it('refuses a path that is not valid', () => expect(refusal('GET', '/runs/%ff').status).toBe(400));
});

it('an address is a path and a query', () => {
  const { path, query } = addressOf({ url: '/a%20b?x=1&y=a?b' } as IncomingMessage);
  expect([path, query.get('x'), query.get('y')]).toEqual(['/a%20b', '1', 'a?b']);
  expect(addressOf({} as IncomingMessage).path).toBe('/');
});
