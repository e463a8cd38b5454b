/** The ruler `eval long`, judged by readers that must reach what they reach by construction. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { runCli } from '../../cli/testing/run.js';
import { createTokenizer } from '../../data/tokenizer.js';
import type { LoadedModel } from '../../infer/load.js';
import { saveTinyCheckpoint, tinyConfig, tinyModel } from '../../infer/testing/tiny-model.js';
import type { LanguageModel } from '../../model/language-model.js';
import { LocalHost } from '../../serve/host.js';
import { startServer } from '../../serve/server.js';
import { CHANCE, Haystack } from './cases.js';
import { evaluateLong, type LongCell, type LongGrid, type Reader } from './evaluate.js';
import { modelReader } from './model-reader.js';
import { serverReader } from './server-reader.js';
import { TASKS } from './tasks.js';

const tokenizer = createTokenizer('byte');
const text = Array.from(
  { length: 900 },
  (_, i) => `${'lorem ipsum dolor sit amet consectetur'.split(' ')[(i * i) % 6]}${i % 9 === 0 ? '.\n' : ''}`,
).join(' ');
const haystack = new Haystack(text, tokenizer, 'text');
const GRID: LongGrid = {
  ...{ tasks: TASKS, lengths: [1500, 4000], depths: [0, 50], trials: 40, seed: 3, window: 300, generate: true },
};

/** Knows the code words of every sentence in what it is given, as an index of all lines would. */
function lookUp(prompt: string, candidates: readonly string[]): number[] {
  const lines = prompt.split('\n');
  const question = lines.pop()!;
  const word = (name: string): string | undefined =>
    lines.map((line) => new RegExp(`^The code word of ${name} is (\\w+)\\.$`).exec(line)?.[1]).find(Boolean);
  const carried = (name: string): string | undefined => {
    for (const line of lines) {
      const own = new RegExp(`^${name} carries the (\\w+)\\.$`).exec(line);
      if (own) return own[1];
      const same = new RegExp(`^${name} carries the same as (\\w+)\\.$`).exec(line);
      if (same) return carried(same[1]);
    }
    return undefined;
  };
  const given = (name: string) =>
    lines.flatMap((line) => new RegExp(`^${name} was given the word (\\w+)\\.$`).exec(line)?.[1] ?? []);
  const listed = (words: readonly (string | undefined)[]) =>
    words.length === 3 && !words.includes(undefined) ? `${words[0]}, ${words[1]} and ${words[2]}` : undefined;
  const counted = (one: string) => lines.filter((line) => line === `Noted: ${one}.`).length;
  const home = /town where (\w+) lives/.exec(question)?.[1];
  const three = /code words of (\w+), (\w+) and (\w+) are/.exec(question);
  const answer = home
    ? word(lines.map((line) => new RegExp(`^${home} lives in (\\w+)\\.$`).exec(line)?.[1]).find(Boolean) ?? '-')
    : three
      ? listed(three.slice(1).map(word))
      : question.startsWith('The words given to')
        ? listed(given(/given to (\w+),/.exec(question)![1]))
        : question.startsWith('So ')
          ? carried(question.split(' ')[1])
          : question.includes('noted most')
            ? candidates.toSorted((a, b) => counted(b) - counted(a))[0]
            : word(/code word of (\w+) is/.exec(question)?.[1] ?? '-');
  return candidates.map((candidate) => (candidate === answer ? 0 : -1));
}

const oracle: Reader = {
  score: async (prompt, candidates) => ({ logprobs: lookUp(prompt, candidates), seen: null }),
  generate: async () => 'a wrong answer',
};
const blind: Reader = {
  score: async (_, candidates) => ({ logprobs: candidates.map(() => -2), seen: null }),
  generate: async () => '',
};
/** Finds nothing but what stands in the last 300 bytes. */
const nearsighted: Reader = { ...oracle, score: (prompt, ...rest) => oracle.score(prompt.slice(-300), ...rest) };

/** Three standard deviations of a share of `count` guesses. */
const slack = (count: number) => 3 * Math.sqrt((CHANCE * (1 - CHANCE)) / count);

