import { afterAll, describe, expect, it } from 'vitest';
import { encodeChat } from '../data/chat.js';
import { createTokenizer, type Tokenizer } from '../data/tokenizer.js';
import { devices } from '../testing/devices.js';
import { Chat, encodeChatPrompt } from './chat.js';
import { generate } from './generate.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';
import type { GenerateOptions, Generation } from './texts.js';

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

  it('runs the calls of its answers, with arguments of the schema, and ends without tools', async () => {
    const given: unknown[] = [];
    const schema = { type: 'object', properties: { a: { type: 'integer', minimum: 0, maximum: 9 } }, required: ['a'] };
    const tools = [
      {
        name: 'double',
        description: 'Doubles a number',
        schema,
        run: ({ a }: { a?: number }) => {
          given.push(a);
          return { twice: 2 * (a ?? 0) };
        },
      },
    ];
    const calls: unknown[] = [];
    const chat = new Chat(source, {
      ...{ tools, toolChoice: 'double', parallelToolCalls: false, maxRounds: 1, maxNewTokens: 80 },
      onCall: ({ name }, result) => calls.push([name, result]),
    });
    const answer = await drain(chat.say('two?'));
    expect(given).toHaveLength(1);
    expect(calls).toEqual([['double', { twice: 2 * (given[0] as number) }]]);
    const [user, call, result, last] = chat.messages;
    expect(user).toEqual({ role: 'user', content: 'two?' });
    expect(call).toMatchObject({ role: 'assistant', tool_calls: [{ function: { name: 'double' } }] });
    expect(result).toMatchObject({
      role: 'tool',
      name: 'double',
      content: JSON.stringify({ twice: 2 * Number(given[0]) }),
    });
    expect(last).toEqual({ role: 'assistant', content: answer.text });
    await drain(chat.say('and now?'));
    expect(given).toHaveLength(2);
    await chat.free();
  });

  it('keeps nothing of a turn whose tool failed, and refuses what does not go together', async () => {
    const run = () => {
      throw new Error('no network');
    };
    const tools = [{ name: 'fetch', schema: { type: 'object', additionalProperties: false }, run }];
    const chat = new Chat(source, { tools, toolChoice: 'required', maxNewTokens: 80 });
    await expect(drain(chat.say('go'))).rejects.toThrow('no network');
    expect(chat.messages).toEqual([]);
    await chat.free();
    expect(() => new Chat(source, { tools, responseFormat: { type: 'json_object' } })).toThrow('responseFormat: not');
    const wrong = new Chat(source, { tools, toolChoice: 'other' });
    await expect(drain(wrong.say('go'))).rejects.toThrow('toolChoice: other is no tool');
    await wrong.free();
  });

  it('encodes one message for a batch', () => {
    expect(encodeChatPrompt(source, 'hi', 'S')).toEqual([...Buffer.from('<system>S<user>hi<assistant>')]);
  });
});
