/** The learning rate of each optimizer step, 1 … steps. The schedule covers exactly `steps`: the last has the lowest rate. */
import type { Config } from '../config/schema.js';

type ScheduleConfig = Pick<
  Config['train'],
  'steps' | 'lr' | 'lr_min_ratio' | 'lr_schedule' | 'warmup_steps' | 'wsd_decay_fraction'
>;

export function learningRate(step: number, config: ScheduleConfig): number {
  const { steps, lr, lr_min_ratio: floor, lr_schedule: kind } = config;
  // Runbooks shorten a run with --steps and keep the config's warm-up: it never takes more than half of the run then.
  const warmup = Math.min(config.warmup_steps, Math.floor(steps / 2));
  if (step <= warmup) return (lr * step) / warmup;
  const progress = steps === warmup ? 1 : (step - warmup) / (steps - warmup);
  return lr * (floor + (1 - floor) * share(kind, progress, config.wsd_decay_fraction));
}

/** From 1 to 0 while `progress` goes from 0 to 1. */
function share(kind: ScheduleConfig['lr_schedule'], progress: number, decay: number): number {
  switch (kind) {
    case 'constant':
      return 1;
    case 'linear':
      return 1 - progress;
    case 'cosine':
      return (1 + Math.cos(Math.PI * progress)) / 2;
    case 'wsd': // warm up, stay, decay
      return decay === 0 ? 1 : Math.min(1, (1 - progress) / decay);
  }
}
