/** What a checkpoint of a run holds, and how a run goes on from one: weights, Adam moments, and where everything stands. */
import { join } from 'node:path';
import { z } from 'zod';
import { changeLine, checkResume } from '../config/diff.js';
import { parseSavedConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import type { Loader } from '../data/loader.js';
import { mergeStreamStates, type StreamState } from '../data/pipeline/loader.js';
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { loadWeights, modelTensors, namedTensors } from '../model/weights.js';
import type { AdamW } from '../ops/adamw/op.js';
import type { Together } from '../ranks/together.js';
import type { FoundCheckpoint } from '../run/checkpoint-find.js';
import {
  CHECKPOINT_FILES,
  optimizerFiles,
  type SavedCheckpoint,
  type SaveOptions,
  saveCheckpoint,
} from '../run/checkpoint-save.js';
import { type Held, loadOptimizer } from './optimizer-files.js';
import type { Ranks } from './ranks.js';
import { saveTogether } from './save-together.js';
import type { SpikeDetector } from './spikes.js';

/** Everything that changes while a run goes. */
export interface TrainingState {
  readonly model: LanguageModel;
  readonly optimizer: AdamW;
  /** What the optimizer holds: all parameters, or this rank's parts of them. */
  readonly held: readonly Held[];
  readonly loader: Loader;
  readonly spikes: { readonly loss: SpikeDetector; readonly gradient: SpikeDetector };
  readonly progress: Progress;
}

/** Numbers that survive a resume. */
export interface Progress {
  step: number;
  firstLoss: number | null;
  lastLoss: number | null;
  lastValLoss: number | null;
  tokensSeen: number;
  spikes: number;
  skippedUpdates: number;
}

const spikeState = z.strictObject({ count: z.number(), mean: z.number(), variance: z.number() });
const savedState = z.strictObject({
  step: z.int().min(0),
  optimizer_steps: z.int().min(0),
  loader: z.unknown(),
  spikes: z.strictObject({ loss: spikeState, gradient: spikeState }),
  first_loss: z.number().nullable(),
  last_loss: z.number().nullable(),
  last_val_loss: z.number().nullable(),
  tokens_seen: z.number(),
  spike_count: z.int(),
  skipped_updates: z.int(),
  config: z.unknown(),
  /** How many ranks there were; absent for one. */
  ranks: z.int().min(2).optional(),
});

/** With several ranks every one of them calls it: all save, or none does. */
export function saveTrainingState(
  outDir: string,
  state: TrainingState,
  config: Config,
  options: SaveOptions,
  ranks: Ranks | null = null,
): SavedCheckpoint {
  const { model, optimizer, loader, spikes, progress } = state;
  const saved: z.infer<typeof savedState> = {
    step: progress.step,
    optimizer_steps: optimizer.steps,
    loader: ranks ? joinedPosition(loader, ranks.world.together) : loader.state(),
    spikes: { loss: spikes.loss.state, gradient: spikes.gradient.state },
    first_loss: progress.firstLoss,
    last_loss: progress.lastLoss,
    last_val_loss: progress.lastValLoss,
    tokens_seen: progress.tokensSeen,
    spike_count: progress.spikes,
    skipped_updates: progress.skippedUpdates,
    config,
    ...(ranks && ranks.world.size > 1 && { ranks: ranks.world.size }),
  };
  const parts = { model: modelTensors(model), optimizer: namedTensors(optimizer.state) };
  if (!ranks) return saveCheckpoint(outDir, progress.step, parts, saved, options);
  return saveTogether(ranks, { outDir, step: progress.step, parts, saved, options, optimizer, held: state.held });
}

/** The position of all ranks, from which any number of them can go on. */
function joinedPosition(loader: Loader, together: Together): object {
  const states = together.gather(JSON.stringify(loader.state())).map((text) => JSON.parse(text));
  return states[0].kind === 'stream' ? mergeStreamStates(states as StreamState[]) : states[0];
}

/** Puts everything back. Returns what of the config has changed since, as lines to print. */
export function restoreTrainingState(
  found: FoundCheckpoint,
  state: TrainingState,
  config: Config,
  ranks = 1,
): string[] {
  const parsed = savedState.safeParse(found.state);
  if (!parsed.success)
    throw new UsageError(
      `${join(found.path, CHECKPOINT_FILES.state)}: is not the state of a training run: ${parsed.error.issues[0].message}`,
    );
  const saved = parsed.data;
  const before = parseSavedConfig(saved.config);
  const changes = checkResume(before, config).map(changeLine);
  const { model, optimizer, held } = state;
  loadWeights(join(found.path, CHECKPOINT_FILES.model), model);
  loadOptimizer(found.path, optimizerFiles(found.manifest), optimizer, held, model.parameters);
  state.optimizer.steps = saved.optimizer_steps;
  state.loader.restore(saved.loader);
  state.spikes.loss.restore(saved.spikes.loss);
  state.spikes.gradient.restore(saved.spikes.gradient);
  Object.assign(state.progress, {
    step: saved.step,
    firstLoss: saved.first_loss,
    lastLoss: saved.last_loss,
    lastValLoss: saved.last_val_loss,
    tokensSeen: saved.tokens_seen,
    spikes: saved.spike_count,
    skippedUpdates: saved.skipped_updates,
  });
  return [...changes, ...rankChanges(before, saved.ranks ?? 1, config, ranks)];
}

/** What another number of ranks means: the batch of a step is what all of them together take. */
function rankChanges(before: Config, ranksBefore: number, config: Config, ranks: number): string[] {
  const batch = ({ train }: Config, count: number) => train.batch_size * train.accumulate_grad_batches * count;
  const [old, now] = [batch(before, ranksBefore), batch(config, ranks)];
  if (ranks === ranksBefore) return [];
  const same = old === now ? `${now} sequences a step as before` : `${old} -> ${now} sequences a step`;
  return [`ranks: ${ranksBefore} -> ${ranks} (${same}; the order of samples stays)`];
}
