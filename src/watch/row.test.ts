import { expect, test } from 'vitest';
import { describeRow } from './row.js';

test('numbers have a unit and limits a direction; words stay as they are', () => {
  const level = 'green' as const;
  expect(describeRow({ rule: 'heartbeat', level, value: 6.417, limit: 5 })).toEqual({
    value: '6.417 s',
    limit: 'at most 5 s',
  });
  expect(describeRow({ rule: 'fetch_p95 rank1', level, value: 8, limit: 100 })).toEqual({
    value: '8 ms',
    limit: 'below 100 ms',
  });
  expect(describeRow({ rule: 'loss', level, value: 3.5779268741607666, limit: 'finite' })).toEqual({
    value: '3.578',
    limit: 'finite',
  });
  expect(describeRow({ rule: 'halt', level, value: 'none', limit: null })).toEqual({ value: 'none', limit: '-' });
});
