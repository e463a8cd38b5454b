import { describe, expect, it } from 'vitest';
import { cpu } from '../testing/devices.js';
import { absentRow, type Finding, INVARIANTS, runCheck, summarize, Worst } from './check.js';
import { checksFor } from './verify.js';

const check = (run: () => Finding, limit = 0.5) => ({ invariant: '1 reference' as const, case: 'a case', limit, run });

describe('a check', () => {
  const row = { device: 'cpu', invariant: '1 reference', case: 'a case', limit: 0.5 };

  it.each<[string, () => Finding, object]>([
    ['passes up to its limit', () => ({ error: 0.5, detail: 'x is off' }), { ok: true, error: 0.5, reason: null }],
    ['fails over it', () => ({ error: 0.6, detail: 'x is off' }), { ok: false, error: 0.6, reason: 'x is off' }],
    ['fails without details', () => ({ error: 0.6 }), { ok: false, error: 0.6, reason: 'over the limit' }],
    [
      'fails on NaN, which JSON does not have',
      () => ({ error: Number.NaN, detail: 'x is off' }),
      { ok: false, error: null, reason: 'the error is NaN: x is off' },
    ],
    ['may be skipped', () => ({ skipped: 'too large' }), { ok: null, error: null, reason: 'too large' }],
    [
      'fails when it throws',
      () => {
        throw new Error('no such kernel');
      },
      { ok: false, error: null, reason: 'no such kernel' },
    ],
  ])('%s', (_, run, expected) => {
    expect(runCheck(check(run), cpu())).toEqual({ ...row, ...expected });
  });

  it('is counted', () => {
    const rows = [
      runCheck(
        check(() => ({ error: 0 })),
        cpu(),
      ),
      runCheck(
        check(() => ({ error: 9 })),
        cpu(),
      ),
      absentRow('cuda', 'no CUDA backend in this build'),
    ];
    expect(summarize(rows)).toMatchObject({ passed: 1, failed: 1, skipped: 1, rows });
    expect(rows[2]).toMatchObject({ device: 'cuda', ok: null, reason: 'no CUDA backend in this build' });
  });
});

describe('the worst of several errors', () => {
  it('is the largest, and NaN is larger than any', () => {
    const worst = new Worst();
    worst.add(1, 'a');
    worst.add(3, 'b');
    worst.add(2, 'c');
    expect(worst.finding).toEqual({ error: 3, detail: 'b' });
    worst.add(Number.NaN, 'd');
    worst.add(9, 'e');
    expect(worst.finding).toEqual({ error: Number.NaN, detail: 'd' });
  });
});

describe('the list of checks', () => {
  const checks = checksFor(cpu(), false);

  it('has every invariant, in order', () => {
    expect([...new Set(checks.map(({ invariant }) => invariant))]).toEqual(INVARIANTS);
  });

  it('has every phi, gate and rotation for each invariant of the module', () => {
    for (const invariant of ['1 reference', '2 causality', '3 prefix', '4 packing', '6 gradients'])
      for (const phi of ['avg', 'conv', 'mlp'])
        for (const gate of ['softmax', 'sigmoid'])
          for (const rope of ['after', 'before', 'none'])
            expect(
              checks.filter(
                (one) => one.invariant === invariant && one.case.includes(`phi ${phi}, gate ${gate}, rope ${rope}`),
              ),
              `${invariant} ${phi} ${gate} ${rope}`,
            ).toHaveLength(1);
  });

  it('has no two rows of the same name', () => {
    const names = checksFor(cpu(), true).map((one) => `${one.invariant} ${one.case}`);
    expect(new Set(names).size).toBe(names.length);
  });
});
