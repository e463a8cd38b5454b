import { describe, expect, it } from 'vitest';
import { useFusedAttention } from './fused.js';
import { parseConfig } from './parse.js';
import type { Config } from './schema.js';

const runtime = (keys: Partial<Config['runtime']>) => parseConfig({ runtime: keys }).runtime;

describe('useFusedAttention', () => {
  it('is on by default at every length', () => expect(useFusedAttention(runtime({}), 'win', 1)).toBe(true));

  it('the branch decides over the global switch', () => {
    const mixed = runtime({ use_fa2: false, use_fa2_win: true });
    expect(useFusedAttention(mixed, 'win', 100)).toBe(true);
    expect(useFusedAttention(mixed, 'cmp', 100)).toBe(false);
    expect(useFusedAttention(runtime({ use_fa2_cmp: false }), 'cmp', 100)).toBe(false);
    expect(useFusedAttention(runtime({ use_fa2_cmp: false }), 'win', 100)).toBe(true);
  });

  it('the threshold is the least length, and -1 means never', () => {
    const keys = runtime({ fa2_min_len_win: 16, fa2_min_len_cmp: -1, use_fa2_cmp: true });
    expect(useFusedAttention(keys, 'win', 15)).toBe(false);
    expect(useFusedAttention(keys, 'win', 16)).toBe(true);
    expect(useFusedAttention(keys, 'cmp', 1e6)).toBe(false);
  });

  it('is off when only the reference may run', () => {
    expect(useFusedAttention(runtime({ force_parity: true }), 'win', 100)).toBe(false);
  });
});
