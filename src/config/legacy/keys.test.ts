import { describe, expect, it } from 'vitest';
import { findKey } from '../keys.js';
import { layerOfTree } from '../layer.js';
import { parseSavedConfig } from '../parse.js';
import { oldKeys, oldValues, presentKey, retiredKey, withPresentNamesIn } from './keys.js';

const layer = (tree: unknown) => layerOfTree(tree, 'x.yaml', (path) => `x.yaml at ${path.join('.')}`);
const runtime = (keys: object, name: string) => layer({ runtime: keys }).get(`runtime.${name}`)?.value;

describe('earlier names', () => {
  it('lead to keys and values that exist, and are none themselves', () => {
    for (const { name, key } of oldKeys) {
      expect(findKey(name), name).toBeUndefined();
      expect(findKey(key), name).toBeDefined();
    }
    for (const { name, key, value } of oldValues) {
      expect(findKey(key)?.choices, name).toContain(value);
      expect(findKey(key)?.choices).not.toContain(name);
    }
  });

  it('are recorded with the setting', () => {
    expect(layer({ data: { fwe_queue: 3 } }).get('data.queue')).toEqual({
      value: 3,
      origin: 'x.yaml',
      where: 'x.yaml at data.fwe_queue',
      written: 'data.fwe_queue',
    });
    expect(layer({ data: { source: 'fineweb_edu' } }).get('data.source')).toMatchObject({
      value: 'hub',
      written: 'fineweb_edu',
    });
    expect(layer({ data: { source: 'hub' } }).get('data.source')).not.toHaveProperty('written');
  });

  it('leave other names alone, those of Object too', () => {
    expect(presentKey('train.lr')).toBe('train.lr');
    expect(presentKey('constructor')).toBe('constructor');
    expect(retiredKey('toString')).toBeUndefined();
    expect(layer({ data: { source: 'toString' } }).get('data.source')?.value).toBe('toString');
  });

  it('retired keys say what to use', () => expect(retiredKey('runtime.use_triton_sel')).toContain('selection_kernel'));
});

describe('runtime.no_gc', () => {
  it.each([
    [true, false],
    [false, undefined],
    ['maybe', 'maybe'],
  ])('%s means gradient_checkpointing %s', (value, expected) =>
    expect(runtime({ no_gc: value }, 'gradient_checkpointing')).toBe(expected),
  );
});

describe('runtime.fused: one switch, where there were three', () => {
  it.each([
    [{ use_fa2: true }, true],
    [{ use_fa2: false }, false],
    [{ use_flash: true, fa2_enabled: false }, false],
    [{ use_fa2: true, use_fa2_win: null, use_fa2_cmp: null }, true],
    [{ use_fa2_win: false }, false],
    [{ use_fa2: true, use_fa2_cmp: false }, false],
    [{ use_fa2: false, use_fa2_win: true }, false],
    [{ use_fa2: false, use_fa2_win: true, use_fa2_cmp: true }, true],
    [{ use_fa2_win: true }, undefined],
    [{ use_fa2_win: 'maybe' }, 'maybe'],
  ])('%j: %s', (keys, expected) => expect(runtime(keys, 'fused')).toBe(expected));

  it.each([
    [{ fa2_min_len_win: 0, fa2_min_len_cmp: 0 }, 0],
    [{ fa2_min_len_win: 512, fa2_min_len_cmp: 2048 }, 2048],
    [{ fa2_min_len_win: -1, fa2_min_len_cmp: 2048 }, -1],
    [{ fa2_min_len_cmp: 16 }, 16],
    [{ fa2_min_len_cmp: 'short' }, 'short'],
  ])('fused_min_len of %j: %s', (keys, expected) => expect(runtime(keys, 'fused_min_len')).toBe(expected));
});

describe('keys that were stronger than the one they became', () => {
  it.each([
    [{ use_sel_pack: false, selection_kernel: 'v2' }, 'selection_kernel', 'v1'],
    [{ selection_kernel: 'v2', use_sel_pack: true }, 'selection_kernel', 'v2'],
    [{ prefill_batched: false, prefill_tile: 64 }, 'prefill_tile', 1],
    [{ prefill_batched: true, prefill_tile: 64 }, 'prefill_tile', 64],
  ])('%j: %s is %s', (keys, name, expected) => expect(runtime(keys, name)).toBe(expected));
});

describe('the config of a checkpoint', () => {
  it('is read with its earlier names', () => {
    const { data, runtime } = parseSavedConfig({
      data: { source: 'fineweb_edu_local', path: 'texts', fwe_queue: 3 },
      runtime: { use_fa2: true, use_fa2_win: false, sdpa_audit: true },
      train: { steps: 7 },
    });
    expect(data).toMatchObject({ source: 'files', path: 'texts', queue: 3 });
    expect(runtime).toMatchObject({ fused: false, print_kernels: true });
  });

  it('is not touched without one', () => {
    const config = JSON.parse('{"train": {"lr": 1, "__proto__": 2}, "data": null}');
    expect(withPresentNamesIn(config)).toBe(config);
    for (const value of [null, 3, [1], 'text']) expect(withPresentNamesIn(value)).toBe(value);
  });
});
