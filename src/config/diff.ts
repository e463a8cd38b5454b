/** Differences between the config of a checkpoint and that of the run which resumes it. */
import { UsageError } from '../errors.js';
import { isPinOf } from '../hub/name.js';
import { show } from './check.js';
import { mixtureChanges } from './mixture.js';
import type { Config } from './schema.js';

export interface ConfigChange {
  key: string;
  before: unknown;
  after: unknown;
  /** The key determines the shape or meaning of the weights, so it must not change. */
  shape: boolean;
}

/**
 * Keys that determine the shape and meaning of the weights. rope_theta, rope_scale and norm_eps are not among them:
 * people change these to extend the context. Neither are the debug switches of the gate.
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
  'model.mlp_hidden',
  'model.qkv_bias',
  'model.qk_norm',
  'model.out_bias',
  'model.mlp_bias',
  'model.tie_embeddings',
  'model.attention',
  'model.layer_pattern',
  'model.vocab_size',
  'nsa.l',
  'nsa.d',
  'nsa.l_sel',
  'nsa.n_sel',
  'nsa.w',
  'nsa.shared_kv',
  'nsa.phi',
  'nsa.phi_hidden',
  // The moments of one optimizer mean nothing to another.
  'train.optimizer',
  // The moments are those of what is trained.
  'train.trainable',
  'train.lora',
  // The gates hold what the schedule has released so far.
  'train.gate_release_steps',
  'train.gate_release_share',
  'data.tokenizer',
  'data.vocab_size',
]);

/** A model of the hub by its name and the same with the commit that was found then are no change. */
export function diffConfigs(before: Config, after: Config): ConfigChange[] {
  const changes: ConfigChange[] = [];
  for (const [section, keys] of Object.entries(after)) {
    const saved: Record<string, unknown> = before[section as keyof Config];
    for (const [name, now] of Object.entries(keys)) {
      const key = `${section}.${name}`;
      const mixed = key === 'data.sources' ? mixtureChanges(before.data.sources, after.data.sources) : null;
      if (mixed !== null) changes.push(...mixed.map(({ isRefused, ...change }) => ({ ...change, shape: isRefused })));
      else if (JSON.stringify(saved[name]) !== JSON.stringify(now) && !isPinOf(String(saved[name]), String(now)))
        changes.push({ key, before: saved[name], after: now, shape: SHAPE_KEYS.has(key) });
    }
  }
  return changes;
}

/** `train.lr: 0.0002 -> 0.0001` */
export function changeLine(change: ConfigChange): string {
  return `${change.key}: ${show(change.before)} -> ${show(change.after)}`;
}

/** The changes, for printing. Throws if one of them changes the shape of the model; `remedy` is the error's last line. */
export function checkResume(before: Config, after: Config, remedy?: string): ConfigChange[] {
  const changes = diffConfigs(before, after);
  const refused = changes.filter((change) => change.shape);
  if (refused.length === 0) return changes;
  const lines = refused.map((change) => `${changeLine(change)} is not allowed on resume; keep ${show(change.before)}`);
  throw new UsageError([...lines, ...(remedy === undefined ? [] : [remedy])].join('\n'));
}
