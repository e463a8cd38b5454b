import { describe, expect, it } from 'vitest';
import { trainFlagRow, trainFlags } from './flags.js';
import { findKey } from './keys.js';

describe('the table of flags', () => {
  it('names only keys that exist, and each flag once', () => {
    for (const flag of trainFlags) if (flag.key !== null) expect(findKey(flag.key), flag.name).toBeDefined();
    expect(new Set(trainFlags.map((flag) => flag.name)).size).toBe(trainFlags.length);
  });

  it('has a line for the help page, with choices and the default', () => {
    const row = (name: string) => trainFlagRow(trainFlags.find((one) => one.name === name)!);
    expect(row('precision')[0]).toBe('--precision <fp32|bf16>');
    expect(row('steps')).toEqual(['--steps <n>', 'optimizer steps (default: 1000)']);
    expect(row('local-path')[1]).not.toContain('default');
    expect(row('json')[0]).toBe('--json');
  });
});
