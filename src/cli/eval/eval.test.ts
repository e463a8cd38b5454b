import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { toYaml } from '../../config/print.js';
import { byteLevelTokenizerJson } from '../../data/testing/tokenizer-json.js';
import { lastLogits } from '../../infer/decode.js';
import { writeFinalModel } from '../../infer/load.js';
import { tinyConfig, tinyModel } from '../../infer/testing/tiny-model.js';
import type { LanguageModel } from '../../model/language-model.js';
import { runCli } from '../testing/run.js';

const LENGTH = 24;
const SAMPLES = 5;

let root: string;
let run: string;
let file: string;
let model: LanguageModel;
const text = Array.from({ length: LENGTH * SAMPLES + 9 }, (_, i) => String.fromCharCode(97 + ((i * i) % 23))).join('');
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'trefoil-eval-'));
  run = join(root, 'run');
  file = join(root, 'text.txt');
  model = tinyModel(tinyConfig());
  writeFinalModel(run, model, tinyConfig());
  writeFileSync(file, text);
});
afterAll(() => {
  model.free();
  rmSync(root, { recursive: true, force: true });
});

/** The tokens of the file: its bytes and the separator. */
const tokens = [...Buffer.from(text), 0];
const TARGETS = tokens.length - 1;

/** The mean loss of the first targets, by samples that begin every LENGTH tokens, from the logits of every prefix. */
function wanted(targets: number): number {
  let total = 0;
  for (let first = 0; first < targets; first += LENGTH)
    for (let i = 0; i < LENGTH && first + i < targets; i++) {
      const logits = lastLogits(model, tokens.slice(first, first + i + 1));
      const most = Math.max(...logits);
      const sum = logits.reduce((partial, logit) => partial + Math.exp(logit - most), 0);
      total += most + Math.log(sum) - logits[tokens[first + i + 1]];
    }
  return total / targets;
}

async function evaluate(words: readonly string[]) {
  return runCli(['eval', 'loss', '--model', run, '--seq-len', String(LENGTH), ...words]);
}

