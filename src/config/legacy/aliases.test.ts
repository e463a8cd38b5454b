import { describe, expect, it } from 'vitest';
import { findKey } from '../keys.js';
import { aliasNames, applyAlias, retiredKey } from './aliases.js';

describe('aliases', () => {
  it('lead to keys that exist and are none themselves', () => {
    for (const name of aliasNames) {
      expect(findKey(name), name).toBeUndefined();
      expect(findKey(applyAlias(name, true)!.path), name).toBeDefined();
    }
  });

  it('no_gc: true turns checkpointing off, false leaves it alone, nonsense reaches the schema', () => {
    const path = 'runtime.gradient_checkpointing';
    expect(applyAlias('runtime.no_gc', true)).toEqual({ path, value: false });
    expect(applyAlias('runtime.no_gc', false)).toEqual({ path, value: undefined });
    expect(applyAlias('runtime.no_gc', 'maybe')).toEqual({ path, value: 'maybe' });
  });

  it('leave other names alone, those of Object too', () => {
    expect(applyAlias('train.lr', 1)).toBeUndefined();
    expect(applyAlias('constructor', 1)).toBeUndefined();
    expect(retiredKey('toString')).toBeUndefined();
  });

  it('retired keys say what to use', () => expect(retiredKey('runtime.use_triton_sel')).toContain('selection_kernel'));
});
