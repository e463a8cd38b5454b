import { setImmediate } from 'node:timers/promises';
import { afterAll, describe, expect, it } from 'vitest';
import { UsageError } from '../errors.js';
import { type CachedSequence, DecodeCache, predictedReads } from '../model/cache.js';
import type { LanguageModel } from '../model/language-model.js';
import { cacheBytes } from '../testing/cache-bytes.js';
import { devices, type TestDevice } from '../testing/devices.js';
import { relativeError } from '../testing/numbers.js';
import { expectSameForAnyThreadCount } from '../testing/same-bytes.js';
import { lastLogits, prefill, prefillTile, readTokens } from './decode.js';
import { tinyConfig, tinyModel } from './testing/tiny-model.js';

/** How far logits may be apart on a GPU, where a step adds up in another order than a prefill, and may select another block. */
const LIMIT = { f32: 1e-4, bf16: 6e-2 };

const models: LanguageModel[] = [];
afterAll(() => {
  for (const model of models) model.free();
});

function made(sections: Parameters<typeof tinyConfig>[0] = {}, on?: TestDevice): LanguageModel {
  const place = on ? { device: on.device(), dtype: on.dtype } : {};
  const model = tinyModel(tinyConfig(sections), 256, 5, place);
  models.push(model);
  if (on) lastLogits(model, [1]); // rounded copies of the weights are made at their first use
  return model;
}

/** The same bits on the CPU, near enough on a GPU. */
function expectSame(model: LanguageModel, actual: readonly Float32Array[], expected: readonly Float32Array[]): void {
  if (model.device.kind === 'cpu') {
    expect(actual).toEqual(expected);
    return;
  }
  expect(actual).toHaveLength(expected.length);
  actual.forEach((logits, i) => {
    expect(relativeError(logits, expected[i]), `logits ${i}`).toBeLessThan(LIMIT[model.dtype]);
  });
}

function text(length: number, seed = 1): number[] {
  return Array.from({ length }, (_, i) => (i * i * 7 + i * 91 * seed + seed) % 256);
}

/** Runs `body` with sequences that are freed after it, and checks that nothing is left of the cache. */
function withCache<T>(model: LanguageModel, body: (make: () => CachedSequence, cache: DecodeCache) => T): T {
  const { device, shape, dtype } = model;
  const before = device.pool.bytesInUse;
  const cache = new DecodeCache(device, shape, dtype);
  const sequences: CachedSequence[] = [];
  const result = body(() => {
    const sequence = cache.sequence();
    sequences.push(sequence);
    return sequence;
  }, cache);
  for (const sequence of sequences) sequence.free();
  expect(cache.bytes).toBe(0);
  expect(device.pool.bytesInUse).toBe(before);
  return result;
}

/** Logits after every token from `split` on: the first `split` tokens at once, the others one by one. */
function decoded(model: LanguageModel, tokens: readonly number[], split: number): Float32Array[] {
  return withCache(model, (make) => {
    const sequence = make();
    const logits = prefill(model, [sequence], [tokens.slice(0, split)]);
    for (const token of tokens.slice(split)) logits.push(...readTokens(model, [sequence], [[token]]));
    expect(sequence.length).toBe(tokens.length);
    return logits;
  });
}

const variants = {
  avg: {},
  conv: { nsa: { phi: 'conv', cmp_rope: 'before' } },
  mlp: { nsa: { phi: 'mlp', cmp_rope: 'none', gate: 'sigmoid' } },
  'scaled positions, tied, swiglu': { model: { rope_scale: 2, tie_embeddings: true, mlp: 'swiglu' } },
  'h = 1, odd values': { model: { n_kv_groups: 4, d_v: 5 } },
  dense: { model: { attention: 'dense' } },
};

/** Around the first token, blocks of both kinds and the window; all for one model. */
const SPLITS = [1, 2, 4, 5, 8, 9, 16, 17, 35];
const EVERY_SPLIT = Array.from({ length: 36 }, (_, i) => i + 1);

