/** Encodings, decodings and chats of the reference libraries (Rust tokenizers, transformers). */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { describe, expect, it } from 'vitest';
import { goldenFolders, SHARED_GOLDEN, sharedGoldenAbsence } from '../../testing/golden.js';
import { applyChatTemplate, type ChatMessage, encodeChat } from '../chat.js';
import { createTokenizer } from '../tokenizer.js';

interface Golden {
  readonly vocab_size: number;
  readonly encodings: readonly {
    readonly text: string;
    readonly ids: readonly number[];
    readonly ids_with_special: readonly number[];
    readonly decoded: string;
    readonly decoded_skip_special: string;
  }[];
  readonly decodings: readonly { readonly ids: readonly number[]; readonly decoded: string }[];
  readonly chats: readonly {
    readonly title: string;
    readonly messages: readonly ChatMessage[];
    readonly add_generation_prompt: boolean;
    readonly variables?: Readonly<Record<string, unknown>>;
    readonly text: string;
    readonly ids: readonly number[];
  }[];
  readonly chat_errors?: readonly { readonly messages: readonly ChatMessage[]; readonly message: string }[];
}

it('golden tokenizers are present', () => {
  expect(goldenFolders('golden.json').length).toBeGreaterThanOrEqual(2);
});

describe.each(goldenFolders('golden.json'))('golden %s', (_name, folder) => {
  const golden = JSON.parse(readFileSync(join(folder, 'golden.json'), 'utf8')) as Golden;
  const tokenizer = createTokenizer(folder);

  it('encodes and decodes as the reference', () => {
    expect(tokenizer.vocabSize).toBe(golden.vocab_size);
    expect(golden.encodings.length).toBeGreaterThan(0);
    for (const { text, ids, ids_with_special, decoded, decoded_skip_special } of golden.encodings) {
      expect([...tokenizer.encode(text, { parseSpecial: true })], text).toEqual(ids);
      expect([...tokenizer.encode(text, { parseSpecial: true, addSpecial: true })], text).toEqual(ids_with_special);
      expect(tokenizer.decode(ids), text).toBe(decoded);
      expect(tokenizer.decode(ids_with_special, { skipSpecial: true }), text).toBe(decoded_skip_special);
      const stream = tokenizer.createStreamDecoder();
      expect(ids.map((id) => stream.push(id)).join('') + stream.end(), text).toBe(decoded);
    }
  });

  it('gives the bytes of every token, if its texts do not depend on their neighbours', () => {
    for (const { text } of golden.encodings) {
      const ids = tokenizer.encode(text);
      const bytes = Array.from(ids, (id) => tokenizer.tokenBytes?.(id) ?? new Uint8Array());
      // The first token may lose the space that was put before it.
      const whole = Buffer.concat(bytes).toString('utf8');
      const decoded = tokenizer.decode(ids);
      if (tokenizer.tokenBytes) expect([decoded, ` ${decoded}`], text).toContain(whole);
    }
    expect(tokenizer.tokenBytes?.(tokenizer.separator) ?? null).toBeNull();
  });

  it('encodes special strings in documents as text', () => {
    for (const { text } of golden.encodings) {
      const ids = tokenizer.encode(text);
      expect(tokenizer.decode(ids), text).toBe(tokenizer.decode(tokenizer.encode(text, { parseSpecial: true })));
      expect([...ids]).not.toContain(tokenizer.separator);
    }
  });

  it('decodes parts of characters', () => {
    for (const { ids, decoded } of golden.decodings) expect(tokenizer.decode(ids)).toBe(decoded);
  });

  it('writes chats as the reference', () => {
    for (const { title, messages, add_generation_prompt, variables = {}, text, ids } of golden.chats) {
      const options = { addGenerationPrompt: add_generation_prompt, variables };
      expect(applyChatTemplate(tokenizer, messages, options), title).toBe(text);
      expect([...encodeChat(tokenizer, messages, options)], title).toEqual(ids);
    }
    for (const { messages, message } of golden.chat_errors ?? [])
      expect(() => applyChatTemplate(tokenizer, messages)).toThrow(message);
  });
});

it('golden generations begin with the tokens of their messages, and decode to their texts', ({ skip }) => {
  const absence = sharedGoldenAbsence('hf/llama3-tied/generate_golden.json');
  if (absence) return skip(absence);
  const folder = join(SHARED_GOLDEN, 'hf/llama3-tied');
  const tokenizer = createTokenizer(folder);
  const { cases } = JSON.parse(readFileSync(join(folder, 'generate_golden.json'), 'utf8')) as {
    cases: {
      messages: ChatMessage[];
      prompt_ids: number[];
      new_ids: number[];
      text: string;
      stopped_by_eos: boolean;
    }[];
  };
  expect(cases.length).toBeGreaterThan(0);
  for (const { messages, prompt_ids, new_ids, text, stopped_by_eos } of cases) {
    expect([...encodeChat(tokenizer, messages, { addGenerationPrompt: true })]).toEqual(prompt_ids);
    expect(tokenizer.decode(new_ids)).toBe(text);
    expect(tokenizer.endTokens?.includes(new_ids.at(-1)!)).toBe(stopped_by_eos);
  }
});
