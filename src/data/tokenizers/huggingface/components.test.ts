/** Small files for what the larger tests do not reach: SentencePiece-style BPE, flags of added tokens, split behaviours. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { streamed } from '../../testing/texts.js';
import { byteLevelTokenizerJson } from '../../testing/tokenizer-json.js';
import { createTokenizer } from '../../tokenizer.js';
import { createDecoder } from './decoders.js';
import { createModel } from './models.js';
import { createNormalizer } from './normalizers.js';
import { createFrame } from './post-processor.js';
import { createWordSplitter } from './pre-tokenizers.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-components-'));
afterAll(() => rmSync(root, { recursive: true }));

function load(json: object, files: Readonly<Record<string, unknown>> = {}) {
  const folder = mkdtempSync(join(root, 'case-'));
  writeFileSync(join(folder, 'tokenizer.json'), JSON.stringify(json));
  for (const [name, content] of Object.entries(files))
    writeFileSync(join(folder, name), typeof content === 'string' ? content : JSON.stringify(content));
  return createTokenizer(folder);
}

/** Like Llama 2's: no pre-tokenizer, ▁ for spaces, bytes for characters outside the vocabulary. */
function sentencePieceJson(): object {
  const bytes = Array.from({ length: 256 }, (_, byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`);
  const tokens = ['<unk>', '<s>', '</s>', ...bytes, '▁', 'a', 'b', '▁a', 'ab', '▁ab'];
  const replace = (pattern: string, content: string) => ({ type: 'Replace', pattern: { String: pattern }, content });
  const special = (id: number) => ({ id, content: tokens[id], special: true, normalized: false });
  return {
    added_tokens: [special(0), special(1), special(2)],
    normalizer: { type: 'Sequence', normalizers: [{ type: 'Prepend', prepend: '▁' }, replace(' ', '▁')] },
    pre_tokenizer: null,
    post_processor: {
      type: 'TemplateProcessing',
      single: [{ SpecialToken: { id: '<s>', type_id: 0 } }, { Sequence: { id: 'A', type_id: 0 } }],
      special_tokens: { '<s>': { id: '<s>', ids: [1], tokens: ['<s>'] } },
    },
    decoder: {
      type: 'Sequence',
      decoders: [
        ...[replace('▁', ' '), { type: 'ByteFallback' }, { type: 'Fuse' }],
        { type: 'Strip', content: ' ', start: 1, stop: 0 },
      ],
    },
    model: {
      type: 'BPE',
      unk_token: '<unk>',
      fuse_unk: true,
      byte_fallback: true,
      vocab: Object.fromEntries(tokens.map((token, id) => [token, id])),
      merges: ['▁ a', 'a b', '▁a b'],
    },
  };
}

describe('SentencePiece-style BPE', () => {
  const tokenizer = load(sentencePieceJson(), { 'generation_config.json': { eos_token_id: [2, 1] } });
  const [A, B, SPACE_A, SPACE_AB, SPACE] = [260, 261, 262, 264, 259];

  it('merges over spaces and falls back to bytes', () => {
    expect([...tokenizer.encode('ab ab')]).toEqual([SPACE_AB, SPACE_AB]);
    expect([...tokenizer.encode('a é')]).toEqual([SPACE_A, SPACE, 3 + 0xc3, 3 + 0xa9]);
    expect([...tokenizer.encode('a', { addSpecial: true })]).toEqual([1, SPACE_A]);
    // Each piece between special tokens gets its own ▁, as in the reference.
    expect([...tokenizer.encode('a</s>b', { parseSpecial: true })]).toEqual([SPACE_A, 2, SPACE, B]);
    expect([...tokenizer.encode('a</s>')]).not.toContain(2);
    expect(A).toBe(SPACE + 1);
  });

  it('decodes bytes, half characters, and without the first space', () => {
    for (const text of ['ab ab', 'a é b', '日本']) {
      expect(tokenizer.decode(tokenizer.encode(text))).toBe(text);
      expect(streamed(tokenizer.createStreamDecoder(), tokenizer.encode(text)).text).toBe(text);
    }
    expect(tokenizer.decode([SPACE_A, 3 + 0xe6, 3 + 0x97])).toBe('a\uFFFD\uFFFD');
    expect(tokenizer.decode([1, SPACE_A, 2], { skipSpecial: true })).toBe('a');
  });

  it('knows what begins a document and all that ends a text', () => {
    expect(tokenizer.documentStart).toEqual([1]);
    expect(tokenizer.endTokens).toEqual([2, 1]);
    expect(tokenizer.byteLength(3 + 0xc3)).toBe(1);
    expect(tokenizer.byteLength(SPACE_AB)).toBe(3);
  });
});

describe('added tokens', () => {
  const added = (id: number, content: string, flags: object) => ({
    id,
    content,
    special: false,
    normalized: false,
    ...flags,
  });
  const tokenizer = load({
    ...byteLevelTokenizerJson(),
    added_tokens: [
      added(262, '<|endoftext|>', { special: true }),
      added(263, '<l>', { lstrip: true }),
      added(264, '<r>', { rstrip: true }),
      added(265, 'word', { single_word: true }),
      added(266, 'words', {}),
    ],
  });
  const encode = (text: string) => [...tokenizer.encode(text)].map((id) => (id < 256 ? String.fromCharCode(id) : id));

  it('take white space with lstrip and rstrip', () => {
    expect(encode('a \n<l> b')).toEqual(['a', 263, ' ', 'b']);
    expect(encode('a <r> \u0085b')).toEqual(['a', ' ', 264, 'b']);
  });

  it('match whole words with single_word, and the longest first', () => {
    expect(encode('word')).toEqual([265]);
    expect(encode('a-word.')).toEqual(['a', '-', 265, '.']);
    expect(encode('wordy')).toEqual([...'wordy']);
    expect(encode('éword').slice(-4)).toEqual([...'word']);
    expect(encode('words')).toEqual([266]);
  });

  it('are found in the normalized text where the file says so', () => {
    const normalized = load({
      ...byteLevelTokenizerJson(),
      normalizer: { type: 'Lowercase' },
      added_tokens: [added(262, '<|endoftext|>', { special: true }), added(263, 'Key', { normalized: true })],
    });
    expect([...normalized.encode('KEY')]).toEqual([263]);
  });
});

describe('pre-tokenizers', () => {
  const split = (step: object, text: string) => createWordSplitter({ type: 'Split', ...step }).split(text, true);
  const dash = { pattern: { String: '-' }, invert: false };

  it.each([
    ['Isolated', ['a', '-', '-', 'b']],
    ['Removed', ['a', 'b']],
    ['Contiguous', ['a', '--', 'b']],
    ['MergedWithPrevious', ['a-', '-', 'b']],
    ['MergedWithNext', ['a', '-', '-b']],
  ])('Split %s', (behavior, words) => expect(split({ ...dash, behavior }, 'a--b')).toEqual(words));

  it('cut digits, and mark words with Metaspace', () => {
    const words = (step: { type: string; [key: string]: unknown }, text: string, isStart = true) =>
      createWordSplitter(step).split(text, isStart);
    expect(words({ type: 'Digits', individual_digits: true }, 'a12b')).toEqual(['a', '1', '2', 'b']);
    expect(words({ type: 'Digits', individual_digits: false }, 'a12b')).toEqual(['a', '12', 'b']);
    const metaspace = { type: 'Metaspace', replacement: '▁', prepend_scheme: 'first' };
    expect(words(metaspace, 'a b')).toEqual(['▁a', '▁b']);
    expect(words(metaspace, 'a b', false)).toEqual(['a', '▁b']);
  });
});

describe('what is not supported is named', () => {
  it.each([
    [() => createNormalizer({ type: 'Nmt' }), 'the normalizer "Nmt" is not supported'],
    [() => createWordSplitter({ type: 'UnicodeScripts' }), 'the pre-tokenizer "UnicodeScripts" is not supported'],
    [() => createDecoder({ type: 'CTC' }), 'the decoder "CTC" is not supported'],
    [() => createFrame({ type: 'Odd' }), 'the post-processor "Odd" is not supported'],
    [
      () => createModel({ type: 'WordLevel', vocab: {} }, { isByteLevel: false, special: new Set() }),
      'the model "WordLevel" is not supported',
    ],
    [
      () =>
        createModel({ type: 'BPE', vocab: {}, merges: [], dropout: 0.1 }, { isByteLevel: false, special: new Set() }),
      'dropout 0.1 in a BPE model is not supported',
    ],
  ])('%#', (create, message) => expect(create).toThrow(message));
});

describe('files beside tokenizer.json', () => {
  it('name special tokens and chat templates', () => {
    const tokenizer = load(byteLevelTokenizerJson(), {
      'special_tokens_map.json': { bos_token: '<s>', eos_token: '<|endoftext|>' },
      'tokenizer_config.json': {
        bos_token: { content: '<b>' },
        chat_template: [
          { name: 'default', template: 'config' },
          { name: 'tool_use', template: 'tools' },
        ],
      },
      'chat_template.jinja': 'file',
    });
    expect(tokenizer.chat?.variables).toMatchObject({ bos_token: '<b>', eos_token: '<|endoftext|>' });
    expect([...tokenizer.chat!.templates]).toEqual([
      ['default', 'file'],
      ['tool_use', 'tools'],
    ]);
  });
});
