/** What changed between the config of a checkpoint and the one of the run that resumes it. */
import { UsageError } from '../errors.js';
import { configKeys } from './keys.js';
import { show } from './parse.js';
import { configValue } from './print.js';
import type { Config } from './schema.js';

export interface ConfigChange {
  key: string;
  before: unknown;
  after: unknown;
  /** The weights of the checkpoint do not fit, or would mean something else. */
  shape: boolean;
}

/**
 * Keys that decide which weights there are and what they were trained to look at. Not among them: rope_theta, rope_scale
 * and norm_eps, which people change on purpose to extend the context, and the gate's debug switches.
 */
const SHAPE_KEYS: ReadonlySet<string> = new Set([
  'model.dim',
  'model.n_layers',
  'model.n_heads',
  'model.n_kv_groups',
  'model.d_k',
  'model.d_v',
  'model.mlp',
  'model.mlp_ratio',
  'model.tie_embeddings',
  'model.attention',
  'model.vocab_size',
  'nsa.l',
  'nsa.d',
  'nsa.l_sel',
  'nsa.n_sel',
  'nsa.w',
  'nsa.phi',
  'nsa.phi_hidden',
  'data.tokenizer',
  'data.vocab_size',
]);

export function diffConfigs(before: Config, after: Config): ConfigChange[] {
  return configKeys.flatMap(({ path }) => {
    const [old, now] = [configValue(before, path), configValue(after, path)];
    const same = JSON.stringify(old) === JSON.stringify(now);
    return same ? [] : [{ key: path, before: old, after: now, shape: SHAPE_KEYS.has(path) }];
  });
}

/** `train.lr: 0.0002 -> 0.0001` */
export function changeLine(change: ConfigChange): string {
  return `${change.key}: ${show(change.before)} -> ${show(change.after)}`;
}

/** The changes a resume may make, to be printed; throws when one of them changes the shape of the model. */
export function checkResume(before: Config, after: Config): ConfigChange[] {
  const changes = diffConfigs(before, after);
  const refused = changes.filter((change) => change.shape);
  if (refused.length === 0) return changes;
  const lines = refused.map((change) => `${changeLine(change)} is not allowed on resume; keep ${show(change.before)}`);
  throw new UsageError(lines.join('\n'));
}