describe('eval loss', () => {
  describe('--by-position', () => {
    const words = ['--dataset', 'text', '--local-path'];

    it('has the loss of each length of context, in all formats', async () => {
      const svg = join(root, 'positions.svg');
      const { code, stdout, stderr } = await evaluate([...words, file, '--by-position', '--json', '--svg', svg]);
      expect(code, stderr).toBe(0);
      const { by_position: rows, loss } = JSON.parse(stdout);
      // Samples of 24 targets and one of 9.
      const counts = [1, 1, 2, 4, 8, 8].map((positions, i) => SAMPLES * positions + [1, 1, 2, 4, 1, 0][i]);
      expect(rows.map(({ targets }: { targets: number }) => targets)).toEqual(counts);
      expect(rows.map(({ from, to }: { from: number; to: number }) => [from, to])).toEqual([
        ...[
          [1, 1],
          [2, 2],
          [3, 4],
          [5, 8],
          [9, 16],
          [17, 32],
        ],
      ]);
      const total = rows.reduce(
        (sum: number, row: { loss: number; targets: number }) => sum + row.loss * row.targets,
        0,
      );
      expect(total / TARGETS).toBeCloseTo(loss, 6);
      expect(readFileSync(svg, 'utf8')).toContain('Loss by position');
      const csv = await evaluate([...words, file, '--by-position', '--csv']);
      expect(csv.stdout.split('\n')[0]).toBe('model,from,to,targets,loss');
      expect(csv.stdout.trim().split('\n')).toHaveLength(7);
    });

    it('says what far context is worth, for each model', async () => {
      const json = JSON.parse((await evaluate([...words, file, '--by-position', '--json', '--near', '8'])).stdout);
      // Samples of 24 targets have 16 beyond 8 tokens, the last one of 9 has one.
      expect(json.far).toMatchObject({ near: 8, targets: 16 * SAMPLES + 1 });
      expect(json.far.gain).toBeCloseTo(json.far.near_loss - json.far.loss, 9);
      expect(json.far.error).toBeGreaterThan(0);
      expect(json.far.by_position.map(({ from }: { from: number }) => from)).toEqual([8, 16]);
      const { stdout } = await evaluate([...words, file, '--by-position', '--compare', run]);
      expect(stdout.match(/far context \(more than 6 tokens\) is worth -?\d\.\d{4} ± \d\.\d{4} nats/g)).toHaveLength(2);
      expect((await evaluate([...words, file, '--by-position', '--near', '24'])).stdout).toContain(
        'far context: no sample is longer than --near 24',
      );
    });

    it('compares models on the same data', async () => {
      const { code, stdout, stderr } = await evaluate([...words, file, '--by-position', '--compare', run]);
      expect(code, stderr).toBe(0);
      expect(stdout).toMatch(/context\s+targets\s+run\s+run \(2\)\s+difference/);
      expect(stderr.match(/^data: .*taken/gm) ?? []).toHaveLength(new Set(stderr.match(/^data: .*taken/gm)).size);
      expect(stdout).toMatch(/17-32\s+40\s+\d\.\d{4}\s+\d\.\d{4}\s+\+0\.0000/);
      const json = JSON.parse((await evaluate([...words, file, '--compare', run, '--json'])).stdout);
      expect(json.models).toHaveLength(2);
      expect(json.models[1]).toEqual(json.models[0]);
    });

    it('names models by what differs, and shows several seeds as a mean and a band', async () => {
      const save = (name: string, seed: number, gate: 'softmax' | 'sigmoid') => {
        const config = tinyConfig({ train: { seed }, nsa: { gate } });
        const one = tinyModel(config, 256, seed);
        writeFinalModel(join(root, 'runs', name), one, config);
        writeFileSync(join(root, 'runs', name, 'config.yaml'), toYaml(config));
        one.free();
        return join(root, 'runs', name);
      };
      const [a, b, other] = [save('a', 1, 'softmax'), save('b', 2, 'softmax'), save('other', 1, 'sigmoid')];
      const svg = join(root, 'seeds.svg');
      const given = ['eval', 'loss', '--model', a, '--compare', b, other, '--seq-len', String(LENGTH), ...words, file];
      const { code, stdout, stderr } = await runCli([...given, '--by-position', '--svg', svg]);
      expect(code, stderr).toBe(0);
      expect(stdout).toMatch(/^a: loss .*\nb: loss .*\nother: loss /m);
      expect(stdout).toMatch(/context\s+targets\s+a \(2 seeds\)\s+other\s+difference/);
      expect(stdout).toMatch(/17-32\s+40\s+\d\.\d{4} ± \d\.\d{4}\s+\d\.\d{4}\s+[+-]\d\.\d{4}/);
      expect(stdout).toContain('± half the range of the seeds around their mean');
      for (const line of stdout.match(/^ .*$/gm)!) expect(line.length, line).toBeLessThanOrEqual(80);
      const said = stderr.split('\n').filter((line) => line.startsWith('data: '));
      expect(said.length).toBeGreaterThan(0);
      expect(said).toEqual([...new Set(said)]);
      const drawn = readFileSync(svg, 'utf8');
      for (const part of ['a (2 seeds)', 'tokens of context', 'fill-opacity', '>16<', '>32<'])
        expect(drawn).toContain(part);
      expect(drawn).not.toContain('log2');
      const { models } = JSON.parse((await runCli([...given, '--json'])).stdout);
      expect(Object.keys(models[0])).not.toContain('setup');
    });

    it('shows what a branch contributes', async () => {
      const { code, stdout, stderr } = await evaluate([...words, file, '--without', 'sel', 'win', '--json']);
      expect(code, stderr).toBe(0);
      const { models } = JSON.parse(stdout) as { models: { without?: string; loss: number }[] };
      expect(models.map(({ without }) => without)).toEqual([undefined, 'sel', 'win']);
      expect(new Set(models.map(({ loss }) => loss)).size).toBe(3);
      const alone = JSON.parse((await evaluate([...words, file, '--json'])).stdout);
      expect(models[0]).toEqual(alone);
      expect(await evaluate([...words, file, '--without', 'all'])).toMatchObject({ code: 2 });
    });

    it('is asked for by the flags that show it', async () => {
      expect(await evaluate([...words, file, '--csv'])).toMatchObject({
        code: 2,
        stderr: 'trefoil: --csv: shows the loss by position; add --by-position\n',
      });
    });
  });

  it('of chats counts the tokens of the assistant alone, each chat by itself', async () => {
    const folder = join(root, 'chat-tokenizer');
    mkdirSync(folder);
    writeFileSync(join(folder, 'tokenizer.json'), JSON.stringify(byteLevelTokenizerJson()));
    const template =
      "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>\n{% endif %}{% endfor %}" +
      '{% if add_generation_prompt %}<a>{% endif %}';
    writeFileSync(join(folder, 'chat_template.jinja'), template);
    const config = tinyConfig({ data: { tokenizer: folder } });
    const chatModel = tinyModel(config, 263);
    const chatRun = join(root, 'chat-run');
    writeFinalModel(chatRun, chatModel, config);
    const chats = [
      {
        messages: [
          { role: 'user', content: 'hi' },
          { role: 'assistant', content: 'yo' },
        ],
      },
      {
        messages: [
          { role: 'user', content: 'a' },
          { role: 'assistant', content: 'b' },
          { role: 'user', content: 'c' },
          { role: 'assistant', content: 'dd' },
        ],
      },
      { messages: [{ role: 'assistant', content: 'alone' }] },
    ];
    const path = join(root, 'chats.jsonl');
    writeFileSync(path, chats.map((chat) => JSON.stringify(chat)).join('\n'));
    // Float64 reference: every chat read alone, its answers written out as tokens.
    const bytes = (text: string) => [...Buffer.from(text)];
    const END = 262;
    const documents = [
      [
        [bytes('<u>hi<a>'), [...bytes('yo'), END]],
        [bytes('\n'), []],
      ],
      [
        [bytes('<u>a<a>'), [...bytes('b'), END]],
        [bytes('\n<u>c<a>'), [...bytes('dd'), END]],
        [bytes('\n'), []],
      ],
      [
        [bytes('<a>'), [...bytes('alone'), END]],
        [bytes('\n'), []],
      ],
    ];
    let [total, targets] = [0, 0];
    for (const parts of documents) {
      const context: number[] = [];
      for (const [given, written] of parts) {
        context.push(...given);
        for (const token of written) {
          const logits = Float64Array.from(lastLogits(chatModel, context));
          const most = Math.max(...logits);
          total += most + Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0)) - logits[token];
          targets += 1;
          context.push(token);
        }
      }
    }
    chatModel.free();
    for (const [seqLen, batchSize] of [
      [64, 1],
      [24, 2],
      [200, 3],
    ]) {
      const words = ['eval', 'loss', '--model', chatRun, '--dataset', 'chat', '--local-path', path, '--json'];
      const { code, stdout, stderr } = await runCli([
        ...[...words, '--seq-len', String(seqLen), '--batch-size', String(batchSize)],
      ]);
      expect(code, stderr).toBe(0);
      const result = JSON.parse(stdout);
      expect(result).toMatchObject({ source: 'chat', targets, complete: true });
      expect(result.loss / (total / targets)).toBeCloseTo(1, 5);
    }
  });

  it('is the mean over every token of the source, however it is cut into batches', async () => {
    // 129 targets are five samples of 24 and one of 9.
    for (const [batchSize, batches] of [
      [1, 6],
      [2, 3],
      [4, 2],
      [5, 2],
      [50, 1],
    ]) {
      const words = ['--dataset', 'text', '--local-path', file, '--batch-size', String(batchSize), '--json'];
      const { code, stdout, stderr } = await evaluate(words);
      expect(code, stderr).toBe(0);
      const result = JSON.parse(stdout);
      expect(Object.keys(result)).toEqual([
        'model',
        'step',
        'source',
        'loss',
        'perplexity',
        'targets',
        'batches',
        'bits_per_byte',
        'complete',
      ]);
      expect(result).toMatchObject({ step: 7, source: 'text', targets: TARGETS, batches, complete: true });
      expect(result.loss / wanted(TARGETS)).toBeCloseTo(1, 5);
      // Every target but the separator is one byte.
      expect(result.bits_per_byte).toBeCloseTo((result.loss * TARGETS) / Math.LN2 / (TARGETS - 1), 9);
      expect(result.perplexity).toBeCloseTo(Math.exp(result.loss), 6);
    }
  });

  it('with weights in int8 is another, by little', async () => {
    const losses = await Promise.all(
      ['file', 'int8'].map(async (weights) => {
        const { code, stdout, stderr } = await evaluate(['--local-path', file, '--weights', weights, '--json']);
        expect(code, stderr).toBe(0);
        return JSON.parse(stdout).loss;
      }),
    );
    expect(losses[1]).not.toBe(losses[0]);
    expect(Math.abs(losses[1] - losses[0])).toBeLessThan(0.02);
  });

  it('takes at most --batches batches, and prints a line', async () => {
    const { code, stdout } = await evaluate(['--dataset', 'text', '--local-path', file, '--batches', '2']);
    expect(code).toBe(0);
    const loss = wanted(48);
    expect(stdout).toBe(
      `loss ${loss.toFixed(4)} | ppl ${Math.exp(loss).toFixed(2)} | bpb ${(loss / Math.LN2).toFixed(4)} | ` +
        '48 targets in 2 batches (more with --batches), step 7\n',
    );
  });

  it('reads a streamed source once, to its last token', async () => {
    const lines = join(root, 'lines.jsonl');
    writeFileSync(lines, `${JSON.stringify({ text })}\n`);
    const losses = [];
    for (const [source, batchSize] of [
      ['files', '1'],
      ['files', '4'],
      ['jsonl', '4'],
    ]) {
      const words = ['--dataset', source, '--local-path', lines, '--batch-size', batchSize, '--json'];
      const { code, stdout, stderr } = await evaluate(words);
      expect(code, stderr).toBe(0);
      expect(JSON.parse(stdout)).toMatchObject({ targets: TARGETS, complete: true });
      losses.push(JSON.parse(stdout).loss);
    }
    for (const loss of losses) expect(loss / wanted(TARGETS)).toBeCloseTo(1, 5);
  });

  it('takes the source that --local-path implies', async () => {
    const { code, stdout, stderr } = await evaluate(['--local-path', file, '--json']);
    expect(code, stderr).toBe(0);
    expect(JSON.parse(stdout)).toMatchObject({ source: 'text', targets: TARGETS });
  });

  it('cannot be good on random tokens', async () => {
    const { stdout } = await evaluate(['--dataset', 'synthetic', '--batches', '4', '--json']);
    expect(JSON.parse(stdout).loss).toBeGreaterThan(Math.log(256) - 0.02);
  });

  it.each([
    ['no source and no path', [], /no data; name a source with --dataset or a path with --local-path/],
    ['an unknown source', ['--dataset', 'books', '--local-path', '.'], /data\.source/],
    [
      'a path that is not read',
      ['--dataset', 'synthetic', '--local-path', '.'],
      /data\.path: not read by data\.source/,
    ],
    ['a missing model', ['--dataset', 'synthetic', '--model', '/none'], /\/none: there is no such file or folder/],
  ])('%s is one line and exit code 2', async (_, words, message) => {
    const { code, stdout, stderr } = await evaluate(words);
    expect(code).toBe(2);
    expect(stdout).toBe('');
    expect(stderr).toMatch(message);
  });
});

