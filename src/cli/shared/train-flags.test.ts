import { describe, expect, it } from 'vitest';
import { parseTrainFlags } from './train-flags.js';

const setting = (argv: string[], path: string) => parseTrainFlags(argv).layer.get(path);

describe('parseTrainFlags', () => {
  it('knows nothing without flags', () => {
    const nothing = {
      config: null,
      resume: null,
      save: null,
      printConfig: false,
      dashboard: false,
      json: false,
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
    ['runtime.use_flash=false', 'runtime.fused', false],
  ])('--set %s', (text, path, value) => {
    expect(setting(['--set', text], path)).toMatchObject({ value, origin: 'flag --set' });
  });

  it('lets the last of two win, whatever their form', () => {
    expect(setting(['--steps', '1', '--set', 'train.steps=2'], 'train.steps')?.value).toBe(2);
    expect(setting(['--set', 'train.steps=2', '--steps', '1'], 'train.steps')?.value).toBe(1);
  });

  it.each([
    [['--stepz', '1'], "unknown option '--stepz'\n(Did you mean --steps?)"],
    [['-x'], "unknown option '-x'"],
    [['--steps'], "option '--steps <n>' argument missing"],
    [['--steps', '--json'], '--steps: value missing; give <n>'],
    [['--config='], '--config: value missing; give <name|file>'],
    [['--no-gc=1'], "unknown option '--no-gc=1'"],
    [['steps'], 'too many arguments'],
    [['--', 'x'], 'too many arguments'],
    [['--set', 'train.lr'], '--set "train.lr": give key=value'],
    [['--set', '=3'], '--set "=3": give key=value'],
    [['--set', 'train.stepz=1'], 'train.stepz: unknown key (did you mean steps?) [flag --set train.stepz]'],
    [['--set', 'train.betas=[1'], '--set train.betas "[1": not a YAML value'],
    [['--set', 'model=3'], 'model: unknown section'],
  ])('%j is refused', (argv, message) => expect(() => parseTrainFlags(argv)).toThrow(message));
});
