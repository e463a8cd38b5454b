/** The learning rate by step. */
import type { Config } from '../config/schema.js';

type ScheduleConfig = Pick<
  Config['train'],
  'steps' | 'lr' | 'lr_min_ratio' | 'lr_schedule' | 'warmup_steps' | 'wsd_decay_fraction'
>;

/** At most half of the run: a run shortened with --steps may be shorter than the config's warm-up. */
export function warmupSteps({ warmup_steps: warmup, steps }: Pick<ScheduleConfig, 'steps' | 'warmup_steps'>): number {
  return Math.min(warmup, Math.floor(steps / 2));
}

/** The rate of a step, counted from 1. */
export function learningRate(step: number, config: ScheduleConfig): number {
  const { steps, lr, lr_min_ratio: floor, lr_schedule: kind } = config;
  const warmup = warmupSteps(config);
  if (step <= warmup) return (lr * step) / warmup;
  const progress = steps === warmup ? 1 : (step - warmup) / (steps - warmup);
  return lr * (floor + (1 - floor) * share(kind, progress, config.wsd_decay_fraction));
}

/** The part of the decaying rate at `progress`, from 0 after the warm-up to 1 at the last step; 1 is the whole rate. */
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
