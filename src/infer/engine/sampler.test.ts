import { describe, expect, it } from 'vitest';
import { ExitCode, UsageError } from '../../errors.js';
import fc from '../../testing/properties.js';
import {
  createSampler,
  deviceDraws,
  isArgmax,
  type SamplingOptions,
  UnusableLogits,
  uniformOfDraw,
} from './sampler.js';

const DRAWS = 4000;

/** Few values, so that equal logits are common. */
const logitsOf = (least: number) =>
  fc
    .array(fc.oneof(fc.integer({ min: -3, max: 3 }), fc.double({ min: -8, max: 8, noNaN: true })), {
      minLength: least,
      maxLength: 40,
    })
    .map((values) => Float32Array.from(values));

/** Tokens from the most probable on, the lower index first among equals. */
function ranking(logits: Float32Array): number[] {
  return Array.from(logits, (_, token) => token).sort((a, b) => logits[b] - logits[a] || a - b);
}

function softmax(logits: Float32Array, temperature = 1): number[] {
  const weights = Array.from(logits, (logit) => Math.exp((logit - Math.max(...logits)) / temperature));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => weight / total);
}

function counts(logits: Float32Array, options: SamplingOptions, draws = DRAWS): number[] {
  const sample = createSampler(options);
  const seen = new Array<number>(logits.length).fill(0);
  for (let draw = 0; draw < draws; draw++) seen[sample(logits, draw)] += 1;
  return seen;
}

/** Every token that can be drawn: a temperature this high makes all that are kept almost equally likely. */
function reachable(logits: Float32Array, options: SamplingOptions): number[] {
  return counts(logits, { ...options, temperature: 1e6, seed: 3 }).flatMap((count, token) =>
    count > 0 ? [token] : [],
  );
}

describe('greedy', () => {
  it('takes the largest logit, the lowest index among equals', () => {
    fc.assert(
      fc.property(logitsOf(1), fc.nat(), (logits, draw) => {
        expect(createSampler({ temperature: 0 })(logits, draw)).toBe(ranking(logits)[0]);
      }),
    );
  });

  it('is what top-k 1, a tiny top-p and a temperature near 0 come to', () => {
    fc.assert(
      fc.property(logitsOf(1), fc.nat(), (logits, draw) => {
        const [best] = ranking(logits);
        expect(createSampler({ topK: 1 })(logits, draw)).toBe(best);
        expect(createSampler({ topP: 1e-9 })(logits, draw)).toBe(best);
        const cold = createSampler({ temperature: Number.MIN_VALUE })(logits, draw);
        expect(logits[cold] === logits[best]).toBe(true); // 0 and -0 are equals here
      }),
    );
  });
});

describe('top-k', () => {
  it('keeps exactly k tokens, and they are the most probable', () => {
    fc.assert(
      fc.property(logitsOf(1), fc.integer({ min: 1, max: 45 }), (logits, topK) => {
        expect(reachable(logits, { topK })).toEqual(
          ranking(logits)
            .slice(0, topK)
            .sort((a, b) => a - b),
        );
      }),
      { numRuns: 60 },
    );
  });

  it('0 keeps all', () => {
    expect(reachable(Float32Array.from([1, 1, 1, 0]), { topK: 0 })).toEqual([0, 1, 2, 3]);
  });
});

