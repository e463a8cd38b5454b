/** Reads the files that describe a tokenizer in a Hugging Face folder. */
import { existsSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { UsageError } from '../../../errors.js';
import { readText } from '../../../files.js';
import { isShallow } from '../../../json-values.js';
import * as z from '../../../zod.js';
import { Step } from './step.js';

/** Files beside tokenizer.json that belong to the tokenizer, and are copied with it. */
export const TOKENIZER_COMPANIONS = [
  'tokenizer_config.json',
  'special_tokens_map.json',
  'chat_template.jinja',
  'generation_config.json',
] as const;

/** The largest tokenizers have a quarter of a million tokens: some 35 MB. */
const FILE_BYTES = 64 * 2 ** 20;
const TEMPLATE_BYTES = 2 ** 20;
const MAX_ID = 2 ** 24;
const MAX_TOKEN_LENGTH = 4096;

const AddedToken = z.looseObject({
  id: z.number().int().min(0).max(MAX_ID),
  content: z.string().min(1).max(MAX_TOKEN_LENGTH),
  special: z.boolean().default(false),
  lstrip: z.boolean().default(false),
  rstrip: z.boolean().default(false),
  single_word: z.boolean().default(false),
  normalized: z.boolean().default(false),
});
const TokenizerFile = z.looseObject({
  model: z.looseObject({ type: z.string().nullish(), vocab: z.unknown() }),
  added_tokens: z.array(AddedToken).default([]),
  normalizer: Step.nullish(),
  pre_tokenizer: Step.nullish(),
  post_processor: Step.nullish(),
  decoder: Step.nullish(),
});
type TokenizerFile = z.infer<typeof TokenizerFile>;

/** A token by name: a string, or an object with its content. */
const Token = z.union([z.string(), z.looseObject({ content: z.string() }).transform(({ content }) => content)]);
const SpecialTokens = z.looseObject({
  bos_token: Token.nullish(),
  eos_token: Token.nullish(),
  unk_token: Token.nullish(),
  sep_token: Token.nullish(),
  pad_token: Token.nullish(),
  cls_token: Token.nullish(),
  mask_token: Token.nullish(),
  additional_special_tokens: z.array(Token).nullish(),
});
const TokenizerConfig = SpecialTokens.extend({
  added_tokens_decoder: z.record(z.string(), AddedToken.omit({ id: true })).nullish(),
  chat_template: z
    .union([z.string(), z.array(z.object({ name: z.string(), template: z.string() }))])
    .nullish()
    .transform((value) => (typeof value === 'string' ? [{ name: 'default', template: value }] : (value ?? []))),
});
const EndTokens = z.looseObject({
  eos_token_id: z.union([z.number().int(), z.array(z.number().int())]).nullish(),
});

/** Strings of special tokens by their names, such as `bos_token`: variables of chat templates. */
export type SpecialTokenNames = Readonly<Record<string, string | readonly string[]>>;

export interface TokenizerFiles {
  readonly path: string;
  /** The text of tokenizer.json. */
  readonly content: string;
  readonly file: TokenizerFile;
  readonly names: SpecialTokenNames;
  /** Chat templates by name. Most models have one, `default`. */
  readonly chatTemplates: ReadonlyMap<string, string>;
  /** Token ids that end a generated text, of generation_config.json or config.json. */
  readonly endTokens: readonly number[];
}

export function readTokenizerFiles(path: string): TokenizerFiles {
  const content = read(path);
  const file = parse(path, content, TokenizerFile);
  const beside = <Value>(name: string, schema: z.ZodType<Value>): Value | undefined => {
    const other = join(dirname(path), name);
    return existsSync(other) ? parse(other, read(other), schema) : undefined;
  };
  const config = beside('tokenizer_config.json', TokenizerConfig);
  const known = new Set(file.added_tokens.map(({ id }) => id));
  for (const [id, token] of Object.entries(config?.added_tokens_decoder ?? {}))
    if (!known.has(Number(id))) file.added_tokens.push({ ...token, id: Number(id) });
  const chatTemplates = new Map((config?.chat_template ?? []).map(({ name, template }) => [name, template]));
  const templatePath = join(dirname(path), 'chat_template.jinja');
  if (existsSync(templatePath)) chatTemplates.set('default', read(templatePath, TEMPLATE_BYTES));
  const end =
    beside('generation_config.json', EndTokens)?.eos_token_id ?? beside('config.json', EndTokens)?.eos_token_id ?? [];
  return {
    path,
    content,
    file,
    chatTemplates,
    names: { ...namesIn(beside('special_tokens_map.json', SpecialTokens)), ...namesIn(config) },
    endTokens: typeof end === 'number' ? [end] : end,
  };
}

function namesIn(tokens: z.infer<typeof SpecialTokens> | undefined): SpecialTokenNames {
  const names = Object.keys(SpecialTokens.shape) as (keyof typeof SpecialTokens.shape)[];
  return Object.fromEntries(
    names.flatMap((name) => {
      const value = tokens?.[name] ?? undefined;
      return value === undefined ? [] : [[name, value]];
    }),
  );
}

function read(path: string, limit = FILE_BYTES): string {
  const text = readText(path, { links: 'in model', limit });
  if (text === undefined) throw new UsageError(`data.tokenizer: cannot read ${path}: there is no such file`);
  return text;
}

function parse<Value>(path: string, content: string, schema: z.ZodType<Value>): Value {
  let value: unknown;
  try {
    value = JSON.parse(content);
  } catch (error) {
    throw new UsageError(`${path}: not valid JSON: ${(error as Error).message}`, { cause: error });
  }
  if (!isShallow(value)) throw new UsageError(`${path}: is nested too deeply; use another tokenizer`);
  const result = schema.safeParse(value);
  if (result.success) return result.data;
  throw new UsageError(
    `${path}: not a tokenizer file: ${issueText(result.error)}; give a tokenizer.json of Hugging Face, byte or gpt2`,
  );
}

const KINDS: Readonly<Record<string, string>> = {
  object: 'an object',
  record: 'an object',
  array: 'a list',
  tuple: 'a pair',
  int: 'an integer',
};

/** The first problem in words: which part, and what it must be. `prefix`: path of the part that was checked. */
export function issueText({ issues: [issue] }: z.ZodError, prefix: readonly string[] = []): string {
  const part = [...prefix, ...issue.path].join('.') || 'the top level';
  if (issue.code !== 'invalid_type') return `${part} is not as expected`;
  if (issue.message.endsWith('received undefined')) return `${part} is missing`;
  return `${part} must be ${KINDS[issue.expected] ?? `a ${issue.expected}`}`;
}