describe('the cases', () => {
  it.each(TASKS)('%s: an oracle finds everything, from the facts alone too; a blind reader guesses', async (task) => {
    const cells = await evaluateLong(oracle, haystack, { ...GRID, tasks: [task] });
    expect(cells.map(({ found }) => found)).toEqual([1, 1, 1, 1]);
    // Counting needs the other words too; without them the word is still the most frequent.
    expect(cells.map((cell) => cell.oracle)).toEqual([1, 1, 1, 1]);
    expect(cells.map(({ generated }) => generated)).toEqual([0, 0, 0, 0]);
    const guessed = await evaluateLong(blind, haystack, { ...GRID, tasks: [task] });
    const mean = guessed.reduce((sum, { found }) => sum + found, 0) / guessed.length;
    expect(Math.abs(mean - CHANCE)).toBeLessThan(slack(160));
  });

  it('a reader of the window guesses beyond it and finds what is in it', async () => {
    const grid = { ...GRID, tasks: ['single', 'many'] as const, lengths: [4000], trials: 60 };
    const far = await evaluateLong(nearsighted, haystack, { ...grid, depths: [0, 50] });
    for (const { found } of far) expect(Math.abs(found - CHANCE)).toBeLessThan(slack(60));
    const near = await evaluateLong(nearsighted, haystack, { ...grid, depths: [100] });
    for (const { found } of near) expect(found).toBe(1);
    // The column `window` gives the same bracket to any reader.
    const cut = await evaluateLong(oracle, haystack, { ...grid, depths: [50] });
    for (const { window } of cut) expect(Math.abs(window - CHANCE)).toBeLessThan(slack(60));
  });

  it('are as long as asked, have distinct candidates, and say where their facts end', () => {
    for (const task of TASKS)
      for (const length of [1500, 4000])
        for (let index = 0; index < 20; index++) {
          const one = haystack.case(task, length, 0.25, 1, index);
          expect(new Set(one.candidates).size).toBe(8);
          const longest = Math.max(...one.candidates.map((candidate) => candidate.length + 1));
          const tokens = one.prompt.length + longest;
          expect(tokens).toBeLessThanOrEqual(length);
          expect(tokens).toBeGreaterThan(length - 16);
          const needed = one.sentences.filter(({ isNeeded }) => isNeeded).map((sentence) => sentence.text);
          expect(one.ends).toHaveLength(needed.length);
          for (const end of one.ends)
            expect(needed.some((sentence) => one.prompt.slice(0, end).endsWith(sentence))).toBe(true);
        }
    expect(haystack.case('many', 1500, 0.5, 1, 4)).toEqual(haystack.case('many', 1500, 0.5, 1, 4));
    expect(() => haystack.case('many', 100, 0.5, 1, 4)).toThrow('--lengths: 100 tokens have no room for the task many');
  });
});