describe('top-p', () => {
  it('keeps the fewest tokens that reach the mass, the most probable first', () => {
    fc.assert(
      fc.property(logitsOf(2), fc.double({ min: 0.01, max: 0.99, noNaN: true }), fc.nat(), (logits, topP, seed) => {
        const probabilities = softmax(logits);
        const order = ranking(logits);
        let [count, mass] = [0, 0];
        while (mass < topP - 1e-9) mass += probabilities[order[count++]];
        const sample = createSampler({ topP, seed });
        for (let draw = 0; draw < 50; draw++) {
          // One more may count where the sum meets p but for rounding.
          const rank = order.indexOf(sample(logits, draw));
          expect(rank).toBeLessThan(Math.abs(mass - topP) < 2e-9 ? count + 1 : count);
        }
      }),
    );
  });

  it('reaches every token of the set', () => {
    const logits = Float32Array.from([0.5, 0.2, 0.05, 0.25], Math.log);
    for (const [topP, tokens] of [
      [0.4, [0]],
      [0.6, [0, 3]],
      [0.74, [0, 3]],
      [0.76, [0, 1, 3]],
      [0.94, [0, 1, 3]],
      [0.96, [0, 1, 2, 3]],
      [1, [0, 1, 2, 3]],
    ] as const) {
      const seen = counts(logits, { topP, seed: 1 }).flatMap((count, token) => (count > 0 ? [token] : []));
      expect(seen, `top-p ${topP}`).toEqual(tokens);
    }
  });

  it('counts the mass of what top-k left, after the temperature', () => {
    const logits = Float32Array.from([0.4, 0.3, 0.2, 0.1], Math.log);
    const seen = (options: SamplingOptions) => counts(logits, options).filter((count) => count > 0).length;
    expect(seen({ topP: 0.65 })).toBe(2);
    expect(seen({ topP: 0.55, topK: 2 })).toBe(1); // 0.4 of 0.7 is 0.57
    expect(seen({ topP: 0.65, temperature: 100 })).toBe(3);
  });
});

describe('draws of a GPU', () => {
  it('are left to the host where the context is needed', () => {
    for (const options of [
      { repetitionPenalty: 1.5 },
      { frequencyPenalty: 1 },
      { presencePenalty: -1 },
      { logitBias: { 3: 1 } },
    ]) {
      expect(deviceDraws(options)).toBeNull();
      expect(isArgmax({ temperature: 0, ...options })).toBe(false);
    }
    expect(deviceDraws({ temperature: 0, logitBias: {} })?.isArgmax).toBe(true);
    expect(deviceDraws({ repetitionPenalty: 1, seed: 4, topK: 2 })?.settings(0)).toEqual([
      1,
      2,
      1,
      0,
      uniformOfDraw(4, 0),
    ]);
  });
});

describe('draws', () => {
  it('follow the distribution of the temperature', () => {
    const logits = Float32Array.from([1.5, -1, 0.25, 0.25, 3, -6]);
    for (const temperature of [0.5, 1, 2]) {
      const draws = 40_000;
      const expected = softmax(logits, temperature);
      const seen = counts(logits, { temperature, seed: 11 }, draws);
      let chiSquare = 0;
      for (const [token, share] of expected.entries())
        chiSquare += (seen[token] - share * draws) ** 2 / (share * draws);
      expect(chiSquare, `temperature ${temperature}`).toBeLessThan(20.5); // 99.9 % with 5 degrees of freedom
    }
  });

  it('are decided by the seed and the number of the draw alone', () => {
    fc.assert(
      fc.property(logitsOf(1), fc.maxSafeNat(), fc.nat(), (logits, seed, draw) => {
        const [once, again] = [createSampler({ seed }), createSampler({ seed })];
        again(logits, draw + 1);
        expect(again(logits, draw)).toBe(once(logits, draw));
      }),
    );
    const even = new Float32Array(1000);
    const tokens = (seed: number) => Array.from({ length: 8 }, (_, draw) => createSampler({ seed })(even, draw));
    expect(tokens(1)).not.toEqual(tokens(2));
    expect(tokens(1)).not.toEqual(tokens(1 + 2 ** 32));
    expect(new Set(tokens(1)).size).toBeGreaterThan(5);
  });

  it('never give a token that was ruled out', () => {
    const none = Number.NEGATIVE_INFINITY;
    const logits = Float32Array.from([none, 0, none, 0, none]);
    expect(reachable(logits, {})).toEqual([1, 3]);
    expect(reachable(logits, { topK: 4 })).toEqual([1, 3]);
    expect(reachable(logits, { topP: 0.999 })).toEqual([1, 3]);
  });

  it('stay the same from version to version', () => {
    const logits = Float32Array.from({ length: 100 }, (_, token) => ((token * 37) % 100) / 20);
    const sample = createSampler({ temperature: 0.8, topK: 40, topP: 0.9, seed: 1234 });
    expect(Array.from({ length: 8 }, (_, draw) => sample(logits, draw))).toMatchInlineSnapshot(`
      [
        94,
        27,
        89,
        51,
        81,
        5,
        5,
        51,
      ]
    `);
  });
});

