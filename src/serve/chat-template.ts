/** The chat template of a model: messages to tokens. */
import { existsSync, readFileSync, statSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { Template } from '@huggingface/jinja';
import type { Tokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { fileError } from '../files.js';
import { ApiError } from './errors.js';

/** Renders messages and encodes them; special tokens of the template become their ids. */
export interface ChatTemplate {
  encode(messages: readonly object[], tokenizer: Tokenizer): number[];
}

interface SpecialToken {
  readonly id: number;
  readonly content: string;
}

/**
 * The template of `--chat-template`, else of the model's folder: `chat_template.jinja`, or `chat_template` in
 * tokenizer_config.json. Null if there is none.
 */
export function loadChatTemplate(model: string, given?: string): ChatTemplate | null {
  const folder = existsSync(model) && statSync(model).isDirectory() ? model : dirname(model);
  const config = readJson(join(folder, 'tokenizer_config.json'));
  const text = given === undefined ? templateOf(folder, config) : read(given);
  if (text === null) return null;
  const template = parse(text, given ?? folder);
  const specials = specialTokens(join(folder, 'tokenizer.json'));
  const tokens = { bos_token: nameOf(config['bos_token']), eos_token: nameOf(config['eos_token']) };
  return {
    encode(messages, tokenizer) {
      const rendered = render(template, { ...tokens, messages, add_generation_prompt: true });
      return encodeWithSpecials(rendered, tokenizer, specials);
    },
  };
}

function render(template: Template, context: Record<string, unknown>): string {
  try {
    return template.render(context);
  } catch (error) {
    const reason = error instanceof Error ? error.message : 'unknown';
    throw new ApiError(400, `the model's chat template refuses these messages: ${reason}`, { param: 'messages' });
  }
}

function parse(text: string, where: string): Template {
  try {
    return new Template(text);
  } catch (error) {
    throw new UsageError(`${where}: the chat template cannot be parsed (${(error as Error).message})`, {
      cause: error,
    });
  }
}

function templateOf(folder: string, config: Record<string, unknown>): string | null {
  const file = join(folder, 'chat_template.jinja');
  if (existsSync(file)) return read(file);
  const { chat_template: template } = config;
  if (typeof template === 'string') return template;
  // Older files list several templates by name.
  if (!Array.isArray(template)) return null;
  const named = template.find((entry: { name?: unknown }) => entry?.name === 'default');
  return typeof named?.template === 'string' ? named.template : null;
}

/** Longest first, so that a token that begins with another one is found. */
function specialTokens(path: string): SpecialToken[] {
  const { added_tokens: added } = readJson(path);
  if (!Array.isArray(added)) return [];
  const tokens = added.filter(
    (token): token is SpecialToken => typeof token?.id === 'number' && typeof token?.content === 'string',
  );
  return tokens.filter(({ content }) => content !== '').sort((a, b) => b.content.length - a.content.length);
}

function encodeWithSpecials(text: string, tokenizer: Tokenizer, specials: readonly SpecialToken[]): number[] {
  if (specials.length === 0) return Array.from(tokenizer.encode(text));
  const escaped = specials.map(({ content }) => content.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'));
  const ids = new Map(specials.map(({ content, id }) => [content, id]));
  return text.split(new RegExp(`(${escaped.join('|')})`)).flatMap((piece) => {
    const id = ids.get(piece);
    if (id !== undefined) return [id];
    return piece === '' ? [] : Array.from(tokenizer.encode(piece));
  });
}

/** tokenizer_config.json writes a token as a string or as an object with its content. */
function nameOf(token: unknown): string {
  if (typeof token === 'string') return token;
  const content = (token as { content?: unknown } | null | undefined)?.content;
  return typeof content === 'string' ? content : '';
}

function readJson(path: string): Record<string, unknown> {
  if (!existsSync(path)) return {};
  try {
    return JSON.parse(read(path)) as Record<string, unknown>;
  } catch (error) {
    throw new UsageError(`${path}: is not JSON`, { cause: error });
  }
}

function read(path: string): string {
  try {
    return readFileSync(path, 'utf8');
  } catch (error) {
    throw fileError('read', path, error);
  }
}
