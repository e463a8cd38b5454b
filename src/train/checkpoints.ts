/** What a checkpoint of a run holds, and how a run goes on from one: weights, Adam moments, and where everything stands. */
import { join } from 'node:path';
import { z } from 'zod';
import { changeLine, checkResume } from '../config/diff.js';
import { parseConfig } from '../config/parse.js';
import type { Config } from '../config/schema.js';
import type { Loader } from '../data/loader.js';
import { UsageError } from '../errors.js';
import type { LanguageModel } from '../model/language-model.js';
import { loadTensors, loadWeights, modelTensors, namedTensors } from '../model/weights.js';
import type { AdamW } from '../ops/adamw/op.js';
import type { FoundCheckpoint } from '../run/checkpoint-find.js';
import { CHECKPOINT_FILES, type SavedCheckpoint, type SaveOptions, saveCheckpoint } from '../run/checkpoint-save.js';
import type { SpikeDetector } from './spikes.js';

/** Everything that changes while a run goes. */
export interface TrainingState {
  readonly model: LanguageModel;
  readonly optimizer: AdamW;
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
});

export function saveTrainingState(
  outDir: string,
  state: TrainingState,
  config: Config,
  options: SaveOptions,
): SavedCheckpoint {
  const { model, optimizer, loader, spikes, progress } = state;
  const saved: z.infer<typeof savedState> = {
    step: progress.step,
    optimizer_steps: optimizer.steps,
    loader: loader.state(),
    spikes: { loss: spikes.loss.state, gradient: spikes.gradient.state },
    first_loss: progress.firstLoss,
    last_loss: progress.lastLoss,
    last_val_loss: progress.lastValLoss,
    tokens_seen: progress.tokensSeen,
    spike_count: progress.spikes,
    skipped_updates: progress.skippedUpdates,
    config,
  };
  const parts = { model: modelTensors(model), optimizer: namedTensors(optimizer.state) };
  return saveCheckpoint(outDir, progress.step, parts, saved, options);
}

/** Puts everything back. Returns what of the config has changed since, as lines to print. */
export function restoreTrainingState(found: FoundCheckpoint, state: TrainingState, config: Config): string[] {
  const parsed = savedState.safeParse(found.state);
  if (!parsed.success)
    throw new UsageError(
      `${join(found.path, CHECKPOINT_FILES.state)}: is not the state of a training run: ${parsed.error.issues[0].message}`,
    );
  const saved = parsed.data;
  const changes = checkResume(parseConfig(saved.config), config);
  loadWeights(join(found.path, CHECKPOINT_FILES.model), state.model);
  loadTensors(join(found.path, CHECKPOINT_FILES.optimizer), state.optimizer.state);
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
  return changes.map(changeLine);
}
