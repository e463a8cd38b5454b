/** The part of a config that a model decides: a run that starts from its weights (`--from`) has its shape and tokenizer. */
import { existsSync } from 'node:fs';
import { configKeys } from '../config/keys.js';
import type { Layer, Setting } from '../config/layer.js';
import { readSavedConfig } from '../config/load.js';
import { configValue } from '../config/print.js';
import type { Config } from '../config/schema.js';
import { runPaths } from '../run/paths.js';
import { locateModel } from './load.js';

/** The keys that the model at `path` sets (`LoadOptions.modelLayer` of a config). */
export function modelLayer(path: string): Layer {
  const { config, shape, weights } = locateModel(path);
  weights.close();
  return layerOf({ ...config, model: { ...config.model, vocab_size: shape.vocabSize } }, `model ${path}`);
}

/** The same for a run that is resumed: its own config has the shape, and the model it began with may be gone. */
export function resumedLayer(path: string, outDir: string): Layer {
  const { config } = runPaths(outDir);
  return existsSync(config) ? layerOf(readSavedConfig(config), config) : modelLayer(path);
}

function layerOf(config: Config, origin: string): Layer {
  const sections = config.model.attention === 'nsa' ? ['model.', 'nsa.'] : ['model.'];
  const keys = configKeys
    .map(({ path }) => path)
    .filter((path) => sections.some((section) => path.startsWith(section)));
  // Also one whose file is missing: text in other tokens would be read without an error.
  keys.push('data.tokenizer');
  return new Map(
    keys.map((key): [string, Setting] => [key, { value: configValue(config, key), origin, where: origin }]),
  );
}
