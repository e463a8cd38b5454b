/**
 * Frequencies of rotary positions: one table for every head size, theta and kind of scaling. It is computed once, in
 * float64, and rounded to float32 where it is used. Scaling follows the conventions of the model files of Llama 3 and of
 * YaRN (arXiv 2309.00071), so that weights trained with them can be loaded.
 */
import { UsageError } from '../../errors.js';

/** How the frequencies are changed for contexts longer than those of the first training. */
export type RotaryScaling =
  | { readonly type: 'default' }
  /** All frequencies divided by `factor`. */
  | { readonly type: 'linear'; readonly factor: number }
  /**
   * Waves longer than `originalContext / lowFreqFactor` divided by `factor`, those shorter than
   * `originalContext / highFreqFactor` unchanged, and a blend between.
   */
  | {
      readonly type: 'llama3';
      readonly factor: number;
      readonly originalContext: number;
      readonly lowFreqFactor: number;
      readonly highFreqFactor: number;
    }
  /**
   * Pairs that turn less than `betaSlow` times in `originalContext` divided by `factor`, those that turn more than
   * `betaFast` times unchanged, and a ramp over the pairs between. Queries and keys are multiplied by
   * `attentionFactor`; null = 0.1 ln(factor) + 1.
   */
  | {
      readonly type: 'yarn';
      readonly factor: number;
      readonly originalContext: number;
      readonly betaFast: number;
      readonly betaSlow: number;
      readonly attentionFactor: number | null;
    };

/** The settings that decide the rotations of heads of one size. */
export interface RotaryShape {
  /** Numbers of a head; even. */
  readonly size: number;
  /** Base of the frequencies. */
  readonly theta: number;
  /** Positions are divided by it. Default 1. */
  readonly scale?: number;
  readonly scaling?: RotaryScaling;
}

/** The angle of pair `j` at a position is `position / scale * frequencies[j]`; cosine and sine are times `amplitude`. */
export interface RotaryAngles {
  /** [size / 2], in float64. */
  readonly frequencies: Float64Array;
  readonly scale: number;
  readonly amplitude: number;
}

export function rotaryAngles({ size, theta, scale = 1, scaling = { type: 'default' } }: RotaryShape): RotaryAngles {
  if (!Number.isSafeInteger(size) || size < 2 || size % 2 !== 0)
    throw new UsageError(`a rotated head must have an even size, not ${size}`);
  expectPositive('theta', theta);
  expectPositive('scale', scale);
  for (const [name, value] of Object.entries(scaling))
    if (name !== 'type' && value !== null) expectPositive(`${scaling.type} ${name}`, value as number);
  const frequencies = Float64Array.from({ length: size / 2 }, (_, j) => theta ** ((-2 * j) / size));
  return { frequencies: scaled(frequencies, theta, scaling), scale, amplitude: amplitudeOf(scaling) };
}

function scaled(frequencies: Float64Array, theta: number, scaling: RotaryScaling): Float64Array {
  switch (scaling.type) {
    case 'default':
      return frequencies;
    case 'linear':
      return frequencies.map((frequency) => frequency / scaling.factor);
    case 'llama3': {
      const { factor, originalContext, lowFreqFactor: low, highFreqFactor: high } = scaling;
      if (!(low < high)) throw new UsageError(`llama3 lowFreqFactor ${low} must be below highFreqFactor ${high}`);
      return frequencies.map((frequency) => {
        const turns = (originalContext * frequency) / (2 * Math.PI);
        const kept = clamp((turns - low) / (high - low));
        return (1 - kept) * (frequency / factor) + kept * frequency;
      });
    }
    case 'yarn': {
      const { factor, originalContext, betaFast, betaSlow } = scaling;
      const size = 2 * frequencies.length;
      /** The pair, as a real number, that turns this many times in the original context. */
      const pairAt = (turns: number) =>
        (size * Math.log(originalContext / (turns * 2 * Math.PI))) / (2 * Math.log(theta));
      const first = Math.max(0, Math.floor(pairAt(betaFast)));
      const last = Math.min(size - 1, Math.ceil(pairAt(betaSlow)));
      const span = last === first ? 0.001 : last - first;
      return frequencies.map((frequency, j) => {
        const divided = clamp((j - first) / span);
        return divided * (frequency / factor) + (1 - divided) * frequency;
      });
    }
  }
}

function amplitudeOf(scaling: RotaryScaling): number {
  if (scaling.type !== 'yarn') return 1;
  return scaling.attentionFactor ?? yarnAttentionFactor(scaling.factor);
}

/** The factor on queries and keys that YaRN suggests. */
export function yarnAttentionFactor(factor: number, multiplier = 1): number {
  return factor <= 1 ? 1 : 0.1 * multiplier * Math.log(factor) + 1;
}

function clamp(value: number): number {
  return Math.min(1, Math.max(0, value));
}

function expectPositive(name: string, value: number): void {
  if (!(value > 0 && Number.isFinite(value))) throw new UsageError(`${name} must be above 0, not ${value}`);
}
