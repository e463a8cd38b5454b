import { describe, expect, it } from 'vitest';
import { ExitCode, UsageError } from '../errors.js';
import { show, unknownKeyProblem } from './check.js';
import { parseConfig, parseSavedConfig } from './parse.js';
import type { Config } from './schema.js';

function failure(input: unknown): UsageError {
  try {
    parseSavedConfig(input);
  } catch (error) {
    if (error instanceof UsageError) return error;
    throw error;
  }
  throw new Error('was accepted');
}

describe('parseConfig', () => {
  it.each([
    [
      { train: { lr_schedule: 'cosin' } },
      'train.lr_schedule: "cosin" is not allowed; one of cosine, wsd, linear, constant (did you mean cosine?)',
    ],
    [
      { data: { source: 'fineweb_educ' } },
      'data.source: "fineweb_educ" is not allowed; one of synthetic, needle, stories, text, jsonl, hub, files, tokens, chat, mixture (did you mean fineweb_edu?)',
    ],
    [{ train: { lr: -1 } }, 'train.lr: -1 is not allowed; a number > 0'],
    [{ train: { lr: '3e-4' } }, 'train.lr: "3e-4" is not allowed; a number > 0'],
    [{ train: { steps: Number.POSITIVE_INFINITY } }, 'train.steps: Infinity is not allowed; an integer >= 1'],
    [{ nsa: { n_sel: 2 } }, 'nsa.n_sel: 2 is less than nsa.init_blocks 1 + nsa.local_blocks 2; at least their sum'],
    [{ train: { ddp: 2 } }, 'train.ddp: 2 is not allowed; one of -1, 0, 1'],
    [{ train: { stepz: 1 } }, 'train.stepz: unknown key (did you mean steps?)'],
    [{ trian: {} }, 'trian: unknown section; one of model, nsa, data, runtime, train (did you mean train?)'],
    [{ model: 3 }, 'model: 3 is not allowed; keys such as dim, n_layers, n_heads'],
    [3, 'config: 3 is not a config; sections model, nsa, data, runtime, train'],
    [{ nsa: { d: 12 } }, 'nsa.d: 12 does not divide nsa.l 32 and nsa.l_sel 64; one of 1, 2, 4, 8, 16, 32'],
  ])('%j', (input, message) => expect(failure(input).message).toBe(message));

  it('ends the command with the code for bad usage', () => expect(failure({ model: 3 }).exitCode).toBe(ExitCode.usage));

  it('reports all problems at once, one line each, a list once', () => {
    const lines = failure({ train: { lr: 0, betas: [2, 3] }, model: { dim: 'wide' } }).message.split('\n');
    expect(lines.map((line) => line.split(':')[0]).sort()).toEqual(['model.dim', 'train.betas', 'train.lr']);
  });

  it('never lets a message grow past a line', () => {
    expect(failure({ train: { lr: 'x\n'.repeat(500) } }).message.length).toBeLessThan(120);
    expect(failure({ train: { lr: 'x\n'.repeat(500) } }).message).not.toContain('\n');
  });

  it('fills in what is missing', () =>
    expect(parseSavedConfig({ train: { steps: 7 } }).train).toMatchObject({ steps: 7, lr: 2e-4 }));
});

it('parseConfig without an argument is refused with the list of configs', () => {
  const without = parseConfig as () => Config;
  expect(without).toThrow(UsageError);
  expect(without).toThrow(/^parseConfig: give the keys .* readConfig\(name\): one of 125m_1m, .*, quickstart, .*toy$/);
});

describe('unknown names', () => {
  it('without a near one, lists what there is', () => {
    expect(unknownKeyProblem('nsa.zzzzzz').message).toMatch(/^unknown key; nsa has l, d, l_sel/);
  });

  it.each([
    ['lr', 'unknown section; one of model, nsa, data, runtime, train (did you mean train.lr?)'],
    ['seed', 'unknown section; one of model, nsa, data, runtime, train (did you mean data.seed or train.seed?)'],
  ])('a key without its section: %s', (path, message) => {
    expect(unknownKeyProblem(path).message).toBe(message);
  });
});

describe('show', () => {
  it.each([
    [undefined, 'nothing'],
    [null, 'null'],
    ['a', '"a"'],
    [Number.NaN, 'NaN'],
    [[1, 2], '[1,2]'],
  ])('%s', (value, text) => expect(show(value)).toBe(text));
});
