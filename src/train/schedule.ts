/** The learning rate of each optimizer step, 1 to `steps`; the formulas are in docs/reference/training.md. */
import type { Config } from '../config/schema.js';

type ScheduleConfig = Pick<
  Config['train'],
  'steps' | 'lr' | 'lr_min_ratio' | 'lr_schedule' | 'warmup_steps' | 'wsd_decay_fraction'
>;

/** The rate of a step, counted from 1. */
export function learningRate(step: number, config: ScheduleConfig): number {
  const { steps, lr, lr_min_ratio: floor, lr_schedule: kind } = config;
  // A run shortened with --steps keeps the config's warm-up: it is capped at half of the run.
  const warmup = Math.min(config.warmup_steps, Math.floor(steps / 2));
  if (step <= warmup) return (lr * step) / warmup;
  const progress = steps === warmup ? 1 : (step - warmup) / (steps - warmup);
  return lr * (floor + (1 - floor) * share(kind, progress, config.wsd_decay_fraction));
}

/** Falls from 1 to 0 while `progress` rises from 0 to 1. */
function share(kind: ScheduleConfig['lr_schedule'], progress: number, decay: number): number {
  switch (kind) {
    case 'constant':
      return 1;
    case 'linear':
      return 1 - progress;
    case 'cosine':
      return (1 + Math.cos(Math.PI * progress)) / 2;
    case 'wsd': // warm-up, stable, decay
      return decay === 0 ? 1 : Math.min(1, (1 - progress) / decay);
  }
}
