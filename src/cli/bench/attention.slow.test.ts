import { describe, expect, it } from 'vitest';
import { runCli } from '../testing/run.js';

const SMALL = ['--quick', '--threads', '1', '--heads', '4', '--groups', '2', '--dim', '8'];
const COLUMNS = ['what', 'pass', 'kernel', 'S', 'sequences', 'ms', 'gflops', 'peak_share', 'extra_bytes'];

describe('bench attention', () => {
  it('prints the JSON of the contract and nothing else on stdout', async () => {
    const { code, stdout, stderr } = await runCli(['bench', 'attention', ...SMALL, '--lengths', '256,64', '--json']);
    expect(code).toBe(0);
    const result = JSON.parse(stdout);
    expect(Object.keys(result)).toEqual(['machine', 'device', 'threads', 'peak_gflops', 'rows']);
    expect(result).toMatchObject({ device: 'cpu', threads: 1 });
    expect(result.peak_gflops).toBeGreaterThan(1);
    for (const row of result.rows) {
      expect(Object.keys(row)).toEqual(COLUMNS);
      expect(row.ms).toBeGreaterThan(0);
      expect(row.extra_bytes).toBeGreaterThanOrEqual(0);
    }
    const passes = (S: number, what: string) =>
      result.rows.filter((row: { S: number; what: string }) => row.S === S && row.what === what).length;
    for (const S of [64, 256]) {
      for (const what of ['nsa', 'dense', 'cmp', 'sel', 'win']) expect(passes(S, what), `${S} ${what}`).toBe(2);
      expect(passes(S, 'score')).toBe(1);
    }
    expect(passes(2048, 'linear')).toBe(2);
    expect(stderr).toBe(''); // progress is for terminals
  });

  it('prints CSV', async () => {
    const { code, stdout } = await runCli(['bench', 'attention', ...SMALL, '--lengths', '32', '--csv']);
    expect(code).toBe(0);
    const lines = stdout.trimEnd().split('\n');
    expect(lines[0]).toBe(COLUMNS.join(','));
    expect(lines).toHaveLength(1 + 2 + 11);
    for (const line of lines.slice(1)) expect(line.split(',')).toHaveLength(COLUMNS.length);
  });

  it('prints a table with ratios and growth', async () => {
    const words = ['bench', 'attention', ...SMALL, '--lengths', '64,128', '--selection', 'local'];
    const { code, stdout } = await runCli(words);
    expect(code).toBe(0);
    expect(stdout).toContain('1 thread, measured peak');
    expect(stdout).toMatch(/^ +S +dense ms +NSA ms +dense\/NSA +forward +backward +dense grows +NSA grows$/m);
    expect(stdout).toMatch(/^ *128( +[\d.]+){2}( +[\d.]+x){5}$/m);
  });
});
