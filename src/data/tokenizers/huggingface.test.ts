import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import { UsageError } from '../../errors.js';
import { DIFFICULT_TEXTS, LONE_SURROGATES, streamed } from '../testing/texts.js';
import { byteLevelTokenizerJson, unigramTokenizerJson } from '../testing/tokenizer-json.js';
import { createHuggingFaceTokenizer } from './huggingface.js';

const root = mkdtempSync(join(tmpdir(), 'trefoil-tokenizer-'));
afterAll(() => rmSync(root, { recursive: true }));

function write(content: unknown, config?: unknown): string {
  const folder = mkdtempSync(join(root, 'case-'));
  const path = join(folder, 'tokenizer.json');
  writeFileSync(path, typeof content === 'string' ? content : JSON.stringify(content));
  if (config !== undefined) writeFileSync(join(folder, 'tokenizer_config.json'), JSON.stringify(config));
  return path;
}

describe('byte-level tokenizer.json', () => {
  const tokenizer = createHuggingFaceTokenizer(write(byteLevelTokenizerJson()));

  it('finds vocabulary size and separator', () => {
    expect(tokenizer.vocabSize).toBe(263);
    expect(tokenizer.separator).toBe(262);
    expect([...tokenizer.encode(' the')]).toEqual([258]);
  });

  it.each(Object.entries(DIFFICULT_TEXTS))('returns %s unchanged', (_, text) => {
    const ids = tokenizer.encode(text);
    expect(tokenizer.decode(ids)).toBe(text);
    expect(streamed(tokenizer.createStreamDecoder(), ids).text).toBe(text);
    expect([...ids]).not.toContain(tokenizer.separator);
  });

  // Ids of bytes are the bytes; two spaces in one word are token 260 and " the" is 258, so a wrong cut shows in the ids.
  it.each([
    ['a  \uFEFFb', ['a', ' ', ' \uFEFF', 'b']],
    ['a  \u0085 the', ['a', '  \u0085', ' the']],
  ])('cuts %j into the words of the reference', (text, words) => {
    expect(words.join('')).toBe(text);
    const ids = words.flatMap((word) => {
      if (word === ' the') return [258];
      const bytes = [...Buffer.from(word)];
      return word.startsWith('  ') ? [260, ...bytes.slice(2)] : bytes;
    });
    expect([...tokenizer.encode(text)]).toEqual(ids);
    expect(tokenizer.decode(ids)).toBe(text);
  });

  it('adds the prefix space before it cuts words', () => {
    const json = byteLevelTokenizerJson() as { pre_tokenizer: object };
    const prefixed = createHuggingFaceTokenizer(
      write({ ...json, pre_tokenizer: { ...json.pre_tokenizer, add_prefix_space: true } }),
    );
    expect([...prefixed.encode('the')]).toEqual([258]);
    expect([...prefixed.encode(' the the')]).toEqual([258, 258]);
  });

  it('counts the bytes of a token', () => {
    const text = 'the naïve 界';
    const sum = [...tokenizer.encode(text)].reduce((total, id) => total + tokenizer.byteLength(id), 0);
    expect(sum).toBe(Buffer.byteLength(text));
    expect(tokenizer.byteLength(tokenizer.separator)).toBe(0);
  });

  it('takes lone surrogates and long documents', () => {
    expect(tokenizer.decode(tokenizer.encode(LONE_SURROGATES.text))).toBe(LONE_SURROGATES.decoded);
    const long = 'the other  thing, né '.repeat(20_000);
    expect(tokenizer.decode(tokenizer.encode(long))).toBe(long);
  });

  it('holds back an unfinished character, but not invalid bytes without end', () => {
    expect(streamed(tokenizer.createStreamDecoder(), tokenizer.encode('€')).parts).toEqual(['', '', '€', '']);
    const invalid = tokenizer.encode('€')[0];
    const { parts } = streamed(tokenizer.createStreamDecoder(), new Array<number>(20).fill(invalid));
    expect(parts.slice(0, 10).join('')).not.toBe('');
  });

  it('decodes the separator, and names an id outside the vocabulary', () => {
    expect(tokenizer.decode([tokenizer.separator])).toBe('<|endoftext|>');
    expect(tokenizer.decode([])).toBe('');
    expect(() => tokenizer.decode([263])).toThrow('token 263 is outside the vocabulary');
  });
});

