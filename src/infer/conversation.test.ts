import { afterAll, describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { devices } from '../testing/devices.js';
import { Conversation } from './conversation.js';
import { type GenerateOptions, type Generation, generate } from './generate.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const config = tinyConfig();
const tokenizer = createTokenizer('byte');

async function drain(stream: AsyncGenerator<string, Generation>): Promise<Generation & { text: string }> {
  let text = '';
  for (;;) {
    const { done, value } = await stream.next();
    if (done) return { ...value, text };
    text += value;
  }
}

describe.each(devices())('a conversation on $name', ({ device, dtype }) => {
  const model = tinyModel(config, 256, 5, { device: device(), dtype });
  afterAll(() => model.free());
  const source = { model, tokenizer, config };
  const options: GenerateOptions = { maxNewTokens: 9, sampling: { temperature: 0 } };
  /** Everything drawn so far in bytes: text may lack half a character. */
  const continued = async (tokens: readonly number[]) => {
    const prompt = Buffer.from(tokens).toString('latin1');
    const latin = { ...tokenizer, encode: (text: string) => Int32Array.from(Buffer.from(text, 'latin1')) };
    return drain(generate({ model, tokenizer: latin as typeof tokenizer, config }, prompt, options));
  };

  it('goes on with what was said and written, from its cache', async () => {
    const before = device().pool.bytesInUse;
    const talk = new Conversation(source, options);
    const context = [...Buffer.from('Once')];
    for (const line of ['Once', 'and again', '']) {
      if (line !== 'Once') context.push(...Buffer.from(`\n${line}`));
      const said = await drain(talk.say(line));
      if (dtype === 'f32') expect(said.tokens).toEqual((await continued(context)).tokens);
      context.push(...said.tokens);
      expect(talk.length).toBe(context.length);
    }
    talk.reset();
    expect(talk.length).toBe(0);
    const anew = await drain(talk.say('Once'));
    if (dtype === 'f32') expect(anew.tokens).toEqual((await continued([...Buffer.from('Once')])).tokens);
    talk.free();
    if (dtype === 'f32') expect(device().pool.bytesInUse).toBe(before);
  });

  it('refuses what does not fit, and keeps what there is', async () => {
    const talk = new Conversation(source, { ...options, maxContext: 30 });
    await drain(talk.say('short'));
    const { length } = talk;
    await expect(drain(talk.say('x'.repeat(40)))).rejects.toThrow(UsageError);
    expect(talk.length).toBe(length);
    await drain(talk.say('ok'));
    expect(talk.length).toBeGreaterThan(length);
    talk.free();
  });
});