describe.each(devices())('prefill and decode on $name', (on) => {
  it.each(Object.entries(variants))(
    'equal a prefill of the whole at every split (bit for bit on the CPU): %s',
    async (name, sections) => {
      const model = made(sections, on);
      const tokens = text(37);
      const whole = tokens.map((_, i) => lastLogits(model, tokens.slice(0, i + 1)));
      for (const split of name === 'avg' ? EVERY_SPLIT : SPLITS) {
        expectSame(model, decoded(model, tokens, split), whole.slice(split - 1));
        await setImmediate(); // the model blocks; let the runner speak
      }
    },
  );

  const long = { 'wide window': { l: 4, d: 2, w: 200 }, 'many blocks': { l: 2, d: 1, n_sel: 7, l_sel: 4, w: 130 } };
  it.each(Object.entries(long))('equal it across the edges of pages and windows: %s', async (_, nsa) => {
    const model = made({ nsa }, on);
    const tokens = text(420);
    const known = new Map<number, Float32Array>();
    const whole = (length: number) => {
      const logits = known.get(length) ?? lastLogits(model, tokens.slice(0, length));
      known.set(length, logits);
      return logits;
    };
    for (const split of [1, 127, 128, 129, 200, 201, 256, 257, 300]) {
      const got = decoded(model, tokens, split);
      for (const at of [split, split + 1, 128, 129, 130, 255, 256, 257, 258, 300, 384, 385, 420])
        if (at >= split) expectSame(model, [got[at - split]], [whole(at)]);
      await setImmediate();
    }
  });

  /** Rounding to bf16 turns some near ties of the second layer round. */
  const expectSelected = (actual: number[][], expected: number[][]) => {
    if (on.dtype === 'f32') expect(actual).toEqual(expected);
    const apart = actual.flat().filter((block, i) => block !== expected.flat()[i]).length;
    expect(apart).toBeLessThan(0.1 * actual.flat().length);
  };

  it('select what a prefill selects', () => {
    const model = made({}, on);
    const tokens = text(90);
    const selections = (run: (observer: { selected(layer: number, selected: { read(): unknown }): void }) => void) => {
      const all: number[][] = [[], []];
      run({ selected: (layer, selected) => all[layer].push(...(selected.read() as Int32Array)) });
      return all;
    };
    const whole = selections((observer) =>
      withCache(model, (make) => readTokens(model, [make()], [tokens], { observer })),
    );
    const steps = selections((observer) =>
      withCache(model, (make) => {
        const sequence = make();
        for (const token of tokens) readTokens(model, [sequence], [[token]], { observer });
      }),
    );
    expect(whole[0]).toHaveLength(90 * 2 * 3);
    expectSelected(steps, whole);
    // Not only the forced blocks 0, cur-1 and cur: this model has no free slot, the next one has two.
    const wide = made({ nsa: { n_sel: 5 } }, on);
    const free = selections((observer) =>
      withCache(wide, (make) => prefill(wide, [make()], [tokens], 7, { observer })),
    );
    const wanted = selections((observer) =>
      withCache(wide, (make) => prefill(wide, [make()], [tokens], null, { observer })),
    );
    expectSelected(free, wanted);
    expect(new Set(wanted[1].filter((_, i) => i % 5 === 1)).size).toBeGreaterThan(3);
  });

  it.each([1, 2, 5, 16, 128, 1000])('in tiles of %i tokens', (tile) => {
    const model = made({ nsa: { w: 140 } }, on);
    const tokens = text(150);
    const [logits] = withCache(model, (make) => prefill(model, [make()], [tokens], tile));
    expectSame(model, [logits], [lastLogits(model, tokens)]);
  });

  it('of a batch equal those of each sequence alone', () => {
    const model = made({}, on);
    const lengths = [1, 3, 9, 33, 60];
    const prompts = lengths.map((length, i) => text(length, i + 1));
    const next = [4, 90, 17, 200, 3, 65];
    for (const tile of [null, 4])
      withCache(model, (make) => {
        const sequences = prompts.map(make);
        expectSame(
          model,
          prefill(model, sequences, prompts, tile),
          prompts.map((prompt) => lastLogits(model, prompt)),
        );
        next.forEach((token, i) => {
          // Every other sequence rests now and then, so that they grow apart.
          const rows = sequences.flatMap((_, row) => (i % 2 === 0 || row % 2 === 0 ? [row] : []));
          const logits = readTokens(
            model,
            rows.map((row) => sequences[row]),
            rows.map((row) => [token + row]),
          );
          rows.forEach((row, at) => {
            prompts[row] = [...prompts[row], token + row];
            expectSame(model, [logits[at]], [lastLogits(model, prompts[row])]);
          });
        });
      });
  });
});

