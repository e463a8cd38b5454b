/** What a run leaves when it ends: metrics.json always, the final model when it is done. */
import type { Config } from '../config/schema.js';
import { writeFinalModel } from '../infer/load-model.js';
import type { RunFolder } from '../run/run-folder.js';
import type { TrainingState } from './checkpoints.js';
import type { TrainStatus } from './loop.js';

export interface FinalFacts {
  readonly state: TrainingState;
  readonly config: Config;
  readonly status: TrainStatus;
  readonly seconds: number;
  /** Log lines the disk did not take. */
  readonly drops: number;
  readonly ranks: number;
  readonly save: string | null;
}

export function writeFinalFiles(
  folder: RunFolder,
  { state, config, status, seconds, drops, ranks, save }: FinalFacts,
): void {
  const { model, progress } = state;
  folder.writeMetrics({
    status,
    step: progress.step,
    steps: config.train.steps,
    first_loss: progress.firstLoss,
    last_loss: progress.lastLoss,
    val_loss: progress.lastValLoss,
    tokens_seen: progress.tokensSeen,
    spikes: progress.spikes,
    skipped_updates: progress.skippedUpdates,
    dropped_log_lines: drops,
    seconds,
    device: model.device.kind,
    device_name: model.device.name,
    dtype: model.dtype === 'bf16' ? 'bf16' : 'fp32',
    parameters: model.parameterCount,
    seq_len: config.train.seq_len,
    batch_size: config.train.batch_size * config.train.accumulate_grad_batches * ranks,
    ranks,
  });
  if (status !== 'done') return;
  writeFinalModel(folder.path, model, config, { step: progress.step });
  if (save !== null) writeFinalModel(save, model, config, { step: progress.step });
}
