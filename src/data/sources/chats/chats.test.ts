import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, it } from 'vitest';
import fc from '../../../testing/properties.js';
import { IGNORED_TARGET } from '../../batch.js';
import { createLoader } from '../../loader.js';
import { byteLevelTokenizerJson } from '../../testing/tokenizer-json.js';
import { createTokenizer, type Tokenizer } from '../../tokenizer.js';
import { encodeChatLine } from './encode.js';
import { ChatSamples, packChats } from './samples.js';

const END = 0;
const TEMPLATE =
  "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}\0\n{% endif %}{% endfor %}" +
  '{% if add_generation_prompt %}<assistant>{% endif %}';

function tokenizerWith(template: string): Tokenizer {
  return { ...createTokenizer('byte'), chat: { templates: new Map([['default', template]]), variables: {} } };
}
const tokenizer = tokenizerWith(TEMPLATE);
const user = (content: string) => ({ role: 'user', content });
const assistant = (content: string) => ({ role: 'assistant', content });
const line = (...messages: object[]) => JSON.stringify({ messages });

/** The counted tokens of a document as text, with | between runs. */
function countedText({ tokens, counted }: { tokens: Int32Array; counted: Uint8Array }): string {
  let text = '';
  tokens.forEach((token, i) => {
    if (counted[i] === 1)
      text += (i > 0 && counted[i - 1] === 0 && text !== '' ? '|' : '') + String.fromCharCode(token);
  });
  return text;
}

describe('encodeChatLine', () => {
  it('counts the answers with their end, and nothing else', () => {
    const chats = encodeChatLine(line(user('hi'), assistant('yo'), user('go'), assistant('on')), tokenizer);
    expect(chats).toHaveLength(1);
    expect(tokenizer.decode(chats[0].tokens)).toBe('<user>hi<assistant>yo\0\n<user>go<assistant>on\0\n');
    expect(countedText(chats[0])).toBe('yo\0|on\0');
  });

  it('makes a document per answer where the template rewrites older ones', () => {
    const forgetful = tokenizerWith(
      "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('=')[-1] }}{% else %}{{ m.content }}{% endif %}\0{% endfor %}" +
        '{% if add_generation_prompt %}<assistant>{% endif %}',
    );
    const chats = encodeChatLine(line(user('a'), assistant('x=b'), user('c'), assistant('y=d')), forgetful);
    expect(chats.map(({ tokens }) => forgetful.decode(tokens))).toEqual([
      '<user>a\0<assistant>x=b\0',
      '<user>a\0<assistant>b\0<user>c\0<assistant>y=d\0',
    ]);
    expect(chats.map(countedText)).toEqual(['x=b\0', 'y=d\0']);
  });

  it('passes tools, and has no document without an answer', () => {
    const withTools = tokenizerWith(`{% if tools %}{{ tools[0] }}{% endif %}${TEMPLATE}`);
    const [chat] = encodeChatLine(JSON.stringify({ messages: [assistant('x')], tools: ['T'] }), withTools);
    expect(withTools.decode(chat.tokens)).toBe('T<assistant>x\0\n');
    expect(encodeChatLine(line(user('hi')), tokenizer)).toEqual([]);
  });

  it.each([
    ['{', 'not valid JSON'],
    ['{"text": "a"}', 'not a chat; each line must be like {"messages"'],
    ['{"messages": [{"content": "a"}]}', 'not a chat'],
  ])('refuses %s', (text, message) => expect(() => encodeChatLine(text, tokenizer)).toThrow(message));

  it('refuses a template whose generation prompt the answer does not follow', () => {
    const odd = tokenizerWith(`${TEMPLATE}{% if add_generation_prompt %}!{% endif %}`);
    expect(() => encodeChatLine(line(user('a'), assistant('b')), odd)).toThrow('message 2: the chat template does not');
  });
});

describe('packing', () => {
  it('places every chat once, whole, and leaves little room', () => {
    fc.assert(
      fc.property(fc.array(fc.integer({ min: 2, max: 33 }), { minLength: 1, maxLength: 200 }), (lengths) => {
        const bins = packChats(lengths, 33);
        expect(bins.flat().sort((a, b) => a - b)).toEqual(lengths.map((_, i) => i));
        const sums = bins.map((bin) => bin.reduce((sum, chat) => sum + lengths[chat], 0));
        expect(Math.max(...sums)).toBeLessThanOrEqual(33);
        // No two bins could be one: that is what fitting means.
        const [least, next = 33] = [...sums].sort((a, b) => a - b);
        expect(least + next).toBeGreaterThan(bins.length > 1 ? 33 : 0);
      }),
      { numRuns: 100, seed: 7 },
    );
  });

  it('makes documents of the chats and of the padding, and counts only answers', () => {
    const chats = [line(user('hi'), assistant('yo')), line(user('a'), assistant('b'))].flatMap((text) =>
      encodeChatLine(text, tokenizer),
    );
    const sizes = chats.map(({ tokens }) => tokens.length);
    const sequenceLength = sizes[0] + sizes[1] + 4;
    const samples = new ChatSamples(chats, { sequenceLength, padding: END, seed: 1, shuffle: true });
    expect(samples.perEpoch).toBe(1);
    const address = samples.locate(3);
    expect(address).toMatchObject({ epoch: 3, position: 0 });
    const window = new Int32Array(sequenceLength + 1);
    samples.read(address, window);
    const placed = [...chats[0].tokens, ...chats[1].tokens];
    expect([...window]).toEqual([...placed, ...new Array<number>(5).fill(END)]);
    expect(samples.documentStarts(address)).toEqual([0, sizes[0], sizes[0] + sizes[1]]);
    const targets = window.slice(1);
    samples.maskTargets(address, targets);
    const wanted = [...chats[0].counted, ...chats[1].counted, 0, 0, 0, 0, 0].slice(1);
    expect([...targets]).toEqual(wanted.map((counts, i) => (counts === 1 ? window[i + 1] : IGNORED_TARGET)));
  });
});