describe('eval selection', () => {
  const select = (...words: string[]) => runCli(['eval', 'selection', '--model', run, '--text-file', file, ...words]);

  it('prints one JSON value and writes the same with its pictures', async () => {
    const folder = join(root, 'pictures');
    const { code, stdout, stderr } = await select('--json', '--out-dir', folder, '--max-tokens', '50');
    expect(code, stderr).toBe(0);
    const result = JSON.parse(stdout);
    expect(Object.keys(result)).toEqual(['model', 'step', 'tokens', 'l_sel', 'layers']);
    expect(result).toMatchObject({ step: 7, tokens: 50, l_sel: 8 });
    expect(result.layers).toHaveLength(2);
    expect(Object.keys(result.layers[1])).toEqual([
      ...['layer', 'rate_by_distance', 'gates', 'gates_by_block', 'selection_map'],
    ]);
    expect(readdirSync(folder).sort()).toEqual([
      ...['gates.svg', 'selection-map.svg', 'selection.json', 'selection.svg'],
    ]);
    const { tokens_per_row, share } = result.layers[1].selection_map;
    expect({ tokens_per_row, rows: share.length, blocks: share[0].length }).toEqual({
      tokens_per_row: 1,
      rows: 50,
      blocks: Math.ceil(50 / 8),
    });
    // A token always selects its own block, and never a later one.
    share.forEach((row: number[], token: number) => {
      expect(row[Math.floor(token / 8)]).toBe(1);
      expect(row.slice(Math.floor(token / 8) + 1).every((value) => value === 0)).toBe(true);
    });
    expect(JSON.parse(readFileSync(join(folder, 'selection.json'), 'utf8'))).toEqual(result);
    for (const name of ['gates.svg', 'selection.svg', 'selection-map.svg'])
      expect(readFileSync(join(folder, name), 'utf8')).toMatch(/^<svg [\s\S]*<\/svg>\s*$/);
  });

  it('prints a table', async () => {
    const { stdout } = await select();
    expect(stdout).toMatch(/^layer +cmp +sel +win +mean distance$/m);
    expect(stdout).toMatch(/^ +1( +[\d.]+ %){3} +[\d.]+ blocks$/m);
    expect(stdout).toMatch(/^Blocks selected in layer [01], by token \(rows\) and block \(columns 0 to 16\);$/m);
    expect(stdout).toMatch(/^ +0 │█ +│$/m); // the first tokens have only their own block
    expect((await select('--layer', '0')).stdout).toContain('in layer 0,');
    expect((await select('--layer', '9')).stderr).toContain('--layer 9: the model has layers 0 to 1');
  });

  it('--coverage compares the choice with the best and a random one', async () => {
    const folder = join(root, 'coverage');
    const { code, stdout, stderr } = await select('--coverage', '--json', '--out-dir', folder, '--samples', '9');
    expect(code, stderr).toBe(0);
    const { coverage } = JSON.parse(stdout);
    expect(coverage).toMatchObject({ tokens: 9, n_sel: 3, l_sel: 8 });
    expect(coverage.layers).toHaveLength(2);
    // Three slots, all forced: nothing is chosen by score, so any choice is the best one.
    for (const { forced, chosen, best, random } of coverage.layers)
      for (const share of [chosen, best, random]) expect(share).toBeCloseTo(forced, 9);
    expect(readFileSync(join(folder, 'coverage.svg'), 'utf8')).toContain('Attention covered');
    const table = (await select('--coverage')).stdout;
    expect(table).toMatch(/^ *layer +forced +random +chosen +best +of possible$/m);
    expect(table).toMatch(/^ *mean( +[\d.]+ %){4}/m);
  });

  it('a file that is not there or empty is one line and exit code 2', async () => {
    const empty = join(root, 'empty.txt');
    writeFileSync(empty, '');
    for (const [path, message] of [
      ['/none', '/none: cannot read: there is no such file'],
      [empty, `${empty}: contains no text`],
    ]) {
      const { code, stderr } = await runCli(['eval', 'selection', '--model', run, '--text-file', path]);
      expect(code).toBe(2);
      expect(stderr).toContain(message);
      expect(stderr.trimEnd().split('\n')).toHaveLength(1);
    }
  });
});