describe.each(devices())('a fork on $name', (on) => {
  it('equals reading everything again, and leaves the other untouched', () => {
    const model = made({ nsa: { w: 20 } }, on);
    const prefix = text(45);
    const [left, right] = [text(30, 3), text(30, 4)];
    withCache(model, (make) => {
      const trunk = make();
      prefill(model, [trunk], [prefix]);
      const branch = trunk.fork();
      left.forEach((token, i) => {
        const [a, b] = readTokens(model, [trunk, branch], [[token], [right[i]]]);
        expectSame(model, [a], [lastLogits(model, [...prefix, ...left.slice(0, i + 1)])]);
        expectSame(model, [b], [lastLogits(model, [...prefix, ...right.slice(0, i + 1)])]);
      });
      branch.free();
    });
  });

  it('shares all pages until one of the two writes, and then copies the last of each kind', () => {
    const model = made({}, on);
    withCache(model, (make, cache) => {
      const trunk = make();
      prefill(model, [trunk], [text(1003)]);
      const before = cache.bytes;
      const branches = Array.from({ length: 10 }, () => trunk.fork());
      expect(cache.bytes).toBe(before);
      readTokens(model, [branches[0]], [[5]]);
      expect(cache.bytes - before).toBeGreaterThan(0);
      expect(cache.bytes - before).toBeLessThan(cacheBytes(model.shape, model.device, 8, model.dtype) + 1);
      for (const branch of branches) branch.free();
      expect(cache.bytes).toBe(before);
    });
  });

  it('outlives what it was forked from', () => {
    const model = made({}, on);
    withCache(model, (_make, cache) => {
      const trunk = cache.sequence();
      prefill(model, [trunk], [text(45)]);
      const branch = trunk.fork();
      trunk.free();
      expectSame(model, readTokens(model, [branch], [[7]]), [lastLogits(model, [...text(45), 7])]);
      branch.free();
    });
  });
});

describe.each(devices())('memory on $name', (on) => {
  it.each(['nsa', 'dense'])('is what was predicted at every length: %s', (attention) => {
    const model = made({ model: { attention }, nsa: { w: 150 } }, on);
    withCache(model, (make, cache) => {
      const sequence = make();
      for (let length = 1; length <= 400; length++) {
        readTokens(model, [sequence], [[length % 256]]);
        expect(cache.bytes).toBe(cacheBytes(model.shape, model.device, length, model.dtype));
      }
      const whole = make();
      prefill(model, [whole], [text(400)]);
      expect(cache.bytes).toBe(2 * cacheBytes(model.shape, model.device, 400, model.dtype));
    });
    expect(cacheBytes(model.shape, model.device, 0)).toBe(0);
  });
});

describe('prefill and decode on the CPU', () => {
  it('do not depend on the number of threads', () => {
    const model = made();
    const tokens = text(70);
    expectSameForAnyThreadCount(() =>
      decoded(model, tokens, 40).map(
        ({ buffer, byteOffset, byteLength }) => new Uint8Array(buffer, byteOffset, byteLength),
      ),
    );
  });
});

describe('reads', () => {
  it('are predicted by the formula of the definition', () => {
    const { shape } = made();
    const nsa = { ...shape.nsa, l: 32, d: 16, lSel: 64, nSel: 16, w: 512 };
    const predicted = (S: number) => predictedReads({ ...shape, nsa }, S);
    expect([1, 32, 512, 2048, 8192, 65536].map(predicted)).toEqual([1025, 1057, 1567, 1663, 2047, 5631]);
  });
});

describe.each(devices())('reads of a step on $name', (on) => {
  it('are counted where they happen: as predicted once every block is full, never more', () => {
    const model = made({ nsa: { n_sel: 4 } }, on);
    const { nsa } = model.shape;
    withCache(model, (make) => {
      const sequence = make();
      let [equal, below] = [0, 0];
      for (let S = 1; S <= 100; S++) {
        const measured: number[] = [];
        const observer = {
          reads: (_: number, { cmp, sel, win }: Record<'cmp' | 'sel' | 'win', { read(): ArrayLike<number> }>) => {
            for (let group = 0; group < 2; group++) {
              const blocks = Math.min(nsa.nSel, Math.ceil(S / nsa.lSel));
              const last = ((S - 1) % nsa.lSel) + 1;
              expect(sel.read()[group]).toBe((blocks - 1) * nsa.lSel + last);
              expect(win.read()[group]).toBe(Math.min(nsa.w, S));
              measured.push(cmp.read()[group] + sel.read()[group] + win.read()[group]);
            }
          },
        };
        // A first token is a prefill: attention over itself, outside the cache.
        readTokens(model, [sequence], [[S]], { observer });
        if (S === 1) continue;
        expect(measured).toHaveLength(4); // two layers, two groups
        for (const reads of measured) {
          expect(reads).toBeLessThanOrEqual(predictedReads(model.shape, S));
          if (reads === predictedReads(model.shape, S)) equal += 1;
          else below += 1;
        }
        if (S % nsa.lSel === 0 && S >= nsa.nSel * nsa.lSel)
          expect(new Set(measured)).toEqual(new Set([predictedReads(model.shape, S)]));
      }
      expect(equal).toBeGreaterThan(0);
      expect(below).toBeGreaterThan(0);
    });
  });
});