describe('data.source chat', () => {
  const root = mkdtempSync(join(tmpdir(), 'trefoil-chats-'));
  afterAll(() => rmSync(root, { recursive: true }));
  writeFileSync(join(root, 'tokenizer.json'), JSON.stringify(byteLevelTokenizerJson()));
  writeFileSync(join(root, 'chat_template.jinja'), TEMPLATE.replace('\0', '<|endoftext|>'));
  const path = join(root, 'chats.jsonl');
  const options = { source: 'chat', path, tokenizer: root, seqLen: 80, batchSize: 1 } as const;

  it('is split, packed, visited in another order each epoch, and resumed', async () => {
    const lines = Array.from({ length: 60 }, (_, i) => line(user(`q${i}`), assistant(`answer ${i}`)));
    writeFileSync(path, `${lines.join('\n')}\n\n`);
    const loader = await createLoader({ ...options, valFraction: 0.2 });
    const samples = loader.samplesPerEpoch;
    expect(loader.validationSamples).toBeGreaterThan(0);
    expect(samples + loader.validationSamples).toBeLessThan(40);
    const epoch = () => Array.from({ length: samples }, () => loader.next().sampleIds[0] % samples);
    const first = epoch();
    expect(new Set(first).size).toBe(samples);
    expect(epoch()).not.toEqual(first);
    const state = loader.state();
    const expected = loader.next();
    const again = await createLoader({ ...options, valFraction: 0.2 });
    again.restore(state);
    expect(again.next()).toEqual(expected);
    // Every sample has answers to learn from, and chats are apart from each other.
    expect(expected.targetCount).toBeGreaterThan(0);
    expect(expected.cuSeqlens.length).toBeGreaterThan(2);
    loader.close();
    again.close();
  });

  it('is a source of a mixture by its tokens, without padding', async () => {
    const chats = join(root, 'half.jsonl');
    writeFileSync(
      chats,
      Array.from({ length: 50 }, (_, i) => line(user(`q${i}`), assistant('a'.repeat(24)))).join('\n'),
    );
    const prose = join(root, 'prose.txt');
    writeFileSync(prose, 'all of it is text '.repeat(900));
    const epochs = 1_000_000;
    const loader = await createLoader({
      sources: [
        { name: 'talk', path: chats, weight: 0.5, epochs },
        { name: 'prose', source: 'text', path: prose, weight: 0.5, epochs },
      ],
      tokenizer: root,
      ...{ seqLen: 80, batchSize: 10, valFraction: 0 },
    });
    const padding = createTokenizer(root).separator;
    // By name: prose 0, talk 1.
    const tokens = [0, 0];
    const rows = [0, 0];
    for (let step = 0; step < 1000; step++) {
      const { inputs, sampleIds } = loader.next();
      for (const [row, id] of sampleIds.entries()) {
        const ids = inputs.subarray(80 * row, 80 * (row + 1));
        let end = ids.length;
        while (id % 2 === 1 && ids[end - 1] === padding) end--;
        tokens[id % 2] += end;
        rows[id % 2]++;
      }
    }
    expect(rows[1] / rows[0]).toBeGreaterThan(1.15);
    expect(Math.abs(tokens[1] / (tokens[0] + tokens[1]) - 0.5)).toBeLessThan(0.005);
    loader.close();
  });

  it('reports what it cuts and leaves out, and names the line of a fault', async () => {
    const warnings: string[] = [];
    const onWarning = (text: string) => warnings.push(text);
    writeFileSync(
      path,
      [line(user('a'), assistant('b'.repeat(90))), line(user('c'.repeat(90)), assistant('d')), line(user('e'))].join(
        '\n',
      ),
    );
    (await createLoader({ ...options, valFraction: 0, onWarning })).close();
    expect(warnings).toEqual([
      '2 chats are longer than train.seq_len (80) and lose their end',
      '2 chats have no message of the assistant within train.seq_len and are left out',
    ]);
    writeFileSync(path, `${line(user('a'), assistant('b'))}\n{"text": 1}\n`);
    await expect(createLoader(options)).rejects.toThrow(`${path}:2: not a chat`);
    await expect(createLoader({ ...options, tokenizer: 'byte' })).rejects.toThrow(
      'tokenizer byte has no chat template',
    );
  });
});