describe('eval long', () => {
  const ask = (...words: string[]) =>
    runCli([
      'eval',
      'long',
      '--text-file',
      file,
      '--lengths',
      '600,800',
      '--trials',
      '1',
      '--depths',
      '0,90',
      ...words,
    ]);

  it('prints one JSON value and writes the same with its chart, and prints a table', async () => {
    const folder = join(root, 'long');
    const some = ['--model', run, '--tasks', 'single,two-facts'];
    const { code, stdout, stderr } = await ask(...some, '--json', '--out-dir', folder);
    expect(code, stderr).toBe(0);
    const result = JSON.parse(stdout);
    expect(result).toMatchObject({ step: 7, seed: 1, window_tokens: 6 });
    expect(result.rows).toHaveLength(8);
    expect(Object.keys(result.rows[0])).toEqual([
      ...['task', 'length', 'depth', 'trials', 'correct', 'found', 'oracle', 'window', 'chance', 'margin'],
      ...['selected', 'generated'],
    ]);
    expect(JSON.parse(readFileSync(join(folder, 'long.json'), 'utf8'))).toEqual(result);
    expect(readFileSync(join(folder, 'long.svg'), 'utf8')).toMatch(/^<svg [\s\S]*two-facts[\s\S]*<\/svg>\s*$/);
    const table = (await ask(...some)).stdout;
    expect(table).toMatch(/^ *task +tokens +found +worst depth +oracle +window 6 +chance +selected$/m);
    expect(table).toMatch(/^two-facts +800( +[\d.]+ %){6}$/m);
  });

  it.each([
    ['neither a model nor a server', [], /give a --model or the --url of a server/],
    ['a task that there is not', ['--model', '.', '--tasks', 'many,most'], /Allowed are single, many/],
    ['a tokenizer for a model', ['--model', '.', '--tokenizer', 'byte'], /--tokenizer: only with --url/],
    ['a server that is not there', ['--url', 'http://127.0.0.1:9'], /--url: http:\/\/127.0.0.1:9\/v1\/models cannot/],
  ])('%s is one line and exit code 2', async (_, words, message) => {
    const { code, stdout, stderr } = await ask(...words);
    expect(code).toBe(2);
    expect(stdout).toBe('');
    expect(stderr).toMatch(message);
    expect(stderr.trimEnd().split('\n')).toHaveLength(1);
  });

  it('a length without room names the task', async () => {
    const { code, stderr } = await ask('--model', run, '--lengths', '30');
    expect(code).toBe(2);
    expect(stderr).toContain('--lengths: 30 tokens have no room for the task single, which needs ');
  });
});

