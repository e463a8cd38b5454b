/** What a person sees of a run: lines, a progress line, and the measures in them that need more than one step. */
import type { Batch } from '../data/batch.js';
import { LiveLine } from '../live-line.js';
import { trainingFlops } from '../model/flops.js';
import type { LanguageModel } from '../model/language-model.js';
import type { SparseStartState } from '../model/sparse-start.js';
import type { TrainOptions } from './options.js';
import type { World } from './ranks/world.js';
import type { StepRecord } from './records.js';
import type { TrainingStep } from './trainer.js';

/** Prints lines. Rank 0 prints what concerns the whole run; other ranks only warn about themselves. */
export class RankLogger {
  /** The progress line, on the terminal of rank 0. Every other line removes it first. */
  readonly live: LiveLine | null;
  readonly #say: (line: string) => void;
  readonly #warn: (line: string) => void;
  readonly #rank: number;

  constructor({ say = () => {}, warn = warnOnStderr, terminal }: TrainOptions, { rank }: Pick<World, 'rank'>) {
    this.live = rank === 0 && terminal?.isTTY ? new LiveLine(terminal) : null;
    this.#say = say;
    this.#warn = warn;
    this.#rank = rank;
  }

  readonly say = (line: string): void => {
    this.live?.clear();
    if (this.#rank === 0) this.#say(line);
  };

  readonly warn = (line: string): void => {
    this.live?.clear();
    if (this.#rank === 0) this.#warn(line);
  };

  /** A warning about this rank, with its number unless it is rank 0. */
  readonly warnOwn = (line: string): void => {
    this.live?.clear();
    this.#warn(this.#rank === 0 ? line : `rank ${this.#rank}: ${line}`);
  };
}

function warnOnStderr(line: string): void {
  console.warn(`warning: ${line}`);
}

/** Fetches that the percentiles cover. */
const KEPT = 256;

/** Percentiles of the time that fetching recent batches took. */
export class FetchTimes {
  readonly #recent: number[] = [];

  add(seconds: number): void {
    this.#recent.push(seconds);
    if (this.#recent.length > KEPT) this.#recent.shift();
  }

  /** A percentile in milliseconds; `share` 0.5 is the median. */
  percentileMs(share: number): number {
    if (this.#recent.length === 0) return 0;
    const sorted = [...this.#recent].sort((a, b) => a - b);
    return 1000 * sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  }
}

/** Weight of the newest step in the estimate of the time left. */
const SMOOTHING = 0.1;

/** What one step alone does not tell: percentiles of fetch times, the share of the peak, the time left. */
export class StepMeter {
  readonly #model: Pick<LanguageModel, 'shape'>;
  readonly #fetchTimes = new FetchTimes();
  #peakFlops: number | null;
  #isFirstStep = true;
  /** Null until the second step. */
  #secondsPerStep: number | null = null;

  /** `peakFlops`: of the device, in FLOP/s; null if unknown. */
  constructor(model: Pick<LanguageModel, 'shape'>, peakFlops: number | null) {
    this.#model = model;
    this.#peakFlops = peakFlops;
  }

  add(step: TrainingStep): Pick<StepRecord, 'fetchP50Ms' | 'fetchP95Ms' | 'mfu'> {
    const seconds = step.tokens / step.tokensPerSecond;
    this.#fetchTimes.add(step.fetchSeconds);
    // The first step of a process compiles kernels, so it does not count.
    if (this.#isFirstStep) this.#isFirstStep = false;
    else this.#secondsPerStep = seconds * SMOOTHING + (this.#secondsPerStep ?? seconds) * (1 - SMOOTHING);
    return {
      fetchP50Ms: this.#fetchTimes.percentileMs(0.5),
      fetchP95Ms: this.#fetchTimes.percentileMs(0.95),
      mfu: this.#mfu(step.batches, seconds),
    };
  }

  /** NaN until it is known. */
  secondsLeft(steps: number): number {
    return (this.#secondsPerStep ?? Number.NaN) * steps;
  }

  /** Share of the peak. A step that exceeds the measured peak proves it too low and raises it: the share is at most 1. */
  #mfu(batches: readonly Batch[], seconds: number): number | null {
    if (this.#peakFlops === null) return null;
    const flops = batches.reduce((total, { cuSeqlens }) => {
      const lengths = Array.from({ length: cuSeqlens.length - 1 }, (_, i) => cuSeqlens[i + 1] - cuSeqlens[i]);
      return total + trainingFlops(this.#model.shape, lengths).used;
    }, 0);
    this.#peakFlops = Math.max(this.#peakFlops, flops / seconds);
    return flops / seconds / this.#peakFlops;
  }
}

/** `step 0020 | loss 5.4321 | lr 3.00e-04 | toks/s 51234 | …`, the form that runbooks parse; `dropped` are log records. */
export function stepLine(record: StepRecord, dropped = 0): string {
  return [
    `step ${String(record.step).padStart(4, '0')}`,
    `loss ${record.loss.toFixed(4)}`,
    `lr ${exponent(record.learningRate)}`,
    `toks/s ${record.tokensPerSecond.toFixed(0)}`,
    ...(record.mfu === null ? [] : [`mfu ${(100 * record.mfu).toFixed(1)}%`]),
    `grad_norm ${record.gradientNorm.toFixed(2)}`,
    `fetch ${(1000 * record.fetchSeconds).toFixed(0)}ms`,
    `fetch_p50 ${record.fetchP50Ms.toFixed(0)}ms`,
    `fetch_p95 ${record.fetchP95Ms.toFixed(0)}ms`,
    ...sparseStartText(record.sparseStart),
    ...(dropped > 0 ? [`log_dropped ${dropped}`] : []),
  ].join(' | ');
}

/** The warning about a step whose loss or gradient norm was unusual. */
export function spikeLine({ step, loss, gradientNorm, spike, isSkipped }: TrainingStep): string {
  const scores = [spike!.loss, spike!.gradient].map((z) => `(z ${z.toFixed(1)})`);
  return (
    `spike at step ${step}: loss ${loss.toFixed(4)} ${scores[0]}, gradient norm ${gradientNorm.toFixed(3)} ${scores[1]}` +
    (isSkipped ? '; update skipped' : '')
  );
}

/** runtime.debug_compare: how far the kernels are from the reference. */
export function comparisonLine({ step, result }: TrainingStep): string {
  return `compare ${step} | largest distance from the reference ${Math.max(...result.comparisons).toExponential(2)}`;
}

/** runtime.debug_timing: how a step's time was spent. */
export function timingLine({ step, fetchSeconds, gradientsMs, updateMs }: TrainingStep): string {
  const [fetch, gradients, update] = [1000 * fetchSeconds, gradientsMs, updateMs].map((ms) => `${ms.toFixed(1)}ms`);
  return `timing ${step} | fetch ${fetch} | gradients ${gradients} | update ${update}`;
}

function sparseStartText(state: SparseStartState | null): string[] {
  return state ? [`n_sel ${state.nSel}`, `gate_released ${(100 * state.releasedShare).toFixed(1)}%`] : [];
}

/** 3.00e-04: two digits of exponent, as C prints it. */
function exponent(value: number): string {
  return value.toExponential(2).replace(/e([+-])(\d)$/, 'e$10$2');
}

/** h:mm:ss or m:ss. */
export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return '?';
  const whole = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  const two = (value: number) => String(value).padStart(2, '0');
  return hours > 0 ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

const BAR_WIDTH = 24;

/** The live line of a run. */
export function progressText(
  { step, loss, tokensPerSecond }: Pick<StepRecord, 'step' | 'loss' | 'tokensPerSecond'>,
  steps: number,
  secondsLeft: number,
): string {
  const filled = Math.round((BAR_WIDTH * step) / steps);
  const bar = `${'█'.repeat(filled)}${'░'.repeat(BAR_WIDTH - filled)}`;
  return `${bar} ${step}/${steps}  loss ${loss.toFixed(3)}  ${tokensPerSecond.toFixed(0)} tok/s  ${duration(secondsLeft)} left`;
}
