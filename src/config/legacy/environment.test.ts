import { describe, expect, it } from 'vitest';
import { findKey } from '../keys.js';
import {
  environmentLayer,
  environmentWarnings,
  readTimeoutMinutes,
  readVariable,
  TRAINING_IGNORES,
  unreadVariables,
} from './environment.js';
import { presentKey } from './keys.js';
import { environmentVariables } from './variables.js';

const value = (env: Record<string, string>, path: string) => environmentLayer(env).get(path)?.value;

describe('the table of variables', () => {
  it('names each variable once and only keys that exist', () => {
    const names = environmentVariables.map((row) => row.name);
    expect(new Set(names).size).toBe(names.length);
    for (const row of environmentVariables)
      if (row.key !== null) expect(findKey(presentKey(row.key)), row.name).toBeDefined();
  });

  it('reads each variable as the kind its key has', () => {
    const kinds = {
      flag: 'boolean',
      disable: 'boolean',
      integer: 'integer',
      number: 'number',
      ranges: 'choice',
    } as const;
    for (const row of environmentVariables) {
      // Switches that became another kind of key: keys.test.ts.
      if (row.key === null || row.type === 'text' || row.type === 'none' || presentKey(row.key) !== row.key) continue;
      expect(findKey(row.key)?.kind, row.name).toBe(kinds[row.type]);
    }
  });
});

describe('environmentLayer', () => {
  it('types the values and says where they came from', () => {
    const layer = environmentLayer({
      NSA_LR: '3e-4',
      NSA_SEQ_LEN: ' 128 ',
      NSA_TOKENIZER: 'gpt2',
      NSA_PREFILL_TILE: '0',
    });
    expect(layer.get('train.lr')).toEqual({ value: 3e-4, origin: 'env NSA_LR', where: 'env NSA_LR' });
    expect(layer.get('train.seq_len')?.value).toBe(128);
    expect(layer.get('data.tokenizer')?.value).toBe('gpt2');
    expect(layer.get('runtime.prefill_tile')?.value).toBe(0);
    expect(layer.size).toBe(4);
  });

  it('NSA_SEL_RANGES_V2: 0 is v1, 1 is v2, unset or empty says nothing', () => {
    expect(value({ NSA_SEL_RANGES_V2: '0' }, 'runtime.selection_kernel')).toBe('v1');
    expect(value({ NSA_SEL_RANGES_V2: '1' }, 'runtime.selection_kernel')).toBe('v2');
    expect(environmentLayer({ NSA_SEL_RANGES_V2: '' }).size).toBe(0);
    expect(environmentLayer({}).size).toBe(0);
  });

  it('flags are 0 or 1', () => {
    expect(value({ NSA_USE_FA2: '0' }, 'runtime.fused')).toBe(false);
    expect(value({ NSA_USE_FA2: '1' }, 'runtime.fused')).toBe(true);
    expect(value({ NSA_USE_FA2: 'True' }, 'runtime.fused')).toBe(true);
  });

  it('a variable that disables does so at 1 and says nothing at 0', () => {
    expect(value({ NSA_NO_GC: '1' }, 'runtime.gradient_checkpointing')).toBe(false);
    expect(value({ NSA_TB_DISABLE: '1' }, 'runtime.tensorboard')).toBe(false);
    expect(environmentLayer({ NSA_NO_GC: '0', NSA_TB_DISABLE: '0' }).size).toBe(0);
  });

  it.each([
    [{ NSA_USE_FA2: 'maybe' }, 'NSA_USE_FA2: "maybe" is not allowed; 0 or 1'],
    [{ NSA_LR: 'fast' }, 'NSA_LR: "fast" is not allowed; a number > 0'],
    [{ NSA_SEQ_LEN: '12.5' }, 'NSA_SEQ_LEN: "12.5" is not allowed; an integer >= 1'],
    [{ NSA_SEQ_LEN: '0x10' }, 'NSA_SEQ_LEN: "0x10" is not allowed; an integer >= 1'],
    [{ NSA_SEL_RANGES_V2: '2' }, 'NSA_SEL_RANGES_V2: "2" is not allowed; 0 or 1'],
  ])('%j is refused by name', (env, message) => expect(() => environmentLayer(env)).toThrow(message));
});

describe('environmentWarnings', () => {
  it('lists variables without effect, and no others', () => {
    const env = {
      NSA_USE_FA: '1',
      NSA_ZZZZZZZZ: '1',
      NSA_USE_TRITON_SEL: '0',
      NSA_LR: '1',
      NSA_WATCH_HALT: '1',
      HOME: '/',
    };
    expect(environmentWarnings(env)).toEqual([
      'NSA_USE_FA: unknown variable, ignored (did you mean NSA_USE_FA2?)',
      'NSA_USE_TRITON_SEL: no effect; Triton is not used; set runtime.selection_kernel',
      'NSA_ZZZZZZZZ: unknown variable, ignored',
    ]);
  });
});

describe('unreadVariables', () => {
  it('names in one line what is set and not read by a command', () => {
    const env = {
      NSA_PREFILL_TILE: '2048',
      NSA_PREFILL_BATCHED: '1',
      NSA_LR: '1',
      NSA_WATCH_HALT: '1',
      NSA_ENV_STATIC: '1',
    };
    const line = 'no effect on a training: NSA_PREFILL_BATCHED, NSA_PREFILL_TILE';
    expect(unreadVariables(env, 'a training', TRAINING_IGNORES)).toEqual([line]);
    expect(unreadVariables({ NSA_LR: '1', NSA_PREFILL_TILE: '' }, 'a training', TRAINING_IGNORES)).toEqual([]);
  });
});

describe('readVariable', () => {
  it('types what other commands read', () => {
    expect(readVariable({ NSA_WATCH_INTERVAL_S: '1.5' }, 'NSA_WATCH_INTERVAL_S')).toBe(1.5);
    expect(readVariable({ NSA_WATCH_HALT: '1' }, 'NSA_WATCH_HALT')).toBe(true);
    expect(readVariable({}, 'NSA_WATCH_HALT')).toBeUndefined();
    expect(() => readVariable({ NSA_WATCH_INTERVAL_S: 'x' }, 'NSA_WATCH_INTERVAL_S')).toThrow('a number');
  });

  it('knows only documented names', () => expect(() => readVariable({}, 'NSA_SECRET')).toThrow('not in the table'));
});

describe('readTimeoutMinutes', () => {
  it('is a quarter of an hour by default, and takes fractions', () => {
    expect(readTimeoutMinutes({})).toBe(15);
    expect(readTimeoutMinutes({ NSA_PG_TIMEOUT_MIN: '2.5' })).toBe(2.5);
  });

  it('refuses 0 by name', () => {
    const message = 'NSA_PG_TIMEOUT_MIN: "0" is not allowed; a number > 0';
    expect(() => readTimeoutMinutes({ NSA_PG_TIMEOUT_MIN: '0' })).toThrow(message);
  });
});
