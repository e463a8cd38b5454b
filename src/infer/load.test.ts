import {
  cpSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { byteLevelTokenizerJson } from '../data/testing/tokenizer-json.js';
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { PackedMatrix } from '../ops/linear/packed.js';
import { readSafetensors, writeSafetensors } from '../run/safetensors.js';
import { toFloat32 } from '../run/safetensors-format.js';
import { float32ToBfloat16 } from '../tensor/bfloat16.js';
import { Tape } from '../tensor/tape.js';
import { bytesOf } from '../tensor/tensor.js';
import { cpu } from '../testing/devices.js';
import { relativeError } from '../testing/numbers.js';
import { lastLogits } from './decode.js';
import { loadModel, writeFinalModel } from './load.js';
import { saveTinyCheckpoint, tinyConfig, tinyModel } from './testing/tiny-model.js';

let root: string;
const models: LanguageModel[] = [];
beforeEach(() => {
  root = mkdtempSync(join(tmpdir(), 'trefoil-infer-'));
});
afterEach(() => {
  for (const model of models.splice(0)) model.free();
  rmSync(root, { recursive: true, force: true });
});

const CONTEXT = Array.from({ length: 37 }, (_, i) => (i * 29) % 256);

function made(config = tinyConfig(), vocabulary = 256, seed = 5): LanguageModel {
  const model = tinyModel(config, vocabulary, seed);
  models.push(model);
  return model;
}

function loaded(path: string) {
  const result = loadModel(cpu(), path);
  models.push(result.model);
  return result;
}

/** The error of loading: one line, of the class that ends with exit code 2, and no memory left behind. */
function refusal(path: string): string {
  const before = cpu().pool.bytesInUse;
  try {
    loaded(path);
  } catch (error) {
    expect(error).toBeInstanceOf(UsageError);
    const { message } = error as UsageError;
    expect(message).not.toContain('\n');
    expect(cpu().pool.bytesInUse).toBe(before);
    return message;
  }
  throw new Error(`${path} was loaded`);
}

function finalModel(config = tinyConfig(), vocabulary = 256): { run: string; model: LanguageModel } {
  const run = join(root, 'run');
  const model = made(config, vocabulary);
  writeFinalModel(run, model, config);
  return { run, model };
}

function editConfig(run: string, edit: (content: Record<string, unknown>) => void): void {
  const path = join(run, 'config.json');
  const content = JSON.parse(readFileSync(path, 'utf8'));
  edit(content);
  writeFileSync(path, JSON.stringify(content));
}

/** Replaces the weights of a model by the nearest numbers of another type, as float32 or in that type. */
function narrowWeights(run: string, dtype: 'BF16' | 'F16', isWide: boolean): void {
  const path = join(run, 'model.safetensors');
  editConfig(run, (content) => delete content['weights']);
  const { tensors } = readSafetensors(path);
  const narrow = [...tensors].map(([name, { shape, data }]) => {
    const values = toFloat32({ dtype: 'F32', data })!;
    // An f16 of these magnitudes has the bits of a bf16 of its own: any bits are some number.
    const bits = float32ToBfloat16(values).map((value) => (dtype === 'BF16' ? value : value & 0xbbff));
    const wide = toFloat32({ dtype, data: bytesOf(bits) })!;
    return isWide
      ? { name, shape, dtype: 'F32' as const, data: bytesOf(wide) }
      : { name, shape, dtype, data: bytesOf(bits) };
  });
  writeSafetensors(path, narrow);
}

describe('weights on the CPU', () => {
  const matrices = (model: LanguageModel) => model.parameters.filter(({ value }) => value instanceof PackedMatrix);

  it('are packed, and the model has the bits of one whose weights are tensors', () => {
    const { run } = finalModel();
    const packed = loaded(run).model;
    const tensors = loadModel(cpu(), run, 'f32', { trainable: true }).model;
    models.push(tensors);
    expect(matrices(tensors)).toEqual([]);
    expect(matrices(packed).length).toBe(packed.parameters.filter(({ value }) => value.shape.length === 2).length);
    expect(Buffer.from(lastLogits(packed, CONTEXT).buffer)).toEqual(Buffer.from(lastLogits(tensors, CONTEXT).buffer));
    const values = (model: LanguageModel) => model.parameters.map(({ value }) => value.read());
    expect(values(packed)).toEqual(values(tensors));
  });

  it('refuse to be trained, and can be if that was asked for', () => {
    const { run } = finalModel();
    const step = (model: LanguageModel) => {
      const tape = new Tape(cpu());
      const ids = tape.from(CONTEXT, [CONTEXT.length], 'i32');
      try {
        tape.backward(model.loss(tape, ids, ids, { lengths: [CONTEXT.length] }));
      } finally {
        tape.end();
      }
    };
    const { model: tensors } = loadModel(cpu(), run, 'f32', { trainable: true });
    models.push(tensors);
    step(tensors);
    expect(tensors.parameters.every(({ gradient }) => gradient !== null)).toBe(true);
    expect(() => step(loaded(run).model)).toThrow('load the model with { trainable: true } to train or change it');
  });

  it.each(['BF16', 'F16'] as const)('of a %s file keep its type, with the bits of the widened file', (dtype) => {
    const { run } = finalModel();
    cpSync(run, join(root, 'wide'), { recursive: true });
    narrowWeights(run, dtype, false);
    narrowWeights(join(root, 'wide'), dtype, true);
    const [narrow, wide] = [run, join(root, 'wide')].map((path) => loaded(path).model);
    const types = (model: LanguageModel) => new Set(matrices(model).map(({ value }) => (value as PackedMatrix).type));
    expect([...types(narrow)]).toEqual([dtype.toLowerCase()]);
    expect([...types(wide)]).toEqual(['f32']);
    expect(Buffer.from(lastLogits(narrow, CONTEXT).buffer)).toEqual(Buffer.from(lastLogits(wide, CONTEXT).buffer));
  });

  it('in int8 leave the gate and the compression as they are', () => {
    const { run } = finalModel(tinyConfig({ nsa: { phi: 'mlp' } }));
    const { model } = loadModel(cpu(), run, 'f32', { weights: 'int8' });
    models.push(model);
    const exact = matrices(model).filter(({ value }) => (value as PackedMatrix).type !== 'int8');
    expect(new Set(exact.map(({ name }) => name.replace(/.*attention/, '')))).toEqual(
      new Set(['.gate.weight', '.phi_k.w1', '.phi_k.w2', '.phi_v.w1', '.phi_v.w2']),
    );
    const [ours, theirs] = [model, loaded(run).model].map((each) => lastLogits(each, CONTEXT));
    expect(relativeError(ours, Float64Array.from(theirs))).toBeLessThan(0.05);
    expect(ours).not.toEqual(theirs);
  });

  it('in int8 are refused on a GPU', () => {
    const gpu = { kind: 'cuda' } as Device;
    expect(() => loadModel(gpu, finalModel().run, 'f32', { weights: 'int8' })).toThrow(
      'weights in int8 are for the CPU: use --device cpu, or omit --weights',
    );
  });
});

describe('a final model', () => {
  const variants = {
    nsa: {},
    'dense, tied, swiglu': { model: { attention: 'dense', tie_embeddings: true, mlp: 'swiglu' } },
    'phi mlp, sigmoid gate': { nsa: { phi: 'mlp', gate: 'sigmoid', cmp_rope: 'before' } },
    'phi conv, scaled positions, padded vocabulary': {
      model: { rope_scale: 2, rope_theta: 500, vocab_size: 300 },
      nsa: { phi: 'conv', gate_temp: 0.5 },
    },
  };
  it.each(Object.entries(variants))('comes back with the same bits: %s', (_, sections) => {
    const config = tinyConfig(sections);
    const { run, model } = finalModel(config);
    const back = loaded(run);
    expect(Buffer.from(lastLogits(back.model, CONTEXT).buffer)).toEqual(Buffer.from(lastLogits(model, CONTEXT).buffer));
    expect(back.model.shape).toEqual(model.shape);
    expect(back.config.model).toEqual(config.model);
    expect(back.config.nsa).toEqual(config.nsa);
    expect(back.tokenizer.name).toBe('byte');
    expect(back).toMatchObject({ step: 7, path: join(run, 'model.safetensors'), warnings: [] });
  });

  it('is two files and nothing else, and names what made it', () => {
    const { run } = finalModel();
    expect(readdirSync(run).sort()).toEqual(['config.json', 'model.safetensors']);
    const saved = JSON.parse(readFileSync(join(run, 'config.json'), 'utf8'));
    expect(saved).toMatchObject({ format: 'trefoil', version: 1, step: 7, tokenizer: 'byte', vocab_size: 256 });
    expect(Object.keys(saved).sort()).toEqual([
      'format',
      'model',
      'nsa',
      'seq_len',
      'step',
      'tokenizer',
      'trefoil_version',
      'version',
      'vocab_size',
      'weights',
    ]);
  });

  it('is replaced by the next one, with its step', () => {
    const { run } = finalModel();
    const next = made(tinyConfig(), 256, 6);
    writeFinalModel(run, next, tinyConfig(), { step: 9 });
    const back = loaded(run);
    expect(back.step).toBe(9);
    expect(lastLogits(back.model, CONTEXT)).toEqual(lastLogits(next, CONTEXT));
  });

  it('can be one file of any name, with config.json beside it', () => {
    const config = tinyConfig();
    const model = made(config);
    const path = join(root, 'kept', 'small.safetensors');
    writeFinalModel(path, model, config);
    expect(lastLogits(loaded(path).model, CONTEXT)).toEqual(lastLogits(model, CONTEXT));
  });

  it('takes its tokenizer.json along, so that the folder can be moved', () => {
    const files = join(root, 'tokenizer');
    mkdirSync(files);
    writeFileSync(join(files, 'tokenizer.json'), JSON.stringify(byteLevelTokenizerJson('<stop>')));
    writeFileSync(join(files, 'tokenizer_config.json'), JSON.stringify({ eos_token: '<stop>' }));
    for (const tokenizer of [files, join(files, 'tokenizer.json')]) {
      const { run } = finalModel(tinyConfig({ data: { tokenizer } }), 263);
      const moved = join(root, 'moved');
      renameSync(run, moved);
      const away = join(root, 'away');
      renameSync(files, away);
      const back = loaded(moved);
      expect(back.tokenizer).toMatchObject({ vocabSize: 263, separator: 262 });
      expect(back.tokenizer.decode(back.tokenizer.encode('the é'))).toBe('the é');
      renameSync(away, files);
      rmSync(moved, { recursive: true });
    }
  });

  it('is written even when its tokenizer.json has gone meanwhile', () => {
    const { run } = finalModel(tinyConfig({ data: { tokenizer: join(root, 'gone.json') } }));
    expect(refusal(run)).toContain(`${join(run, 'config.json')}: data.tokenizer: "${join(root, 'gone.json')}"`);
  });

  it("moves another program's config.json aside", () => {
    const run = join(root, 'run');
    mkdirSync(run);
    writeFileSync(join(run, 'config.json'), '{"model_type": "other"}');
    finalModel();
    expect(readFileSync(join(run, 'config.json.before-trefoil'), 'utf8')).toContain('other');
    finalModel();
    expect(readdirSync(run)).toHaveLength(3);
    loaded(run);
  });

  it('that cannot be written is refused by name', () => {
    writeFileSync(join(root, 'file'), '');
    const write = () => writeFinalModel(join(root, 'file', 'run'), made(), tinyConfig());
    expect(write).toThrow(UsageError);
    expect(write).toThrow(/file.run: cannot create: a part of the path is a file/);
  });
});

describe('where a model is found', () => {
  it('a run folder: the final model, else the newest checkpoint that verifies', () => {
    const config = tinyConfig();
    const run = join(root, 'run');
    const [first, second, last] = [1, 2, 3].map((seed) => made(config, 256, seed));
    saveTinyCheckpoint(run, 10, first, config);
    const newest = saveTinyCheckpoint(run, 20, second, config);
    expect(loaded(run)).toMatchObject({ step: 20, path: join(newest, 'model.safetensors'), warnings: [] });
    expect(lastLogits(loaded(run).model, CONTEXT)).toEqual(lastLogits(second, CONTEXT));

    writeFinalModel(run, last, config);
    expect(lastLogits(loaded(run).model, CONTEXT)).toEqual(lastLogits(last, CONTEXT));

    rmSync(join(run, 'config.json')); // half of a final model counts for nothing
    expect(loaded(run).step).toBe(20);
    writeFileSync(join(newest, 'model.safetensors'), 'short');
    const older = loaded(run);
    expect(older.step).toBe(10);
    expect(older.warnings).toEqual([expect.stringContaining(`checkpoint ${newest} is skipped: `)]);
    expect(lastLogits(older.model, CONTEXT)).toEqual(lastLogits(first, CONTEXT));
  });

  it('a checkpoint: its folder, its weights, or the file that points to it', () => {
    const config = tinyConfig();
    const run = join(root, 'run');
    const model = made(config);
    const folder = saveTinyCheckpoint(run, 10, model, config);
    for (const path of [folder, join(folder, 'model.safetensors'), join(run, 'checkpoints', 'latest')]) {
      expect(loaded(path).step).toBe(10);
      expect(lastLogits(loaded(path).model, CONTEXT)).toEqual(lastLogits(model, CONTEXT));
    }
  });

  it('the vocabulary of a checkpoint is that of its weights', () => {
    const config = tinyConfig({ data: { source: 'synthetic', vocab_size: 40 } });
    const folder = saveTinyCheckpoint(join(root, 'run'), 1, made(config, 40), config);
    expect(loaded(folder).model.shape.vocabSize).toBe(40);
  });

  it('a file of weights with config.json beside it', () => {
    const { run, model } = finalModel();
    expect(lastLogits(loaded(join(run, 'model.safetensors')).model, CONTEXT)).toEqual(lastLogits(model, CONTEXT));
    cpSync(join(run, 'model.safetensors'), join(root, 'alone.safetensors'));
    expect(refusal(join(root, 'alone.safetensors'))).toContain(`${join(root, 'config.json')}: is missing; copy it`);
  });

  it('anything else is refused with what to give', () => {
    const forms =
      'give a run folder, a checkpoint such as checkpoints/step-100, a model.safetensors, a Hugging Face folder, or hf:owner/name';
    expect(refusal(join(root, 'none'))).toBe(`${join(root, 'none')}: there is no such file or folder; ${forms}`);
    expect(refusal(root)).toBe(`${root}: holds no model; ${forms}`);
    mkdirSync(join(root, 'checkpoints'));
    expect(refusal(root)).toBe(`${root}: has no checkpoint yet; ${forms}`);
    writeFileSync(join(root, 'notes.txt'), '');
    expect(refusal(join(root, 'notes.txt'))).toBe(`${join(root, 'notes.txt')}: is not a model; ${forms}`);
    writeFileSync(join(root, 'model.safetensors'), '');
    expect(refusal(root)).toContain('config.json: is missing');
  });
});

describe('damage', () => {
  it('one changed byte of the weights is noticed', () => {
    const { run } = finalModel();
    const path = join(run, 'model.safetensors');
    const good = readFileSync(path);
    for (const at of [0, 9, Math.floor(good.length / 2), good.length - 1]) {
      const bad = Buffer.from(good);
      bad[at] ^= 4;
      writeFileSync(path, bad);
      expect(refusal(run)).toBe(
        `${path}: is damaged: its content does not have the recorded SHA-256; use another checkpoint`,
      );
    }
    writeFileSync(path, good.subarray(0, 100));
    expect(refusal(run)).toContain(`${path}: is damaged: it has 100 bytes`);
  });

  it('a truncated or hostile file without a recorded hash is refused by its header', () => {
    const { run } = finalModel();
    editConfig(run, (content) => delete content['weights']);
    loaded(run);
    const path = join(run, 'model.safetensors');
    const good = readFileSync(path);
    for (const bytes of [good.subarray(0, 5), good.subarray(0, 100), good.subarray(0, -1), Buffer.alloc(64, 255)]) {
      writeFileSync(path, bytes);
      expect(refusal(run)).toContain(path);
    }
  });

  it('a config that claims another model is refused before memory is taken for it', () => {
    const { run } = finalModel();
    const reserved = cpu().pool.systemAllocations;
    for (const [section, key, value] of [
      ['model', 'dim', 1e12],
      ['model', 'n_layers', 10_000],
      ['model', 'mlp_ratio', 1e9],
      ['nsa', 'phi', 'conv'],
    ] as const) {
      const kept = readFileSync(join(run, 'config.json'));
      editConfig(run, (content) => Object.assign(content[section] as object, { [key]: value }));
      expect(refusal(run), key).toContain('do not belong together; take both from the same run');
      writeFileSync(join(run, 'config.json'), kept);
    }
    editConfig(run, (content) => Object.assign(content['nsa'] as object, { phi: 'mlp', phi_hidden: 1e12 }));
    expect(refusal(run)).toContain('do not belong together');
    expect(cpu().pool.systemAllocations).toBe(reserved);
  });

  it('weights of the right size with other names or types are refused by name', () => {
    const { run } = finalModel();
    editConfig(run, (content) => delete content['weights']);
    const path = join(run, 'model.safetensors');
    const { tensors } = readSafetensors(path);
    const write = (rename: (name: string) => string) =>
      writeSafetensors(
        path,
        [...tensors].map(([name, tensor]) => ({ name: rename(name), ...tensor })),
      );
    write((name) => (name === 'norm' ? 'other' : name));
    expect(refusal(run)).toBe(`${path}: has no norm, which this model needs; check the config`);
    const extra = { name: 'other', dtype: 'F32' as const, shape: [0], data: new Uint8Array() };
    writeSafetensors(path, [...[...tensors].map(([name, tensor]) => ({ name, ...tensor })), extra]);
    expect(refusal(run)).toBe(`${path}: holds other, which this model does not have; check the config`);
    const halved = [...tensors].map(([name, tensor]) => ({
      name,
      ...tensor,
      dtype: 'I16' as const,
      data: tensor.data.subarray(0, tensor.data.length / 2),
    }));
    writeSafetensors(path, halved);
    expect(refusal(run)).toMatch(/embedding is I16 \[256, 16\], this model needs F32, BF16 or F16 \[256, 16\]/);
  });

  const edits: [string, (content: Record<string, unknown>) => void, RegExp][] = [
    [
      'another format',
      (c) => Object.assign(c, { format: 'pt' }),
      /config.json: is not the config.json of a Trefoil model/,
    ],
    [
      'a newer version',
      (c) => Object.assign(c, { version: 2, trefoil_version: '9.9.9' }),
      /has version 2, written by trefoil 9.9.9; this trefoil reads version 1: use a newer trefoil/,
    ],
    ['an older version', (c) => Object.assign(c, { version: 0 }), /has version 0, .* use an older trefoil/],
    [
      'an unknown key',
      (c) => Object.assign(c, { more: 1 }),
      /Unrecognized key: "more"; take the file as training wrote it/,
    ],
    ['no vocabulary', (c) => delete c['vocab_size'], /config.json: vocab_size: /],
    [
      'a bad tokenizer',
      (c) => Object.assign(c, { tokenizer: 'bpe' }),
      /config.json: data.tokenizer: ".*bpe" is not one of byte/,
    ],
    ['a bad model', (c) => Object.assign(c, { model: { dim: -1 } }), /config.json: model.dim: -1 is not allowed/],
    ['an unknown model key', (c) => Object.assign(c, { model: { width: 1 } }), /config.json: model.width: unknown key/],
    ['no model', (c) => Object.assign(c, { model: 3 }), /config.json: model: 3 is not allowed/],
    ['a contradiction', (c) => Object.assign(c['nsa'] as object, { d: 3 }), /config.json: nsa.d: 3 does not divide/],
    ['another vocabulary', (c) => Object.assign(c, { vocab_size: 257 }), /do not belong together/],
  ];
  it.each(edits)('config.json with %s is refused', (_, edit, message) => {
    const { run } = finalModel();
    editConfig(run, edit);
    expect(refusal(run)).toMatch(message);
    expect(refusal(run)).toContain(join(run, 'config.json'));
  });

  it('config.json that is no JSON, no object or far too large is refused', () => {
    const { run } = finalModel();
    const path = join(run, 'config.json');
    for (const [content, message] of [
      ['{"format": "tref', 'is damaged: it is not JSON'],
      ['', 'is damaged: it is not JSON'],
      ['[]', 'is not the config.json of a Trefoil model'],
      ['null', 'is not the config.json of a Trefoil model'],
      [' '.repeat(2 ** 20 + 1), 'too large'],
    ]) {
      writeFileSync(path, content);
      expect(refusal(run)).toContain(`${path}: `);
      expect(refusal(run)).toContain(message);
    }
    rmSync(path);
    mkdirSync(path);
    expect(refusal(run)).toContain(`${path}: is a folder`);
  });

  it('a checkpoint without a sound config is refused by the name of its file', () => {
    const config = tinyConfig();
    const state = (folder: string) => join(folder, 'state.json');
    const model = made(config);
    const wrong = { ...config, model: { ...config.model, dim: 0 } };
    const folder = saveTinyCheckpoint(join(root, 'a'), 1, model, wrong);
    expect(refusal(folder)).toContain(`${state(folder)}: model.dim: 0 is not allowed`);
    const other = saveTinyCheckpoint(join(root, 'b'), 1, model, { ...config, model: { ...config.model, n_layers: 3 } });
    expect(refusal(other)).toContain('do not belong together');
    expect(existsSync(state(other))).toBe(true);
  });
});
