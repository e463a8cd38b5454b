import { afterAll, describe, expect, it } from 'vitest';
import { encodeChat } from '../data/chat.js';
import { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { devices } from '../testing/devices.js';
import { Chat, encodeChatPrompt } from './chat.js';
import { type GenerateOptions, type Generation, generate } from './generate.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const config = tinyConfig();
const TEMPLATE =
  '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}';
/** Latin 1: every token is a character, so that an answer encodes to the tokens that were drawn. */
const tokenizer: Tokenizer = {
  ...createTokenizer('byte'),
  encode: (text) => Int32Array.from(Buffer.from(text, 'latin1')),
  createStreamDecoder: () => ({ push: (id) => String.fromCharCode(id), end: () => '' }),
  chat: { templates: new Map([['default', TEMPLATE]]), variables: {} },
};

async function drain(stream: AsyncGenerator<string, Generation>): Promise<Generation & { text: string }> {
  let text = '';
  for (;;) {
    const { done, value } = await stream.next();
    if (done) return { ...value, text };
    text += value;
  }
}

describe.each(devices())('a chat on $name', ({ device, dtype }) => {
  const model = tinyModel(config, 256, 5, { device: device(), dtype });
  afterAll(() => model.free());
  const source = { model, tokenizer, config };
  const options: GenerateOptions = { maxNewTokens: 7, sampling: { temperature: 0 } };

  it('answers each message as a model would that reads the whole conversation', async () => {
    const chat = new Chat(source, { ...options, system: 'S' });
    for (const text of ['one', 'two', 'three']) {
      const before = chat.messages;
      const answer = await drain(chat.say(text));
      const messages = [...before, { role: 'user', content: text }];
      const context = [...encodeChat(tokenizer, messages, { addGenerationPrompt: true })];
      if (dtype === 'f32') expect(answer).toEqual(await drain(generate(source, context, options)));
      expect(chat.messages).toEqual([...messages, { role: 'assistant', content: answer.text }]);
      // The cache went on from the turn before: it holds this context and no more.
      expect(chat.length).toBe(context.length + answer.tokens.length);
    }
    chat.reset();
    expect(chat.messages).toEqual([{ role: 'system', content: 'S' }]);
    expect(chat.length).toBe(0);
    await chat.free();
  });

  it('keeps an answer as far as it was given, and nothing of a message that does not fit', async () => {
    const chat = new Chat(source, { ...options, maxContext: 60 });
    let given = '';
    for await (const text of chat.say('one')) {
      given += text;
      if (given.length >= 3) break;
    }
    expect(chat.messages).toEqual([
      { role: 'user', content: 'one' },
      { role: 'assistant', content: given },
    ]);
    await expect(drain(chat.say('x'.repeat(60)))).rejects.toThrow('raise maxContext (--max-context)');
    expect(chat.messages).toHaveLength(2);
    await drain(chat.say('two'));
    expect(chat.messages).toHaveLength(4);
    await chat.free();
  });

  it('answers with a document of a schema', async () => {
    const schema = { type: 'object', properties: { a: { type: 'boolean' } }, required: ['a'] };
    const responseFormat = { type: 'json_schema' as const, schema };
    const chat = new Chat(source, { ...options, maxNewTokens: 20, responseFormat });
    for (const text of ['one', 'two']) expect(JSON.parse((await drain(chat.say(text))).text)).toHaveProperty('a');
    await chat.free();
  });

  it('encodes one message for a batch', () => {
    expect(encodeChatPrompt(source, 'hi', 'S')).toEqual([...Buffer.from('<system>S<user>hi<assistant>')]);
  });
});
