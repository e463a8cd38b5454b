import { describe, expect, it } from 'vitest';
import { cpuMs } from '../testing/cpu-time.js';
import fc from '../testing/properties.js';
import { relationProblems } from './rules.js';
import { type Config, configShape } from './schema.js';

type Parts = { [Section in keyof Config]?: Partial<Config[Section]> };

const problems = (parts: Parts) => relationProblems(configShape.parse(parts)).map((p) => `${p.path}: ${p.message}`);

describe('relations between keys', () => {
  it('accepts the defaults', () => expect(problems({})).toEqual([]));

  it.each<[string, Parts, string[]]>([
    [
      'G divides H',
      { model: { n_kv_groups: 5 } },
      ['model.n_kv_groups: 5 does not divide model.n_heads 12; one of 1, 2, 3, 4, 6, 12'],
    ],
    [
      'more groups than heads',
      { model: { n_heads: 1, n_kv_groups: 2 } },
      ['model.n_kv_groups: 2 does not divide model.n_heads 1; 1'],
    ],
    [
      'at most 32 heads in a group',
      { model: { n_heads: 66, n_kv_groups: 2 } },
      ['model.n_kv_groups: 2 leaves 33 heads in a group, more than 32; one of 3, 6, 11, 22, 33, 66'],
    ],
    [
      'llama3 factors in order',
      { model: { rope_type: 'llama3', rope_low_freq_factor: 4 } },
      ['model.rope_low_freq_factor: 4 is not below model.rope_high_freq_factor 4; lower it'],
    ],
    ['d_k even', { model: { d_k: 63 } }, ['model.d_k: 63 is odd; rotary positions need an even size such as 64']],
    [
      'a schedule of blocks falls',
      { train: { n_sel_from: 8 } },
      ['train.n_sel_from: 8 is less than nsa.n_sel 16; at least nsa.n_sel'],
    ],
    [
      'a gate that opens is softmax',
      { nsa: { gate: 'sigmoid' }, train: { gate_release_steps: 5 } },
      ['train.gate_release_steps: 5 needs nsa.gate softmax; set it, or 0'],
    ],
    [
      'a gate that opens is not forced',
      { nsa: { force_branch: 'sel' }, train: { gate_release_steps: 5 } },
      [
        'train.gate_release_steps: 5 has no effect with a forced gate (nsa.force_branch, nsa.force_uniform_gate); set 0',
      ],
    ],
    [
      'dense attention has no schedule',
      { model: { attention: 'dense' }, train: { gate_release_steps: 5, n_sel_from: 32, n_sel_steps: 5 } },
      [
        'train.gate_release_steps: 5 needs model.attention nsa; set it, or 0',
        'train.n_sel_from: 32 needs model.attention nsa; set it, or null',
      ],
    ],
    ['d divides l', { nsa: { l: 24 } }, ['nsa.d: 16 does not divide nsa.l 24; one of 1, 2, 4, 8']],
    ['d divides l_sel', { nsa: { l_sel: 72 } }, ['nsa.d: 16 does not divide nsa.l_sel 72; one of 1, 2, 4, 8']],
    [
      'd divides both',
      { nsa: { d: 7 } },
      ['nsa.d: 7 does not divide nsa.l 32 and nsa.l_sel 64; one of 1, 2, 4, 8, 16, 32'],
    ],
    ['l is at most l_sel', { nsa: { l: 128 } }, ['nsa.l: 128 is greater than nsa.l_sel 64; at most nsa.l_sel']],
    [
      'positions in the window alone',
      { nsa: { rope: 'window', shared_kv: true } },
      [
        'nsa.rope: window needs nsa.cmp_rope none, not after; set it, or all',
        'nsa.rope: window needs keys of its own: nsa.shared_kv false; set it, or all',
      ],
    ],
    [
      'one override of the gate',
      { nsa: { force_branch: 'sel', force_uniform_gate: true } },
      ['nsa.force_uniform_gate: true contradicts nsa.force_branch sel; set one of the two'],
    ],
    [
      'a local source has a path',
      { data: { source: 'jsonl' } },
      ['data.path: missing; data.source jsonl needs a path (--local-path)'],
    ],
  ])('%s', (_, parts, expected) => expect(problems(parts)).toEqual(expected));

  it.each(['text', 'files', 'tokens'] as const)('%s needs a path', (source) => {
    expect(problems({ data: { source } })).toHaveLength(1);
    expect(problems({ data: { source, path: 'x' } })).toEqual([]);
  });

  it.each([1, 5, 6, 16])('%i heads in a group are allowed', (perGroup) => {
    expect(problems({ model: { n_heads: perGroup * 2, n_kv_groups: 2 } })).toEqual([]);
  });

  it('names only values that would be accepted', () => {
    const size = fc.integer({ min: 1, max: 300 });
    fc.assert(
      fc.property(size, size, (n_heads, n_kv_groups) => {
        const [found] = problems({ model: { n_heads, n_kv_groups } });
        if (found === undefined) return;
        const named = found
          .slice(found.lastIndexOf(';') + 1)
          .match(/\d+/g)!
          .map(Number);
        expect(named.length).toBeGreaterThan(0);
        for (const groups of named) expect(problems({ model: { n_heads, n_kv_groups: groups } })).toEqual([]);
      }),
    );
  });

  it('answers at once for sizes that make no sense', () => {
    const n_heads = Number.MAX_SAFE_INTEGER;
    const senseless = { model: { n_heads, n_kv_groups: 2 }, nsa: { l: n_heads, l_sel: n_heads } };
    expect(cpuMs(() => expect(problems(senseless).length).toBeGreaterThan(0))).toBeLessThan(10_000);
  });
});
