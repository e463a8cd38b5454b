import { describe, expect, it } from 'vitest';
import { parseTrainFlags, trainFlagRow, trainFlags } from './flags.js';
import { findKey } from './keys.js';

const setting = (argv: string[], path: string) => parseTrainFlags(argv).layer.get(path);

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

describe('parseTrainFlags', () => {
  it('knows nothing without flags', () => {
    const nothing = {
      config: null,
      resume: null,
      save: null,
      printConfig: false,
      dashboard: false,
      json: false,
      help: false,
    };
    expect(parseTrainFlags([])).toEqual({ layer: new Map(), ...nothing });
  });

  it('reads values in both spellings and says where they came from', () => {
    expect(setting(['--steps', '200'], 'train.steps')).toEqual({
      value: 200,
      origin: 'flag --steps',
      where: 'flag --steps',
    });
    expect(setting(['--steps=200'], 'train.steps')?.value).toBe(200);
    expect(setting(['--ddp', '-1'], 'train.ddp')?.value).toBe(-1);
    expect(setting(['--ddp=0'], 'train.ddp')?.value).toBe(0);
  });

  it('sets tokenizer, learning rate, threads and seed', () => {
    const flags = ['--tokenizer', 'gpt2', '--lr', '3e-4', '--threads', '2', '--seed', '7'];
    const { layer } = parseTrainFlags(flags);
    const values = ['data.tokenizer', 'train.lr', 'runtime.threads', 'train.seed'].map((key) => layer.get(key)?.value);
    expect(values).toEqual(['gpt2', 3e-4, 2, 7]);
  });

  it('keeps text as text', () => {
    expect(setting(['--local-path', '123'], 'data.path')?.value).toBe('123');
    expect(setting(['--out-dir', '1e3'], 'train.out_dir')?.value).toBe('1e3');
  });

  it('reads switches', () => {
    expect(setting(['--no-gc'], 'runtime.gradient_checkpointing')?.value).toBe(false);
    expect(setting(['--synthetic-on-fail'], 'data.synthetic_on_fail')?.value).toBe(true);
    expect(parseTrainFlags(['--print-config', '--json'])).toMatchObject({ printConfig: true, json: true });
    expect(parseTrainFlags(['-h']).help).toBe(true);
  });

  it('reads what steers the command', () => {
    expect(parseTrainFlags(['--config', 'base', '--resume', 'auto', '--save', 'm.safetensors'])).toMatchObject({
      config: 'base',
      resume: 'auto',
      save: 'm.safetensors',
    });
    expect(parseTrainFlags(['--resume-from', 'checkpoints/step-5']).resume).toBe('checkpoints/step-5');
  });

  it.each([
    ['train.betas=[0.8, 0.9]', 'train.betas', [0.8, 0.9]],
    ['train.lr=3e-4', 'train.lr', 3e-4],
    ['model.tie_embeddings=true', 'model.tie_embeddings', true],
    ['model.tie_embeddings=1', 'model.tie_embeddings', true],
    ['runtime.threads=null', 'runtime.threads', null],
    ['data.path=null', 'data.path', null],
    ['data.path=a=b', 'data.path', 'a=b'],
    ['data.tokenizer=123', 'data.tokenizer', '123'],
    ['runtime.use_flash=false', 'runtime.use_fa2', false],
  ])('--set %s', (text, path, value) => {
    expect(setting(['--set', text], path)).toMatchObject({ value, origin: 'flag --set' });
  });

  it('lets the last of two win, whatever their form', () => {
    expect(setting(['--steps', '1', '--set', 'train.steps=2'], 'train.steps')?.value).toBe(2);
    expect(setting(['--set', 'train.steps=2', '--steps', '1'], 'train.steps')?.value).toBe(1);
  });

  it.each([
    [['--stepz', '1'], '--stepz: unknown flag (did you mean --steps?); see train --help'],
    [['-x'], '-x: unknown flag'],
    [['--steps'], '--steps: value missing; give <n>'],
    [['--steps', '--json'], '--steps: value missing; give <n>'],
    [['--config='], '--config: value missing; give <name|file>'],
    [['--no-gc=1'], '--no-gc: takes no value'],
    [['steps'], 'steps: unexpected argument (did you mean --steps?)'],
    [['--', 'x'], 'x: unexpected argument'],
    [['--set', 'train.lr'], '--set "train.lr": give key=value'],
    [['--set', '=3'], '--set "=3": give key=value'],
    [['--set', 'train.stepz=1'], 'train.stepz: unknown key (did you mean steps?) [flag --set train.stepz]'],
    [['--set', 'train.betas=[1'], '--set train.betas "[1": not a YAML value'],
    [['--set', 'model=3'], 'model: unknown section'],
  ])('%j is refused', (argv, message) => expect(() => parseTrainFlags(argv)).toThrow(message));
});
