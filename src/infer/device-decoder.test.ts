/** Decoding by replaying a graph against reading everything again: on a GPU, in bf16. */
import { afterAll, describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { type CachedSequence, cacheBytes, DecodeCache, predictedReads } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { cpu, cuda } from '../testing/devices.js';
import { relativeError } from '../testing/numbers.js';
import { lastLogits } from './context-reader.js';
import { prefill } from './decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';
import { generate } from './generate.js';
import { StepReplay, selectionMargin, selectionOf, type TokenSelection } from './testing/step-replay.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

const absence = cudaAbsence();
const onGpu = (name: string, body: () => void | Promise<void>) =>
  it(name, async (context) => {
    if (absence) return context.skip(absence);
    await body();
  });

type Sections = NonNullable<Parameters<typeof tinyConfig>[0]>;
/** A shape that the fused step takes, with more blocks than slots after 160 tokens. */
const MODEL = { dim: 64, n_heads: 4, n_kv_groups: 2, d_k: 32, d_v: 32 };
const NSA = { l: 8, d: 4, l_sel: 32, n_sel: 5, w: 50 };
/** Small models: the fused kernels of a prefill would take longer to compile than everything else here. */
const PLAIN = { fusedFrom: Number.POSITIVE_INFINITY };
/** bf16 rounds every layer's result; two ways that select the same blocks agree so far. */
const LIMIT = 5e-2;
/** One way against float64 with the blocks that it selected. */
const EXACT = 3e-2;
/**
 * A block may be preferred to one that scores less than so much more in float64: what rounding of the layers below does to
 * scores. Blocks that are picked without regard to scores differ by any part: see 'can tell'.
 */
const TIE = 0.05;

const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

function configOf({ model, nsa }: Sections = {}) {
  return tinyConfig({ model: { ...MODEL, ...model }, nsa: { ...NSA, ...nsa } });
}

function made(sections: Sections = {}): LanguageModel {
  const model = tinyModel(configOf(sections), 256, 5, { device: cuda(), dtype: 'bf16' });
  models.push(model);
  lastLogits(model, [1], PLAIN);
  return model;
}

function text(length: number, seed = 1): number[] {
  return Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);
}

function withDecoder(
  model: LanguageModel,
  body: (decoder: DeviceDecoder, make: () => CachedSequence, cache: DecodeCache) => void,
  options: ConstructorParameters<typeof DeviceDecoder>[2] = {},
): void {
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  const decoder = new DeviceDecoder(model, cache, options);
  const sequences: CachedSequence[] = [];
  const before = model.device.pool.bytesInUse;
  body(
    decoder,
    () => {
      const sequence = cache.sequence();
      sequences.push(sequence);
      return sequence;
    },
    cache,
  );
  decoder.free();
  for (const sequence of sequences) sequence.free();
  expect(cache.bytes).toBe(0);
  expect(model.device.pool.bytesInUse).toBe(before);
}

const VARIANTS: Record<string, Sections> = {
  avg: {},
  conv: { nsa: { phi: 'conv', cmp_rope: 'before', gate: 'sigmoid' } },
  'scaled positions, tied, swiglu': { model: { rope_scale: 2, tie_embeddings: true, mlp: 'swiglu' } },
  'no rotation of compressed keys, 6 heads a group': { model: { n_heads: 12, d_k: 64 }, nsa: { cmp_rope: 'none' } },
  'compressed branch alone': { nsa: { force_branch: 'cmp' } },
  'selected branch alone': { nsa: { force_branch: 'sel' } },
  'every block': { nsa: { n_sel: 20 } },
  dense: { model: { attention: 'dense' } },
};

/** What each token of a prompt selected while it was read, and the logits after the last. */
function readPrompt(model: LanguageModel, tokens: readonly number[], sequence: CachedSequence) {
  const { n_layers, n_kv_groups, nsa } = model.shape;
  const layers: Int32Array[] = [];
  const observer = {
    selected: (layer: number, selected: { read(): ArrayLike<number> }) => {
      layers[layer] = Int32Array.from(selected.read());
    },
  };
  const [logits] = prefill(model, [sequence], [tokens], null, { kernels: PLAIN, observer });
  const size = n_kv_groups * nsa.n_sel;
  const selections = tokens.map((_, t): TokenSelection => {
    const all = Int32Array.from(layers.flatMap((layer) => Array.from(layer.subarray(t * size, (t + 1) * size))));
    return selectionOf(all, [n_layers, 1, n_kv_groups, nsa.n_sel], 0);
  });
  return { logits, selections };
}