describe('refusals', () => {
  it.each([
    [[0, Number.NaN], 'the logit of token 1 is NaN'],
    [[Number.POSITIVE_INFINITY, 0], 'the logit of token 0 is Infinity'],
    [[Number.NEGATIVE_INFINITY], 'none of 1 tokens has a finite logit'],
    [[], 'none of 0 tokens has a finite logit'],
  ])('logits %j', (values, message) => {
    for (const temperature of [0, 1]) {
      const sample = () => createSampler({ temperature })(Float32Array.from(values), 0);
      expect(sample).toThrow(UnusableLogits);
      expect(sample).toThrow(message);
      expect(sample).toThrow(expect.objectContaining({ exitCode: ExitCode.nonFinite }));
    }
  });

  it.each<[SamplingOptions, string]>([
    [{ temperature: -1 }, 'temperature: -1 is not allowed'],
    [{ temperature: Number.NaN }, 'temperature: NaN'],
    [{ temperature: Number.POSITIVE_INFINITY }, 'temperature: Infinity'],
    [{ topK: -1 }, 'top-k: -1'],
    [{ topK: 1.5 }, 'top-k: 1.5'],
    [{ topP: 0 }, 'top-p: 0'],
    [{ topP: 1.1 }, 'top-p: 1.1'],
    [{ seed: -1 }, 'seed: -1'],
    [{ seed: 2 ** 53 }, 'seed: 9007199254740992'],
  ])('options %j', (options, message) => {
    expect(() => createSampler(options)).toThrow(UsageError);
    expect(() => createSampler(options)).toThrow(message);
  });
});

describe('min-p', () => {
  it('keeps the tokens at least that share as probable as the best', () => {
    fc.assert(
      fc.property(logitsOf(1), fc.double({ min: 0.01, max: 1, noNaN: true }), (logits, minP) => {
        const probabilities = softmax(logits);
        const limit = minP * Math.max(...probabilities);
        for (let draw = 0; draw < 50; draw++)
          expect(probabilities[createSampler({ minP })(logits, draw)]).toBeGreaterThanOrEqual(limit * (1 - 1e-6));
      }),
    );
    const logits = Float32Array.of(0, Math.log(2), Math.log(4), Math.log(8));
    expect(counts(logits, { minP: 0.4 }).map((count) => count > 0)).toEqual([false, false, true, true]);
    expect(counts(logits, { minP: 0.2 }).map((count) => count > 0)).toEqual([false, true, true, true]);
    expect(counts(logits, { minP: 1 })).toEqual([0, 0, 0, DRAWS]);
    expect(counts(logits, { minP: 0 })).toEqual(counts(logits, {}));
  });
});

describe('the penalty of repetition', () => {
  const logits = Float32Array.of(3, 2, -1, -2);

  it('divides positive logits of the context and multiplies negative ones', () => {
    const greedy = (repetitionPenalty: number, seen: number[]) =>
      createSampler({ temperature: 0, repetitionPenalty })(logits, 0, seen);
    expect(greedy(2, [])).toBe(0);
    expect(greedy(1.4, [0])).toBe(0); // 2.14 against 2
    expect(greedy(1.6, [0])).toBe(1); // 1.875 against 2
    expect(greedy(1.6, [0, 0, 0, 1])).toBe(0); // a token counts once
    expect(greedy(0.5, [1])).toBe(1); // below 1 it favours them
    const low = Float32Array.of(-1, -1.5);
    expect(createSampler({ temperature: 0, repetitionPenalty: 2 })(low, 0, [0])).toBe(1);
  });

  it('leaves the logits it was given as they were', () => {
    createSampler({ repetitionPenalty: 3 })(logits, 0, [0, 1, 2]);
    expect(logits).toEqual(Float32Array.of(3, 2, -1, -2));
  });

  it.each<[SamplingOptions, string]>([
    [{ minP: -0.1 }, 'min-p: -0.1'],
    [{ minP: 1.1 }, 'min-p: 1.1'],
    [{ repetitionPenalty: 0 }, 'repetition-penalty: 0'],
    [{ repetitionPenalty: Number.POSITIVE_INFINITY }, 'repetition-penalty: Infinity'],
  ])('refuses %j', (options, message) => {
    expect(() => createSampler(options)).toThrow(UsageError);
    expect(() => createSampler(options)).toThrow(message);
  });
});

