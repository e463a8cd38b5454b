import { expect, it } from 'vitest';
import { absentRow, summarize, type VerifyRow } from '../verify/verify.js';
import { stylesFor } from './shared/io.js';
import { verifyReport } from './verify.js';

const row = { device: 'cpu', invariant: '1 reference' as const };

it('prints a table with the verdict and the reason of each row', () => {
  const rows: VerifyRow[] = [
    { ...row, case: 'core', ok: true, error: 3.21e-7, limit: 2e-5, reason: null },
    { ...row, case: 'module', ok: false, error: 12, limit: 0, reason: '12 values differ' },
    { ...row, case: 'broken', ok: false, error: null, limit: 0, reason: 'the error is NaN' },
    absentRow('cuda', 'no CUDA backend in this build'),
  ];
  expect(verifyReport(summarize(rows), 1234, { style: stylesFor({}, {}), width: 80 }).split('\n')).toEqual([
    'device  invariant    case         error   limit  result',
    'cpu     1 reference  core        3.2e-7  2.0e-5  ok',
    'cpu     1 reference  module          12       0  FAILED: 12 values differ',
    'cpu     1 reference  broken           -       0  FAILED: the error is NaN',
    'cuda    all          all checks       -       -  skipped: no CUDA backend in',
    '                                                 this build',
    '',
    '1 passed, 2 failed, 1 skipped in 1.2 s',
  ]);
});
