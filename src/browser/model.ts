/** Models in a page: made from a config, loaded from files, saved as files that every Trefoil reads. */
import { parseAsGiven } from '../config/check.js';
import type { Config, ConfigInput } from '../config/schema.js';
import type { Tokenizer } from '../data/tokenizer.js';
import { createByteTokenizer } from '../data/tokenizers/bytes.js';
import { createStoryTokenizer } from '../data/tokenizers/stories.js';
import type { Device } from '../device/device.js';
import { UsageError } from '../errors.js';
import { BatchEngine } from '../infer/engine/engine.js';
import type { TextSource } from '../infer/text-source.js';
import {
  engineOptionsFor,
  type GenerateOptions,
  type Generation,
  generateWith,
  type TextPiece,
  textOfFirst,
} from '../infer/texts.js';
import { LanguageModel } from '../model/language-model.js';
import { isModelHeading, modelConfigText, parseModelConfig, type SavedModel } from '../model/saved-model.js';
import { modelShape } from '../model/shape.js';
import { configAfter } from '../model/sparse-start.js';
import { type Shape, Tensor } from '../tensor/tensor.js';
import { BrowserTensors, loadTensors, safetensorsBlob, type TensorContent } from './tensors.js';

/** Tokenizers that need no file of their own: those of others are read by Trefoil in Node only. */
const TOKENIZERS = { byte: createByteTokenizer, stories: createStoryTokenizer } as const;

/** A whole config from the keys that differ from the defaults. */
export function parseConfig(input: ConfigInput): Config {
  return parseAsGiven(input);
}

/** `byte` or `stories`. */
export function createTokenizer(name: string): Tokenizer {
  if (Object.hasOwn(TOKENIZERS, name)) return TOKENIZERS[name as keyof typeof TOKENIZERS]();
  throw new UsageError(
    `data.tokenizer: a browser has ${Object.keys(TOKENIZERS).join(' and ')}, not "${name}"; run this model with Trefoil in Node`,
  );
}

/** A model of a page, with what is needed to read and write its text. */
export interface BrowserModel extends TextSource {
  /** Optimizer steps behind the weights. */
  readonly step: number;
  /** Frees the model. */
  free(): void;
}

/** A new model with the random weights of `train.seed`. */
export function createModel(device: Device, config: Config): BrowserModel {
  const tokenizer = createTokenizer(config.data.tokenizer);
  const shape = modelShape(config, config.model.vocab_size ?? tokenizer.vocabSize);
  const model = new LanguageModel(device, shape, config.train.seed);
  return { model, config, tokenizer, step: 0, free: () => model.free() };
}

/** The two files of a model that Trefoil wrote. */
export interface ModelFiles {
  /** config.json. */
  readonly config: Blob | URL | string;
  /** model.safetensors. */
  readonly weights: TensorContent;
}

/** Loads a model from its two files. Its weights can be trained. */
export async function loadModel(device: Device, files: ModelFiles): Promise<BrowserModel> {
  const { saved, config } = parseModelConfig('config.json', await jsonOf(files.config), (name) => name);
  const source = await BrowserTensors.open(files.weights);
  const { weights } = saved;
  if (weights && weights.bytes !== source.bytes)
    throw new UsageError(
      `${source.path}: has ${source.bytes} bytes, config.json describes ${weights.bytes}: the two do not belong together; ` +
        'take both from the same run',
    );
  const tokenizer = createTokenizer(config.data.tokenizer);
  // Their values arrive afterwards.
  const unfilled = { read: (_name: string, shape: Shape) => Tensor.empty(device, shape), free: () => {} };
  let model: LanguageModel | null = null;
  try {
    model = new LanguageModel(device, modelShape(config, saved.vocab_size), unfilled);
    await loadTensors(source, model);
    return modelOf(model, config, tokenizer, saved);
  } catch (error) {
    model?.free();
    device.pool.trim(); // one too large for the page must leave room for others
    throw error;
  }
}

function modelOf(model: LanguageModel, config: Config, tokenizer: Tokenizer, saved: SavedModel): BrowserModel {
  return { model, config, tokenizer, step: saved.step, endTokens: saved.end_tokens ?? [], free: () => model.free() };
}

async function jsonOf(content: Blob | URL | string): Promise<unknown> {
  const text = await (content instanceof Blob ? content : await fetch(content)).text();
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    throw new UsageError('config.json: is not JSON; take the file beside model.safetensors', { cause: error });
  }
  if (!isModelHeading(json))
    throw new UsageError('config.json: is not that of a Trefoil model; import others with trefoil import-hf in Node');
  return json;
}

/** The two files of a model: `trefoil generate --model FOLDER` reads them, and `loadModel`. */
export function saveModel(
  { model, config, endTokens = [] }: TextSource,
  step: number,
): { readonly config: Blob; readonly weights: Blob } {
  const weights = safetensorsBlob(model);
  const text = modelConfigText({
    trefoil_version: 'in a browser',
    step,
    tokenizer: config.data.tokenizer,
    vocab_size: model.shape.vocabSize,
    model: config.model,
    nsa: configAfter(config, step).nsa,
    seq_len: config.train.seq_len,
    ...(endTokens.length > 0 && { end_tokens: [...endTokens] }),
  });
  return { config: new Blob([text], { type: 'application/json' }), weights };
}

/** Options of `generate` and `generateAll` in a page, which keeps no files. */
export type BrowserGenerateOptions = Omit<GenerateOptions, 'prefixCacheDir'>;

/** Yields pieces of text as they become final; returns the tokens and why the text ended. */
export function generate(
  source: TextSource,
  prompt: string | readonly number[],
  options: BrowserGenerateOptions = {},
): AsyncGenerator<string, Generation, void> {
  return textOfFirst(generateAll(source, [prompt], options));
}

/** Generates for several prompts, texts or token ids, as one batch. Each gets the text it would get alone. */
export function generateAll(
  source: TextSource,
  prompts: readonly (string | readonly number[])[],
  options: BrowserGenerateOptions = {},
): AsyncGenerator<TextPiece, Generation[], void> {
  const open = () => new BatchEngine(source, engineOptionsFor(source, options, prompts.length), false);
  return generateWith(open, source, prompts, options);
}