describe('unigram tokenizer.json', () => {
  const tokenizer = createHuggingFaceTokenizer(write(unigramTokenizerJson()));

  it('takes special strings in a text as text, though its vocabulary lists them with the best score', () => {
    expect(tokenizer.separator).toBe(1);
    const ids = tokenizer.encode('the</s>');
    expect([...ids]).not.toContain(1);
    expect(tokenizer.decode(ids)).toBe('the</s>');
  });

  it('gives the bytes of every token, with the leading space', () => {
    const text = 'the the cat';
    const bytes = Array.from(tokenizer.encode(text), (id) => tokenizer.tokenBytes!(id)!);
    expect(Buffer.concat(bytes).toString('utf8').trimStart()).toBe(tokenizer.decode(tokenizer.encode(text)));
    expect(tokenizer.tokenBytes!(tokenizer.separator)).toBeNull();
  });

  it('streams with the leading space of later words', () => {
    expect(streamed(tokenizer.createStreamDecoder(), tokenizer.encode('the the cat')).text).toBe('the the cat');
  });
});

describe('white space in the built-in steps', () => {
  const wordLevel = (pre_tokenizer: object, normalizer: object | null = null) => {
    const words = ['<unk>', '</s>', 'a', 'b', '\uFEFFb', 'é', '\uFEFF'];
    return createHuggingFaceTokenizer(
      write({
        version: '1.0',
        added_tokens: [{ id: 1, content: '</s>', special: true, normalized: false }],
        normalizer,
        pre_tokenizer,
        post_processor: null,
        decoder: null,
        model: { type: 'BPE', vocab: Object.fromEntries(words.map((word, id) => [word, id])), merges: ['\uFEFF b'] },
      }),
    );
  };

  it('WhitespaceSplit cuts at U+0085 and keeps U+FEFF', () => {
    expect([...wordLevel({ type: 'WhitespaceSplit' }).encode('a\u0085b a')]).toEqual([2, 3, 2]);
    expect([...wordLevel({ type: 'WhitespaceSplit' }).encode('a \uFEFFb')]).toEqual([2, 4]);
  });

  it('Whitespace takes letters of every script as word characters', () => {
    expect([...wordLevel({ type: 'Whitespace' }).encode('é\u0085a')]).toEqual([5, 2]);
  });

  it('Strip removes U+0085 at the ends', () => {
    const strip = { type: 'Strip', strip_left: true, strip_right: true };
    expect([...wordLevel({ type: 'WhitespaceSplit' }, strip).encode('\u0085a \u0085')]).toEqual([2]);
    expect([...wordLevel({ type: 'WhitespaceSplit' }, strip).encode('\uFEFFb')]).toEqual([4]);
  });
});

describe('identity', () => {
  it('depends on the content and the separator, not on the place', () => {
    const first = createHuggingFaceTokenizer(write(byteLevelTokenizerJson())).identity;
    expect(createHuggingFaceTokenizer(write(byteLevelTokenizerJson())).identity).toBe(first);
    expect(createHuggingFaceTokenizer(write(byteLevelTokenizerJson('</s>'))).identity).not.toBe(first);
    const other = createHuggingFaceTokenizer(write(byteLevelTokenizerJson(), { eos_token: 'a' }));
    expect(other.identity).not.toBe(first);
  });
});

describe('errors name the file and the remedy', () => {
  it('no end-of-text token, and how to name one', () => {
    const content = byteLevelTokenizerJson('<|strange|>');
    const path = write(content);
    expect(() => createHuggingFaceTokenizer(path)).toThrow(
      `${path}: no end-of-text token to put between documents; name one as "eos_token" in`,
    );
    expect(createHuggingFaceTokenizer(write(content, { eos_token: '<|strange|>' })).separator).toBe(262);
    expect(createHuggingFaceTokenizer(write(content, { eos_token: { content: '<|strange|>' } })).separator).toBe(262);
  });

  it.each([
    ['broken JSON', '{"model":', 'not valid JSON'],
    [
      'another kind of file',
      '{"a": 1}',
      'not a tokenizer file: model is missing; give a tokenizer.json of Hugging Face, byte or gpt2',
    ],
    ['a list', '[1]', 'not a tokenizer file: the top level must be an object; '],
    [
      'a BPE model without its parts',
      { ...byteLevelTokenizerJson(), model: { type: 'BPE', vocab: [1], merges: 3 } },
      'model.vocab must be an object; use another tokenizer',
    ],
    [
      'a Unigram model of words',
      { ...byteLevelTokenizerJson(), model: { type: 'Unigram', vocab: ['a'] } },
      'model.vocab.0 must be a pair; use another tokenizer',
    ],
    [
      'an unknown model',
      { ...byteLevelTokenizerJson(), model: { type: 'Quantum', vocab: null } },
      'the model "Quantum" is not supported',
    ],
  ])('%s', (_, content, message) => {
    const path = write(content);
    expect(() => createHuggingFaceTokenizer(path)).toThrow(UsageError);
    expect(() => createHuggingFaceTokenizer(path)).toThrow(`${path}: ${message}`);
  });

  it('a missing file', () => {
    expect(() => createHuggingFaceTokenizer(join(root, 'none.json'))).toThrow('cannot read');
  });
});
