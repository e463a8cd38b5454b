/** The content of config.json beside model.safetensors: all that is needed to build the model and to read its tokens. */

import { parseAsGiven } from '../config/check.js';
import { withPresentNamesIn } from '../config/legacy/keys.js';
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import * as z from '../zod.js';

const FORMAT = 'trefoil';
/** Raise it with every change that older code would misread. */
const VERSION = 1;
const heading = z.looseObject({ format: z.literal(FORMAT), version: z.int(), trefoil_version: z.string().optional() });

const savedModel = z.strictObject({
  format: z.literal(FORMAT),
  version: z.literal(VERSION),
  trefoil_version: z.string(),
  /** Optimizer steps behind the weights. */
  step: z.int().min(0),
  /** A built-in name, or a path relative to this file's folder. */
  tokenizer: z.string().min(1),
  /** Rows of the embedding. */
  vocab_size: z.int().min(1),
  // By the config's own schema, which has better messages.
  model: z.unknown(),
  nsa: z.unknown(),
  /** `train.seq_len`, which only an export needs. */
  seq_len: z.int().min(1).optional(),
  /** Tokens that end a text, besides the tokenizer's separator. */
  end_tokens: z.array(z.int().min(0)).optional(),
  /** The source of an imported model. */
  origin: z
    .strictObject({
      format: z.literal('huggingface'),
      architecture: z.string().min(1),
      /** `max_position_embeddings` and `bos_token_id`, which only an export needs. */
      max_positions: z.int().min(1).nullable(),
      bos_token: z.int().min(0).nullable(),
    })
    .optional(),
  /** Without it the weights are not compared: for weights that were changed on purpose. */
  weights: z.strictObject({ file: z.string(), bytes: z.int(), sha256: z.string() }).optional(),
});

export type SavedModel = Omit<z.infer<typeof savedModel>, 'model' | 'nsa'> & Pick<Config, 'model' | 'nsa'>;

/** The source of an imported model. */
export type ModelOrigin = NonNullable<SavedModel['origin']>;

/** The text of the file. */
export function modelConfigText(saved: Omit<SavedModel, 'format' | 'version'>): string {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, ...saved }, null, 2)}\n`;
}

/** Whether Trefoil wrote this content, of whatever version. */
export function isModelHeading(json: unknown): boolean {
  return heading.safeParse(json).success;
}

/**
 * The content with the config it stands for; everything but `model`, `nsa`, the tokenizer and `train.seq_len` has its default
 * there. `path` is for messages, `tokenizerSpec` gives the place of a tokenizer.
 */
export function parseModelConfig(
  path: string,
  json: unknown,
  tokenizerSpec: (name: string) => string,
): { saved: SavedModel; config: Config } {
  const head = heading.safeParse(json);
  if (!head.success)
    throw new UsageError(
      `${path}: is not the config.json of a Trefoil model; name the folder of a run or a checkpoint`,
    );
  const { version, trefoil_version: writer = 'unknown' } = head.data;
  if (version !== VERSION)
    throw new UsageError(
      `${path}: has version ${version}, written by trefoil ${writer}; this trefoil reads version ${VERSION}: ` +
        `use ${version > VERSION ? 'a newer' : 'an older'} trefoil`,
    );
  const parsed = savedModel.safeParse(json);
  if (!parsed.success) {
    const [{ path: key, message }] = parsed.error.issues;
    throw new UsageError(`${path}: ${key.join('.') || 'the file'}: ${message}; take the file as training wrote it`);
  }
  const { model, nsa, tokenizer, seq_len } = parsed.data;
  const train = seq_len === undefined ? {} : { seq_len };
  const config = inFile(path, () =>
    parseAsGiven(withPresentNamesIn({ model, nsa, data: { tokenizer: tokenizerSpec(tokenizer) }, train })),
  );
  return { saved: { ...parsed.data, model: config.model, nsa: config.nsa }, config };
}

/** Puts the file's name in front of what is wrong inside it, all in one line. */
export function inFile<T>(path: string, read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    throw new UsageError(`${path}: ${error.message.replaceAll('\n', '; ')}`, { cause: error });
  }
}