describe('biases, frequency and presence penalty', () => {
  /** The token that the formulas of docs/explain/decoding.md give, in float64; -1 where two are too close to tell. */
  function reference(
    logits: Float32Array,
    draw: number,
    { seen, counts }: { seen: readonly number[]; counts: ReadonlyMap<number, number> },
    options: Required<Pick<SamplingOptions, 'frequencyPenalty' | 'presencePenalty' | 'repetitionPenalty' | 'seed'>> & {
      logitBias: Readonly<Record<string, number>>;
    },
  ): number {
    const changed = Array.from(logits, (logit, token) => {
      const bias = options.logitBias[token] ?? 0;
      let value = bias === -100 ? Number.NEGATIVE_INFINITY : logit + bias;
      if (seen.includes(token))
        value = value > 0 ? value / options.repetitionPenalty : value * options.repetitionPenalty;
      const count = counts.get(token) ?? 0;
      return value - count * options.frequencyPenalty - (count > 0 ? 1 : 0) * options.presencePenalty;
    });
    const best = Math.max(...changed);
    const weights = changed.map((value) => Math.exp(value - best));
    let rest = uniformOfDraw(options.seed, draw) * weights.reduce((sum, weight) => sum + weight, 0);
    for (const [token, weight] of weights.entries()) {
      rest -= weight;
      if (Math.abs(rest) < 1e-4) return -1;
      if (rest < 0) return token;
    }
    return -1;
  }

  it('give the tokens of the formulas', () => {
    let compared = 0;
    const shift = fc.double({ min: -2, max: 2, noNaN: true });
    const token = fc.nat(39);
    const biases = fc.dictionary(
      token.map(String),
      fc.oneof(fc.constant(-100), fc.double({ min: -99, max: 100, noNaN: true })),
      {
        maxKeys: 8,
      },
    );
    const drawn = fc.array(token, { maxLength: 12 });
    fc.assert(
      fc.property(
        logitsOf(40),
        shift,
        shift,
        biases,
        drawn,
        fc.nat(),
        (logits, frequencyPenalty, presencePenalty, logitBias, text, seed) => {
          const options = { frequencyPenalty, presencePenalty, logitBias, repetitionPenalty: 1.2, seed };
          const counts = new Map(text.map((one) => [one, text.filter((other) => other === one).length]));
          const seen = [...text, 3];
          const expected = reference(logits, 5, { seen, counts }, options);
          if (expected < 0) return;
          compared += 1;
          expect(createSampler(options)(logits, 5, seen, counts)).toBe(expected);
        },
      ),
    );
    expect(compared).toBeGreaterThan(80);
  });

  it('a ban holds, unless it leaves nothing', () => {
    const logits = Float32Array.of(3, 2, 1);
    expect(reachable(logits, { logitBias: { 0: -100 } })).toEqual([1, 2]);
    const masked = Float32Array.of(3, Number.NEGATIVE_INFINITY, Number.NEGATIVE_INFINITY);
    expect(createSampler({ logitBias: { 0: -100, 1: 100 } })(masked, 0)).toBe(0);
  });

  it('leave the logits they were given as they were', () => {
    const logits = Float32Array.of(3, 2, 1);
    createSampler({ logitBias: { 0: 5 }, frequencyPenalty: 1 })(logits, 0, [], new Map([[1, 2]]));
    expect(logits).toEqual(Float32Array.of(3, 2, 1));
  });

  it.each<[SamplingOptions, string]>([
    [{ frequencyPenalty: 2.1 }, 'frequency-penalty: 2.1 is not allowed'],
    [{ presencePenalty: Number.NaN }, 'presence-penalty: NaN'],
    [{ logitBias: { a: 1 } }, 'logit-bias: "a" is not a token id'],
    [{ logitBias: { 1: 101 } }, 'logit-bias: 101 is not allowed'],
  ])('refuse %j', (options, message) => expect(() => createSampler(options)).toThrow(message));
});
