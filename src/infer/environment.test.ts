import { expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { kernelOptions } from '../model/kernels.js';
import { modelEnvironmentWarnings, withEnvironment } from './environment.js';
import { tinyConfig } from './testing/tiny-model.js';

const config = tinyConfig();

it('chooses kernels', () => {
  expect(kernelOptions(withEnvironment(config, {})).kernel).toBe('adaptive');
  expect(kernelOptions(withEnvironment(config, { NSA_FORCE_PARITY: '1' })).parity).toBe(true);
  const ranges = withEnvironment(config, { NSA_SEL_RANGES_V2: '1', NSA_SEL_RANGES_V2_MIN_S: '9' });
  expect(kernelOptions(ranges)).toMatchObject({ kernel: 'v2', sharedFrom: 9 });
});

it('never changes the model', () => {
  const env = { NSA_ROPE_SCALE: '8', NSA_TOKENIZER: 'gpt2', NSA_FORCE_BRANCH: 'win', NSA_LR: '1' };
  expect(withEnvironment(config, env)).toEqual(config);
});

it('refuses a bad value by the name of its variable', () => {
  expect(() => withEnvironment(config, { NSA_FORCE_PARITY: 'maybe' })).toThrow(UsageError);
  expect(() => withEnvironment(config, { NSA_FORCE_PARITY: 'maybe' })).toThrow('NSA_FORCE_PARITY');
  expect(() => withEnvironment(config, { NSA_PREFILL_TILE: '-1' })).toThrow('[env NSA_PREFILL_TILE]');
});

it('names what a saved model does not read', () => {
  const env = { NSA_PREFILL_TILE: '64', NSA_SEL_RANGES_V2: '1', NSA_USE_FA2: '0', NSA_LR: '1', NSA_ROPE_SCALE: '2' };
  expect(modelEnvironmentWarnings({ ...env, NSA_ENV_STATIC: '1' }, 'generate')).toEqual([
    'NSA_ENV_STATIC: no effect; the environment is always read once, at start-up',
    'no effect on generate: NSA_LR, NSA_ROPE_SCALE',
  ]);
});