describe('settings', () => {
  it('runtime.prefill_tile', () => {
    const { runtime } = tinyConfig();
    expect(prefillTile({ runtime })).toBeNull();
    expect(prefillTile({ runtime: { ...runtime, prefill_tile: 64 } })).toBe(64);
  });

  it('one sequence cannot be twice in a step', () => {
    const model = made();
    withCache(model, (make) => {
      const sequence = make();
      expect(() => readTokens(model, [sequence, sequence], [[1], [2]])).toThrow('twice');
    });
  });
});

describe('slack', () => {
  it('counts the tokens that change no page', () => {
    const model = made({ nsa: { w: 150 } });
    withCache(model, (make, cache) => {
      const [slow, fast] = [make(), make()];
      let [left, steps] = [0, 0];
      for (let length = 0; length < 900; length++) {
        cache.reserve(slow);
        if (left === 0) {
          cache.reserve(fast);
          left = cache.slack(fast);
          expect(left).toBeGreaterThan(0);
          steps += 1;
          cache.grow(fast);
        } else fast.advance(1);
        left -= 1;
        cache.grow(slow);
        // Both hold as many pages after every token: none was needed, and none could be given back.
        expect(cache.bytes).toBe(2 * cacheBytes(model.shape, model.device, length + 1));
        expect(fast.length).toBe(slow.length);
      }
      expect(steps).toBeLessThan(400);
    });
  });

  it('ends before a page that a fork shares is written', () => {
    const model = made();
    /** Memory after every token that a fork of a sequence of `length` tokens gets, and how often room was asked for. */
    const fork = (length: number, isFast: boolean) =>
      withCache(model, (make, cache) => {
        const trunk = make();
        for (let i = 0; i < length; i++) {
          cache.reserve(trunk);
          cache.grow(trunk);
        }
        const branch = trunk.fork();
        const bytes: number[] = [];
        let [left, asked] = [0, 0];
        for (let i = 0; i < 40; i++) {
          if (left === 0) {
            cache.reserve(branch);
            asked += 1;
            left = isFast ? cache.slack(branch) : 1;
            cache.grow(branch);
          } else branch.advance(1);
          left -= 1;
          bytes.push(cache.bytes);
        }
        branch.free();
        return { bytes, asked };
      });
    for (let length = 1; length < 300; length += 7) {
      const [slow, fast] = [fork(length, false), fork(length, true)];
      expect(fast.bytes, `forked at ${length}`).toEqual(slow.bytes);
      expect(fast.asked).toBeLessThan(slow.asked);
    }
  });
});

describe('what cannot be read is refused with a usage error', () => {
  const model = made();

  it.each<[string, (make: () => CachedSequence) => unknown, string]>([
    ['no sequence', () => readTokens(model, [], []), 'give at least one cached sequence'],
    [
      'tokens for other sequences',
      (make) => readTokens(model, [make()], [[1], [2]]),
      '1 cached sequences were given tokens for 2',
    ],
    [
      'a sequence without a token',
      (make) => readTokens(model, [make(), make()], [[1], []]),
      'sequence 1 was given no token',
    ],
    ['an empty prompt', (make) => prefill(model, [make()], [[]]), 'prefill: prompt 0 is empty'],
    [
      'one prompt among others that is empty',
      (make) => prefill(model, [make(), make()], [[1], []]),
      'prompt 1 is empty',
    ],
    [
      'more prompts than sequences',
      (make) => prefill(model, [make()], [[1], [2]]),
      '1 cached sequences were given 2 prompts',
    ],
    ['a tile of nothing', (make) => prefill(model, [make()], [[1]], 0), 'a tile has at least one token, not 0'],
    ['no prompt', () => prefill(model, [], []), 'give at least one cached sequence'],
  ])('%s', (_, use, message) => {
    withCache(model, (make) => {
      expect(() => use(make)).toThrow(UsageError);
      expect(() => use(make)).toThrow(message);
    });
  });

  it('a sequence given twice, or of another cache', () => {
    withCache(model, (make) => {
      const sequence = make();
      expect(() => readTokens(model, [sequence, sequence], [[1], [2]])).toThrow('given twice: fork() it');
      withCache(model, (other) =>
        expect(() => readTokens(model, [sequence, other()], [[1], [2]])).toThrow('must belong to the same DecodeCache'),
      );
    });
  });

  it.each([{ model: { n_layers: 1 } }, { nsa: { w: 64 } }, { model: { attention: 'dense' } }])(
    'a cache made for another model: %j',
    (sections) => {
      const other = made(sections as Parameters<typeof tinyConfig>[0]);
      withCache(other, (make) =>
        expect(() => readTokens(model, [make()], [[1, 2]])).toThrow('the DecodeCache was made for another model'),
      );
    },
  );
});
