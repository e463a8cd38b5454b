/** Decoding by replaying a graph against reading everything again: on a GPU, in bf16. */
import { setImmediate } from 'node:timers/promises';
import { afterAll, describe, expect, it } from 'vitest';
import { createTokenizer } from '../data/tokenizer.js';
import { cudaAbsence } from '../device/cuda/cuda.js';
import type { Observer } from '../model/attention.js';
import { type CachedSequence, DecodeCache, predictedReads } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { Tape } from '../tensor/tape.js';
import { cacheBytes } from '../testing/cache-bytes.js';
import { cpu, cuda } from '../testing/devices.js';
import { relativeError } from '../testing/numbers.js';
import { lastLogits, prefill } from './decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from './device-decoder.js';
import { generate } from './generate.js';
import { Comparison } from './testing/comparison.js';
import { ReplayWeights, selectionOf, type TokenSelection } from './testing/step-replay.js';
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

async function withDecoder(
  model: LanguageModel,
  body: (decoder: DeviceDecoder, make: () => CachedSequence, cache: DecodeCache) => void | Promise<void>,
  options: ConstructorParameters<typeof DeviceDecoder>[2] = {},
): Promise<void> {
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  const decoder = new DeviceDecoder(model, cache, options);
  const sequences: CachedSequence[] = [];
  const before = model.device.pool.bytesInUse;
  await body(
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
  await setImmediate(); // everything before blocks; let the runner speak
}

const VARIANTS: Record<string, Sections> = {
  avg: {},
  conv: { nsa: { phi: 'conv', cmp_rope: 'before', gate: 'sigmoid' } },
  'scaled positions, tied, swiglu': { model: { rope_scale: 2, tie_embeddings: true, mlp: 'swiglu' } },
  'no rotation of compressed keys, 6 heads a group': { model: { n_heads: 12, d_k: 64 }, nsa: { cmp_rope: 'none' } },
  'positions in the window alone': { nsa: { rope: 'window', cmp_rope: 'none' } },
  'compressed branch alone': { nsa: { force_branch: 'cmp' } },
  'selected branch alone': { nsa: { force_branch: 'sel' } },
  'every block': { nsa: { n_sel: 20 } },
  dense: { model: { attention: 'dense' } },
};

/** The blocks that each of `count` tokens selects while `run` reads them. */
function selectionsOf(model: LanguageModel, count: number, run: (observer: Observer) => void): TokenSelection[] {
  const { nLayers, nKvGroups, nsa } = model.shape;
  const layers: Int32Array[] = [];
  run({
    selected: (layer, selected) => {
      layers[layer] = Int32Array.from(selected.read());
    },
  });
  const size = nKvGroups * nsa.nSel;
  return Array.from({ length: count }, (_, t): TokenSelection => {
    const all = Int32Array.from(layers.flatMap((layer) => Array.from(layer.subarray(t * size, (t + 1) * size))));
    return selectionOf(all, [nLayers, 1, nKvGroups, nsa.nSel], 0);
  });
}

/** A prompt goes into the cache: what each token selected, and the logits after the last. */
function readPrompt(model: LanguageModel, tokens: readonly number[], sequence: CachedSequence) {
  let logits: Float32Array[] = [];
  const selections = selectionsOf(model, tokens.length, (observer) => {
    logits = prefill(model, [sequence], [tokens], null, { kernels: PLAIN, observer });
  });
  return { logits: logits[0], selections };
}

/** All tokens at once, without a cache: what each selects, and the logits after it. */
function readWhole(model: LanguageModel, tokens: readonly number[]) {
  const { device, shape } = model;
  const tape = new Tape(device, { record: false });
  let all = new Float32Array();
  const selections = selectionsOf(model, shape.attention === 'dense' ? 0 : tokens.length, (observer) => {
    const ids = tape.from(tokens, [tokens.length], 'i32');
    const rows = tokens.map((_, row) => row);
    all = Float32Array.from(
      model.logits(tape, ids, rows, { lengths: [tokens.length], kernels: PLAIN, observer }).read(),
    );
  });
  tape.end();
  const width = all.length / tokens.length;
  return { selections, logitsAfter: (at: number) => all.subarray(at * width, (at + 1) * width) };
}

/** The blocks that the last launched step selected for one of its sequences. */
function selectionOfStep(decoder: DeviceDecoder, row: number): TokenSelection {
  const { selected } = decoder.step!;
  return selectionOf(selected.read(), selected.shape, row);
}

function say(name: string, comparisons: readonly Comparison[]): void {
  const most = (of: keyof Comparison['findings']) =>
    Math.max(...comparisons.map(({ findings }) => findings[of])).toPrecision(2);
  console.log(
    `${name}: errors up to ${most('error')}, ${most('ratio')} times those of rounding; ` +
      `near ties within ${most('margin')}, ${most('marginRatio')} times what rounding does`,
  );
}

const isEqual = (a: TokenSelection, b: TokenSelection | undefined) => JSON.stringify(a) === JSON.stringify(b);
const CHECKED = [31, 32, 63, 64, 65, 127, 128, 160, 161, 192, 329];
/** Tokens read at once before the others come one by one: all for one model, and for the other models the most different. */
const SPLITS = [1, 7, 32, 63, 64, 150, 200];
const FEW_SPLITS = [1, 63, 150];

describe('a graph for every token', () => {
  for (const [name, sections] of Object.entries(VARIANTS))
    onGpu(`gives the logits of a prefill: ${name}`, async () => {
      const model = made(sections);
      expect(deviceDecoderRefusal(model)).toBeNull();
      const isDense = model.shape.attention === 'dense';
      const tokens = text(330);
      const whole = readWhole(model, tokens);
      const weights = new ReplayWeights(model);
      const comparisons: Comparison[] = [];
      for (const split of name === 'avg' || isDense ? SPLITS : FEW_SPLITS)
        await withDecoder(model, (decoder, make) => {
          const sequence = make();
          const comparison = isDense ? null : new Comparison(weights);
          if (comparison) comparisons.push(comparison);
          /** The same blocks as in a prefill of everything, so far. */
          let isSame = true;
          const see = (at: number, selection: TokenSelection, logits: ArrayLike<number> | null) => {
            comparison?.next(tokens[at], selection, `split ${split}, token ${at}`, logits);
            isSame &&= isEqual(selection, whole.selections[at]);
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
            const logits = decoder.logits()[0].slice();
            if (!isDense) see(at, selectionOfStep(decoder, 0), logits);
            if (!isSame || !(at < split + 3 || CHECKED.includes(at))) continue;
            const error = relativeError(logits, whole.logitsAfter(at));
            expect(error, `split ${split}, token ${at}, prefill`).toBeLessThan(LIMIT);
          }
          expect(sequence.length).toBe(tokens.length);
          comparison?.finish(`split ${split}`);
        });
      if (!isDense) say(name, comparisons);
    });

  onGpu('of a batch equals each sequence alone, and launching every kernel equals the replay', async () => {
    const model = made();
    const weights = new ReplayWeights(model);
    const prompts = [1, 30, 64, 200, 131].map((length, i) => text(length, i + 1));
    const steps = 40;
    const tokenAt = (i: number, row: number) => (i * 37 + row * 11) % 256;
    const run = async (rows: readonly number[], graph: boolean) => {
      const results: Float32Array[][] = rows.map(() => []);
      const selections: TokenSelection[][] = rows.map(() => []);
      await withDecoder(
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
            decoder.logits().forEach((logits, at) => {
              results[at].push(logits.slice());
              selections[at].push(selectionOfStep(decoder, at));
            });
          }
        },
        { graph },
      );
      return rows.map((row, i) => ({ row, results: results[i], selections: selections[i] }));
    };
    type Run = Awaited<ReturnType<typeof run>>[number];
    const all = prompts.map((_, row) => row);
    const together = await run(all, true);
    expect(await run(all, false)).toEqual(together);
    const comparisons: Comparison[] = [];
    const compare = async ({ row, selections, results }: Run) => {
      const comparison = new Comparison(weights);
      comparisons.push(comparison);
      selections.forEach((selection, at) => {
        const step = at - prompts[row].length;
        const token = step < 0 ? prompts[row][at] : tokenAt(step, row);
        comparison.next(token, selection, `row ${row}, token ${at}`, step < 0 ? null : results[step]);
      });
      comparison.finish(`row ${row}`);
      await setImmediate();
    };
    for (const own of together) {
      await compare(own);
      const [alone] = await run([own.row], true);
      const different = alone.selections.findIndex((selection, at) => !isEqual(selection, own.selections[at]));
      if (different >= 0) await compare(alone); // a near tie
      const same = different < 0 ? steps : different - prompts[own.row].length;
      alone.results.slice(0, Math.max(0, same)).forEach((logits, i) => {
        expect(relativeError(logits, own.results[i]), `row ${own.row}, step ${i}`).toBeLessThan(LIMIT);
      });
    }
    say('batch', comparisons);
  });

  onGpu('equals itself without overlap, bit for bit', async () => {
    const model = made();
    const run = async (overlap: boolean) => {
      const tokens: number[] = [];
      await withDecoder(
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
    expect(await run(true)).toEqual(await run(false));
  });

  onGpu('follows forks, which leave each other alone, and sequences that drop out', async () => {
    const model = made();
    const prefix = text(90);
    await withDecoder(model, (decoder, make) => {
      const trunk = make();
      const stem = new Comparison(new ReplayWeights(model));
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
      stem.finish('left');
      other.finish('right');
      say('forks', [stem, other]);
      branch.free();
    });
  });

  onGpu('reads and remembers what was predicted', async () => {
    const model = made();
    await withDecoder(model, (decoder, make, cache) => {
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
    const { tokens } = result.value;
    const prompt = [...Buffer.from('Once')];
    const { logitsAfter } = readWhole(model, [...prompt, ...tokens]);
    tokens.forEach((token, i) => {
      const logits = logitsAfter(prompt.length - 1 + i);
      const spread = Math.max(...logits) - Math.min(...logits);
      expect(logits[token], `token ${i}`).toBeGreaterThan(Math.max(...logits) - LIMIT * spread);
    });
    expect(tokens.length).toBeGreaterThan(20);
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
