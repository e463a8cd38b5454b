/** What is asked of a run between two steps. Ranks must do the same at the same step, so they agree on it first. */
import type { Together } from '../ranks/together.js';
import type { StopSignal } from './signals.js';

export interface Wishes {
  /** Why to halt, as .HALT says; only the first rank looks. */
  readonly halt: string | undefined;
  readonly stop: StopSignal | 'abort' | null;
  readonly save: boolean;
}

const STOPS = ['abort', 'SIGINT', 'SIGTERM'] as const;

/** A wish of one rank is a wish of all. */
export function agreeOnWishes(own: Wishes, together: Together): Wishes {
  const stop = own.stop === null ? 0 : 1 + STOPS.indexOf(own.stop);
  const [halts, stops, saves] = together.max([Number(own.halt !== undefined), stop, Number(own.save)]);
  return {
    halt: halts > 0 ? together.share(own.halt ?? '') : undefined,
    stop: stops > 0 ? STOPS[stops - 1] : null,
    save: saves > 0,
  };
}