describe('a model', () => {
  const models: LanguageModel[] = [];
  const loaded = (sections: Parameters<typeof tinyConfig>[0] = {}): LoadedModel => {
    const config = tinyConfig(sections);
    const model = tinyModel(config);
    models.push(model);
    return { model, config, tokenizer } as LoadedModel;
  };
  afterAll(() => {
    for (const model of models) model.free();
  });
  const grid: LongGrid = { ...GRID, lengths: [900], depths: [0, 100], trials: 2, tasks: ['many', 'keys'] };

  it('has the log-probabilities of its loss', async () => {
    const own = loaded();
    const one = haystack.case('keys', 900, 0.5, 1, 0);
    const { logprobs } = await modelReader(own).score(one.prompt, one.candidates, one.ends);
    const { model } = own;
    for (const [i, candidate] of one.candidates.entries()) {
      const tokens = [...Buffer.from(`${one.prompt} ${candidate}`)];
      const { Tape } = await import('../../tensor/tape.js');
      const tape = new Tape(model.device, { record: false });
      const [ids, targets] = [tokens.slice(0, -1), tokens.slice(1)].map((list) =>
        tape.from(list, [list.length], 'i32'),
      );
      const losses = model.losses(ids, targets, { lengths: [tokens.length - 1] });
      const sum = Array.from(losses.read())
        .slice(-(candidate.length + 1))
        .reduce((total, loss) => total - loss, 0);
      losses.free();
      tape.end();
      expect(logprobs[i]).toBeCloseTo(sum, 3);
    }
  });

  it('and the same through a server give the same numbers', async () => {
    const own = loaded();
    const direct = await evaluateLong(modelReader(own), haystack, grid);
    const host = new LocalHost(own, { cacheBytes: 2 ** 27, prefixCacheBytes: 2 ** 24, maxContext: 2000, tile: 256 });
    const server = await startServer(host, { id: 'tiny', port: 0, log: () => {} });
    try {
      const served = await evaluateLong(await serverReader({ url: server.url }), haystack, grid);
      for (const [i, { margin, selected, ...cell }] of served.entries()) {
        const { margin: wanted, selected: _, ...rest } = direct[i];
        expect(cell).toEqual(rest);
        expect(margin).toBeCloseTo(wanted, 3);
        expect(selected).toBeNull();
      }
    } finally {
      await server.drain(0);
      await host.close();
    }
  });

  it('dense and sparse from the same weights agree while every block is read', async () => {
    // The selected branch alone with all blocks of the text is dense attention; its keys are those of all branches.
    const sections = { nsa: { n_sel: 120, shared_kv: true, cmp_rope: 'before', force_branch: 'sel' } };
    const [sparse, dense] = [loaded(sections), loaded({ ...sections, model: { attention: 'dense' } })];
    for (const { name, value } of dense.model.parameters)
      value.write(sparse.model.parameters.find((other) => other.name === name)!.value.read());
    const [a, b] = await Promise.all([sparse, dense].map((one) => evaluateLong(modelReader(one), haystack, grid)));
    for (const [i, cell] of a.entries()) {
      expect(cell.found).toBe(b[i].found);
      expect(cell.margin).toBeCloseTo(b[i].margin, 3);
      expect(cell.selected).toBe(1);
      expect(b[i].selected).toBeNull();
    }
  });

  it('with a window alone has the numbers of the column "window", and guesses what lies beyond', async () => {
    // One layer sees 200 bytes; the column reads the last 400 of the text, and answers have at most 60.
    const own = loaded({ model: { n_layers: 1 }, nsa: { w: 200, force_branch: 'win' } });
    const far: LongGrid = { ...GRID, lengths: [900], depths: [0, 50], trials: 40, window: 400, generate: false };
    const cells = await evaluateLong(modelReader(own), haystack, { ...far, tasks: ['single'] });
    for (const cell of cells) expect(cell.found).toBe(cell.window);
    const mean = cells.reduce((sum, { found }) => sum + found, 0) / cells.length;
    expect(Math.abs(mean - CHANCE)).toBeLessThan(slack(80));
  });

  it('converted to a sparse one with an exact start, by the commands, has the numbers of the dense one', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'trefoil-long-'));
    try {
      const config = tinyConfig({ model: { attention: 'dense' } });
      const dense = tinyModel(config);
      models.push(dense);
      const from = saveTinyCheckpoint(join(folder, 'dense'), 1, dense, config);
      const [to, file] = [join(folder, 'sparse'), join(folder, 'text.txt')];
      writeFileSync(file, text);
      const run = async (...words: string[]) => {
        const { code, stdout, stderr } = await runCli(words);
        expect(code, stderr).toBe(0);
        return stdout;
      };
      await run('convert', '--sparse', from, '--out', to, '--context', '1000');
      const words = ['--text-file', file, '--lengths', '900', '--depths', '0,100', '--trials', '2', '--window', '6'];
      const [a, b] = await Promise.all(
        [from, to].map(
          async (model) => JSON.parse(await run('eval', 'long', '--model', model, ...words, '--json')).rows,
        ),
      );
      expect(a).toHaveLength(2 * TASKS.length);
      for (const [i, { margin, selected, ...cell }] of (b as LongCell[]).entries()) {
        expect(cell).toEqual({ ...a[i], margin: undefined, selected: undefined });
        expect(margin).toBeCloseTo(a[i].margin, 3);
        expect(selected).toBe(1);
      }
    } finally {
      rmSync(folder, { recursive: true });
    }
  });

  it('reports whether the blocks of the facts were selected', async () => {
    const own = loaded({ nsa: { n_sel: 3 } }); // block 0, the last one and the one before: nothing between
    const [first, middle] = await evaluateLong(modelReader(own), haystack, {
      ...{ ...grid, generate: false, tasks: ['single'] },
      ...{ depths: [0, 50], lengths: [900] },
    });
    expect(middle.selected).toBe(0);
    expect(first.selected).toBe(0); // the fact ends beyond block 0
  });
});

describe('a server that does not answer', () => {
  let url: string;
  beforeAll(() => {
    url = 'http://127.0.0.1:9';
  });
  it('is named', async () => {
    await expect(serverReader({ url })).rejects.toThrow(`--url: ${url}/v1/models cannot be reached`);
  });
});