/** What the step that was launched last selected for one of its sequences. */
function selectionOfStep(decoder: DeviceDecoder, row: number): TokenSelection {
  const { selected } = decoder.step!;
  return selectionOf(selected.read(), selected.shape, row);
}

/** Compares one sequence with float64 token by token, and keeps the largest error and near tie. */
class Comparison {
  error = 0;
  margin = 0;
  readonly #replay: StepReplay;

  constructor(replay: StepReplay) {
    this.#replay = replay;
  }

  /** Without `logits` the token is only read. */
  next(token: number, selection: TokenSelection, where: string, logits: ArrayLike<number> | null): void {
    const exact = this.#replay.next(token, selection);
    expect(exact.margin, `${where}: a block was preferred that scores less by this part`).toBeLessThan(TIE);
    this.margin = Math.max(this.margin, exact.margin);
    if (!logits) return;
    const error = relativeError(logits, exact.logits);
    expect(error, where).toBeLessThan(EXACT);
    this.error = Math.max(this.error, error);
  }

  fork(): Comparison {
    return new Comparison(this.#replay.fork());
  }
}

function say(name: string, comparisons: readonly Comparison[]): void {
  const most = (of: (comparison: Comparison) => number) => Math.max(...comparisons.map(of)).toExponential(1);
  console.log(`${name}: error ${most(({ error }) => error)}, near ties within ${most(({ margin }) => margin)}`);
}

const CHECKED = [31, 32, 63, 64, 65, 127, 128, 160, 161, 192, 329];

describe('a graph for every token', () => {
  for (const [name, sections] of Object.entries(VARIANTS))
    onGpu(`gives the logits of a prefill: ${name}`, () => {
      const model = made(sections);
      expect(deviceDecoderRefusal(model)).toBeNull();
      const isDense = model.shape.attention === 'dense';
      const tokens = text(330);
      const comparisons: Comparison[] = [];
      withDecoder(model, (_decoder, make) => {
        const whole = isDense ? null : readPrompt(model, tokens, make()).selections;
        for (const split of [1, 7, 32, 63, 64, 150, 200])
          withDecoder(model, (decoder, makeOther) => {
            const sequence = makeOther();
            const comparison = isDense ? null : new Comparison(new StepReplay(model));
            if (comparison) comparisons.push(comparison);
            /** The same blocks as in a prefill of everything, so far. */
            let isSame = true;
            const see = (at: number, selection: TokenSelection, logits: ArrayLike<number> | null) => {
              comparison?.next(tokens[at], selection, `split ${split}, token ${at}`, logits);
              isSame &&= JSON.stringify(selection) === JSON.stringify(whole?.[at]);
            };
            const prompt = tokens.slice(0, split);
            if (isDense) prefill(model, [sequence], [prompt], null, { kernels: PLAIN });
            else {
              const { logits, selections } = readPrompt(model, prompt, sequence);
              selections.forEach((selection, at) => {
                see(at, selection, at === split - 1 ? logits : null);
              });
            }
            for (let at = split; at < tokens.length; at++) {
              decoder.launch([sequence], [tokens[at]]);
              const isChecked = at < split + 3 || CHECKED.includes(at);
              const logits = isChecked ? decoder.logits()[0].slice() : null;
              if (!isDense) see(at, selectionOfStep(decoder, 0), logits);
              if (!logits || !isSame) continue;
              const prefilled = lastLogits(model, tokens.slice(0, at + 1), PLAIN);
              expect(relativeError(logits, prefilled), `split ${split}, token ${at}, prefill`).toBeLessThan(LIMIT);
            }
            expect(sequence.length).toBe(tokens.length);
          });
      });
      if (!isDense) say(name, comparisons);
    });

  onGpu('of a batch equals each sequence alone, and launching every kernel equals the replay', () => {
    const model = made();
    const prompts = [1, 30, 64, 200, 131].map((length, i) => text(length, i + 1));
    const steps = 40;
    const tokenAt = (i: number, row: number) => (i * 37 + row * 11) % 256;
    const run = (rows: readonly number[], graph: boolean) => {
      const results: Float32Array[][] = [];
      const selections: TokenSelection[][] = rows.map(() => []);
      withDecoder(
        model,
        (decoder, make) => {
          const sequences = rows.map((row, i) => {
            const sequence = make();
            selections[i].push(...readPrompt(model, prompts[row], sequence).selections);
            return sequence;
          });
          for (let i = 0; i < steps; i++) {
            decoder.launch(
              sequences,
              rows.map((row) => tokenAt(i, row)),
            );
            results.push(decoder.logits().map((logits) => logits.slice()));
            rows.forEach((_, at) => {
              selections[at].push(selectionOfStep(decoder, at));
            });
          }
        },
        { graph },
      );
      return { results, selections };
    };
    const all = prompts.map((_, row) => row);
    const together = run(all, true);
    expect(run(all, false)).toEqual(together);
    const comparisons: Comparison[] = [];
    const compare = (row: number, selections: readonly TokenSelection[], results: readonly Float32Array[]) => {
      const comparison = new Comparison(new StepReplay(model));
      comparisons.push(comparison);
      selections.forEach((selection, at) => {
        const step = at - prompts[row].length;
        const token = step < 0 ? prompts[row][at] : tokenAt(step, row);
        comparison.next(token, selection, `row ${row}, token ${at}`, step < 0 ? null : results[step]);
      });
    };
    for (const row of all) {
      const alone = run([row], true);
      const own = together.results.map((logits) => logits[row]);
      compare(row, together.selections[row], own);
      compare(
        row,
        alone.selections[0],
        alone.results.map(([logits]) => logits),
      );
      let isSame = true;
      alone.results.forEach(([logits], i) => {
        const at = prompts[row].length + i;
        isSame &&= JSON.stringify(alone.selections[0][at]) === JSON.stringify(together.selections[row][at]);
        if (isSame) expect(relativeError(logits, own[i]), `row ${row}, step ${i}`).toBeLessThan(LIMIT);
      });
    }
    say('batch', comparisons);
  });

  onGpu('equals itself without overlap, bit for bit', () => {
    const model = made();
    const run = (overlap: boolean) => {
      const tokens: number[] = [];
      withDecoder(
        model,
        (decoder, make) => {
          const sequences = [make(), make()];
          prefill(model, sequences, [text(100), text(40, 3)], null, { kernels: PLAIN });
          decoder.launch(sequences, [1, 2]);
          for (let i = 0; i < 120; i++) {
            tokens.push(...decoder.next());
            decoder.launch(sequences);
          }
        },
        { overlap },
      );
      return tokens;
    };
    expect(run(true)).toEqual(run(false));
  });

  onGpu('follows forks, which leave each other alone, and sequences that drop out', () => {
    const model = made();
    const prefix = text(90);
    withDecoder(model, (decoder, make) => {
      const trunk = make();
      const stem = new Comparison(new StepReplay(model));
      readPrompt(model, prefix, trunk).selections.forEach((selection, at) => {
        stem.next(prefix[at], selection, `prefix, token ${at}`, null);
      });
      const branch = trunk.fork();
      const other = stem.fork();
      const [left, right] = [text(30, 3), text(30, 4)];
      left.forEach((token, i) => {
        decoder.launch([trunk, branch], [token, right[i]]);
        const [a, b] = decoder.logits();
        stem.next(token, selectionOfStep(decoder, 0), `left, token ${i}`, a);
        other.next(right[i], selectionOfStep(decoder, 1), `right, token ${i}`, b);
      });
      decoder.launch([branch], [9]);
      const [last] = decoder.logits();
      other.next(9, selectionOfStep(decoder, 0), 'right alone', last);
      say('forks', [stem, other]);
      branch.free();
    });
  });

  onGpu('reads and remembers what was predicted', () => {
    const model = made();
    withDecoder(model, (decoder, make, cache) => {
      const sequence = make();
      prefill(model, [sequence], [text(5)], null, { kernels: PLAIN });
      for (let S = 6; S <= 400; S++) {
        decoder.launch([sequence], [S % 256]);
        expect(cache.bytes).toBe(cacheBytes(model.shape, model.device, S, 'bf16'));
        if (S % 32 !== 0) continue;
        const reads = decoder.step!.reads.read();
        for (let i = 0; i < reads.length; i += 3) {
          const all = reads[i] + reads[i + 1] + reads[i + 2];
          if (S >= NSA.n_sel * NSA.l_sel) expect(all).toBe(predictedReads(model.shape, S));
          else expect(all).toBeLessThanOrEqual(predictedReads(model.shape, S));
        }
      }
    });
  });

  onGpu('greedy text equals the slow loop but for near ties', async () => {
    const config = configOf();
    const model = made();
    const tokenizer = createTokenizer('byte');
    const stream = generate({ model, tokenizer, config }, 'Once', {
      maxNewTokens: 200,
      sampling: { temperature: 0 },
    });
    let result = await stream.next();
    while (!result.done) result = await stream.next();
    const context = [...Buffer.from('Once')];
    for (const token of result.value.tokens) {
      const logits = lastLogits(model, context, PLAIN);
      const spread = Math.max(...logits) - Math.min(...logits);
      expect(logits[token]).toBeGreaterThan(Math.max(...logits) - LIMIT * spread);
      context.push(token);
    }
    expect(result.value.tokens.length).toBeGreaterThan(20);
  });
});

describe('the comparison with float64', () => {
  const score = [0.9, 0.5, 0.1, 0.48, 0.3, 0.7, 0.2, 0.6];
  it('can tell a near tie from another selection', () => {
    expect(selectionMargin(score, [0, 1, 5, 6, 7])).toBe(0);
    expect(selectionMargin(score, [0, 3, 5, 6, 7])).toBeCloseTo(0.04);
    expect(selectionMargin(score, [0, 2, 5, 6, 7])).toBeCloseTo(0.8);
    expect(selectionMargin(score, [0, 1, 4, 6, 7])).toBeGreaterThan(TIE);
    expect(selectionMargin(score, [1, 3, 5, 6, 7])).toBe(Number.POSITIVE_INFINITY); // block 0 is forced
    expect(selectionMargin(score, [0, 1, 6, 7, -1])).toBe(Number.POSITIVE_INFINITY); // one is missing
    expect(selectionMargin([0.5, 0.2], [0, 1, -1, -1, -1])).toBe(0);
  });

  it('is that of the model on the CPU where every block is selected', () => {
    const model = tinyModel(configOf({ nsa: { n_sel: 20 } }));
    models.push(model);
    const tokens = text(70);
    const replay = new StepReplay(model);
    tokens.forEach((token, at) => {
      const blocks = Array.from({ length: 20 }, (_, j) => (j <= at / NSA.l_sel ? j : -1));
      const { logits, margin } = replay.next(token, [
        [blocks, blocks],
        [blocks, blocks],
      ]);
      expect(margin).toBe(0);
      if (at % 23 !== 0) return;
      const wanted = lastLogits(model, tokens.slice(0, at + 1), PLAIN);
      expect(relativeError(logits, wanted), `token ${at}`).toBeLessThan(EXACT);
      // A wrong token, position or block would be seen.
      expect(relativeError(logits, lastLogits(model, [...tokens.slice(0, at), token + 1], PLAIN))).toBeGreaterThan(0.3);
    });
  });
});

describe('models that it refuses', () => {
  it('the CPU', () => {
    const model = tinyModel(configOf());
    models.push(model);
    expect(cpu().kind).toBe('cpu');
    expect(deviceDecoderRefusal(model)).toBe('cpu records no graphs');
  });

  onGpu('fp32, phi mlp, small heads', () => {
    const refusal = (sections: Sections, dtype: 'f32' | 'bf16' = 'bf16') => {
      const model = tinyModel(configOf(sections), 256, 5, { device: cuda(), dtype });
      models.push(model);
      return deviceDecoderRefusal(model);
    };
    expect(refusal({}, 'f32')).toBe('the fused step computes in bf16, not in f32');
    expect(refusal({ nsa: { phi: 'mlp' } })).toBe('phi mlp is not fused');
    expect(refusal({ model: { d_k: 16 } })).toContain('d_k 16');
  });
});
