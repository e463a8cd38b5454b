import { afterAll, describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { devices } from '../testing/devices.js';
import { Conversation } from './chat.js';
import { generate } from './generate.js';
import { countingReads, tinyConfig, tinyModel } from './testing/tiny-model.js';
import type { GenerateOptions, Generation } from './texts.js';

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
    void talk.free(); // frees the pages at once
    if (dtype === 'f32') expect(device().pool.bytesInUse).toBe(before);
  });

  it('reads only the new tokens of a turn', async () => {
    const { model: counting, lengths } = countingReads(model);
    const talk = new Conversation({ ...source, model: counting }, { ...options, maxNewTokens: 4 });
    const first = await drain(talk.say('a first line of some length'));
    lengths.length = 0;
    await drain(talk.say('two'));
    const unread = talk.length - first.tokens.length;
    expect(unread).toBeGreaterThan(27);
    // The last token of the first turn was drawn and not read.
    if (first.finishReason === 'length') expect(lengths[0]).toBe(1 + '\ntwo'.length);
    else expect(lengths[0]).toBeLessThanOrEqual(1 + '\ntwo'.length);
    expect(Math.max(...lengths.slice(1), 1)).toBe(1);
    await talk.free();
  });

  it('writes a document of a schema in every turn', async () => {
    const schema = { type: 'object', properties: { a: { type: 'string' } }, required: ['a'] };
    const responseFormat = { type: 'json_schema' as const, schema };
    const talk = new Conversation(source, { ...options, maxNewTokens: 30, responseFormat });
    for (const line of ['Once', 'and again']) {
      const { text } = await drain(talk.say(line));
      expect(Object.keys(JSON.parse(text))).toEqual(['a']);
    }
    await talk.free();
    const refused = new Conversation(source, { ...options, responseFormat, stop: ['x'] });
    await expect(drain(refused.say('Once'))).rejects.toThrow('together with responseFormat');
    expect(refused.length).toBe(0);
  });

  it('goes on after a turn that was left early', async () => {
    const talk = new Conversation(source, { ...options, sampling: { seed: 2 } });
    for await (const _ of talk.say('Once')) break;
    const { length } = talk;
    expect(length).toBeGreaterThan(4);
    const { tokens } = await drain(talk.say('more'));
    expect(talk.length).toBe(length + '\nmore'.length + tokens.length);
    await talk.free();
  });

  it('refuses what does not fit, and keeps what there is', async () => {
    const talk = new Conversation(source, { ...options, maxContext: 30 });
    await drain(talk.say('short'));
    const { length } = talk;
    await expect(drain(talk.say('x'.repeat(40)))).rejects.toThrow(UsageError);
    expect(talk.length).toBe(length);
    await drain(talk.say('ok'));
    expect(talk.length).toBeGreaterThan(length);
    await talk.free();
  });

  it('keeps no guess that was not drawn', async () => {
    if (dtype !== 'f32' || device().kind !== 'cpu') return;
    const wide = tinyModel(tinyConfig({ nsa: { w: 70 } }));
    const turns = async (speculate: number, stop: readonly string[]) => {
      const given = { ...options, maxNewTokens: 60, speculate, stop };
      const talk = new Conversation({ ...source, model: wide }, given);
      const results = [];
      for (const line of ['tick tock tick tock tick tock', 'tick', 'tock tick'])
        results.push(await drain(talk.say(line)));
      await talk.free();
      return results;
    };
    const [{ text }] = await turns(0, []);
    // Wherever a turn stops, guesses may have been read beyond its end.
    for (let end = 12; end < text.length; end += 3) {
      const stop = [text.slice(end - 12, end)];
      expect(await turns(5, stop)).toEqual(await turns(0, stop));
    }
    wide.free();
  });
});