describe('eval needle', () => {
  const find = (...words: string[]) =>
    runCli(['eval', 'needle', '--model', run, '--records', '2', '--facts', '2', '--trials', '3', ...words]);
  const small = ['--lengths', '48,96', '--depths', '0,50,100'];

  it('prints one JSON value and writes the same with its chart', async () => {
    const folder = join(root, 'needle');
    const { code, stdout, stderr } = await find(...small, '--without', 'sel', '--json', '--out-dir', folder);
    expect(code, stderr).toBe(0);
    const result = JSON.parse(stdout);
    expect(Object.keys(result)).toEqual([
      ...['model', 'step', 'device', 'precision', 'trials', 'records', 'facts', 'seed', 'seconds', 'rows'],
    ]);
    expect(result).toMatchObject({ step: 7, precision: 'fp32', trials: 3, records: 2, facts: 2, seed: 1 });
    expect(result.rows).toHaveLength(12);
    expect(Object.keys(result.rows[0])).toEqual([
      ...['without', 'length', 'depth', 'trials', 'correct', 'accuracy', 'recall'],
    ]);
    expect(result.rows[0].recall).toEqual({ any: 1, layers: [1, 1] }); // depth 0: block 0 is always selected
    expect(new Set(result.rows.map((row: { without: string | null }) => row.without))).toEqual(new Set([null, 'sel']));
    expect(readdirSync(folder).sort()).toEqual(['needle.json', 'needle.svg']);
    expect(JSON.parse(readFileSync(join(folder, 'needle.json'), 'utf8'))).toEqual(result);
    expect(readFileSync(join(folder, 'needle.svg'), 'utf8')).toMatch(/^<svg [\s\S]*without sel[\s\S]*<\/svg>\s*$/);
  });

  it('prints a table for each grid', async () => {
    const { stdout } = await find(...small, '--without', 'win');
    expect(stdout).toMatch(
      /^all branches\n +depth +48 +96\n( *\d+ %( +[\d.]+ % [·░▒▓█]{2}){2}\n){3}selected( +[\d.]+ % [·░▒▓█]{2}){2}\n/m,
    );
    expect(stdout).toMatch(/^without win\n/m);
  });

  it('finds next to nothing with random weights', async () => {
    const { stdout } = await find('--lengths', '96', '--depths', '50', '--trials', '100', '--json');
    expect(JSON.parse(stdout).rows[0].accuracy).toBeLessThan(0.1); // 1 of 256 tokens by chance
  });

  it.each([
    ['a length without room', ['--lengths', '7'], /a sequence of 7 tokens is too short for a record of 2 facts/],
    ['a depth beyond the end', ['--depths', '101'], /at most 100 percent/],
    ['an unknown branch', ['--without', 'dense'], /Allowed choices are cmp, sel, win/],
    ['bf16 on the CPU', ['--precision', 'bf16', '--device', 'cpu'], /--precision bf16: the CPU computes in fp32/],
  ])('%s is one line and exit code 2', async (_, words, message) => {
    const { code, stdout, stderr } = await find(...words);
    expect(code).toBe(2);
    expect(stdout).toBe('');
    expect(stderr).toMatch(message);
  });
});
