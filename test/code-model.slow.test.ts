/** The programs beside examples/code-model/run.mjs (which test/package.slow.test.ts runs): retrieval in code, and a run under faults. */
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';
import { afterAll, describe, expect, it } from 'vitest';
import { createTokenizer, type Tokenizer } from '../src/data/tokenizer.js';
import { root, runNode, trefoil } from '../src/testing/cli.js';
import { temporaryFolder } from '../src/testing/run.js';

const folder = temporaryFolder();
afterAll(() => folder.remove());
const program = (name: string) => join(root, 'examples', 'code-model', name);
const inside = (...names: string[]) => join(folder.path, ...names);

interface AskedCase {
  readonly at: number;
  readonly length: number;
  readonly depth: number;
  readonly factAt: number;
}
interface Asked {
  readonly tokens: Int32Array;
  readonly cases: readonly AskedCase[];
}
interface Task {
  trainingSequence(
    code: Int32Array,
    length: number,
    options: { textShare: number; isRepeated: boolean },
    draw: () => number,
  ): { inputs: Int32Array; targets: Int32Array };
  passkey(code: Int32Array, length: number, depth: number, draw: () => number): Asked;
  keyValue(code: Int32Array, length: number, count: number, asked: number, draw: () => number): Asked;
}
const { RetrievalTask, random } = (await import(pathToFileURL(program('retrieval-task.mjs')).href)) as {
  RetrievalTask: new (tokenizer: Tokenizer) => Task;
  random: (seed: number) => () => number;
};

describe.each(['gpt2', 'byte'])('the retrieval task in %s tokens', (name) => {
  const tokenizer = createTokenizer(name);
  const task = new RetrievalTask(tokenizer);
  const code = tokenizer.encode('def area(width, height):\n    return width * height\n\n'.repeat(200));

  it('trains on answers that stand behind their assignments', () => {
    const draw = random(3);
    let firsts = 0;
    for (let round = 0; round < 10; round++) {
      const { inputs, targets } = task.trainingSequence(code, 1024, { textShare: 0, isRepeated: round < 5 }, draw);
      expect([inputs.length, targets.length]).toEqual([1024, 1024]);
      const text = `${tokenizer.decode(inputs)}${tokenizer.decode([targets[1023] === -100 ? tokenizer.encode('\n')[0] : targets[1023]])}`;
      const assigned = new Map<string, string>();
      firsts += Number(text.startsWith('# set '));
      let questions = 0;
      for (const line of text.split('\n').slice(0, -1)) {
        const [, key, value] = /^# set ([a-z ]+): \1(\d{3})$/.exec(line) ?? [];
        if (key) assigned.set(key, value);
        const [, asked, answer] = /^# get ([a-z ]+): \1(\d{3})$/.exec(line) ?? [];
        if (!asked) continue;
        questions++;
        expect(assigned.get(asked), line).toBe(answer);
      }
      expect(assigned.has('the secret password')).toBe(true);
      expect(questions).toBeGreaterThan(0);
      // With a text share of 0 the targets are the answers and repeated code, and nothing else.
      const runs: number[][] = [[]];
      for (const target of targets) {
        if (target !== -100) runs.at(-1)!.push(target);
        else if (runs.at(-1)!.length > 0) runs.push([]);
      }
      const counted = runs.filter((run) => run.length > 0).map((run) => tokenizer.decode(run));
      const answers = counted.filter((part) => /^\d{3}$/.test(part));
      expect(answers.length).toBeGreaterThanOrEqual(questions);
      const source = tokenizer.decode(code);
      for (const part of counted) if (!answers.includes(part)) expect(source).toContain(part);
      if (round < 5) expect(counted.length).toBeGreaterThan(answers.length);
      else expect(counted).toEqual(answers);
      for (const [i, target] of targets.entries())
        if (target !== -100 && i + 1 < 1024) expect(inputs[i + 1]).toBe(target);
    }
    // Some sequences begin with an assignment, and some with code.
    expect(firsts).toBeGreaterThan(0);
    expect(firsts).toBeLessThan(10);
  });

  it('asks in long sequences mostly once, and sometimes for many values together', () => {
    const draw = random(3);
    const repeated = tokenizer.encode('def area(width, height):\n    return width * height\n\n'.repeat(1000));
    let [assigned, asked, togethers] = [0, 0, 0];
    const sequences = Array.from({ length: 8 }, () =>
      task.trainingSequence(repeated, 8192, { textShare: 0, isRepeated: false }, draw),
    );
    for (const { inputs } of sequences) {
      const lines = tokenizer.decode(inputs).split('\n');
      const names = new Set<string>();
      for (const [i, line] of lines.entries()) {
        const [, kind, name] = /^# (set|get) ([a-z ]+): \2\d{3}$/.exec(line) ?? [];
        if (kind === 'set') names.add(name);
        if (kind !== 'get') continue;
        expect(names.has(name), line).toBe(true);
        asked++;
        if (lines.slice(i, i + 4).every((one) => one.startsWith('# get '))) togethers++;
      }
      assigned += names.size;
    }
    expect(asked / assigned).toBeGreaterThan(0.9);
    expect(asked / assigned).toBeLessThan(1.6);
    expect(togethers).toBeGreaterThan(0);
    expect(togethers).toBeLessThan(0.8 * asked);
  });

  it('asks for one passkey at a depth, and for keys at all depths', () => {
    const draw = random(5);
    const valueAt = (tokens: Int32Array, from: number, { length }: AskedCase) =>
      tokenizer.decode(tokens.subarray(from, from + length));
    const single = task.passkey(code, 2000, 0.5, draw);
    const [asked] = single.cases;
    expect(single.tokens).toHaveLength(2000);
    expect(tokenizer.decode(single.tokens)).toMatch(/\n# get the secret password: the secret password\d{3}\n$/);
    expect(tokenizer.decode(single.tokens).match(/password/g)).toHaveLength(4);
    expect(valueAt(single.tokens, asked.factAt, asked)).toBe(valueAt(single.tokens, asked.at, asked));
    expect(asked.factAt / 2000).toBeCloseTo(0.5, 1);

    const many = task.keyValue(code, 2000, 8, 4, draw);
    expect(many.tokens).toHaveLength(2000);
    expect(many.cases).toHaveLength(4);
    for (const one of many.cases) {
      expect(valueAt(many.tokens, one.factAt, one)).toBe(valueAt(many.tokens, one.at, one));
      expect(valueAt(many.tokens, one.at, one)).toMatch(/^\d{3}$/);
      expect(Math.abs(one.factAt / 2000 - one.depth)).toBeLessThan(0.3);
    }
    expect(new Set(many.cases.map(({ depth }) => Math.floor(4 * depth))).size).toBe(4);
  });
});

describe('retrieval.mjs', () => {
  it('fine-tunes a model and evaluates it by length and depth, with and without a branch', async () => {
    const texts = inside('code.jsonl');
    const text = readFileSync(program('retrieval.mjs'), 'utf8');
    writeFileSync(texts, `${JSON.stringify({ text: text.repeat(4) })}\n`);
    const prepared = await trefoil([
      ...['data', 'prepare', '--local-path', texts, '--tokenizer', 'byte', '--out', inside('tokens')],
    ]);
    expect(prepared.code, prepared.stderr).toBe(0);
    const shape = ['model.dim=32', 'model.n_layers=2', 'model.n_heads=2', 'model.n_kv_groups=1', 'model.d_k=16'];
    const trained = await trefoil([
      ...['train', '--config', program('cpu.yaml'), '--local-path', inside('tokens'), '--steps', '2'],
      ...['--out-dir', inside('model'), '--seq-len', '128', '--set', 'train.eval_every=0'],
      ...[...shape, 'model.d_v=16', 'data.val_fraction=0'].flatMap((setting) => ['--set', setting]),
    ]);
    expect(trained.code, trained.stderr).toBe(0);
    const { code, stderr } = await runNode([
      ...[program('retrieval.mjs'), '--model', inside('model'), '--train', inside('tokens'), '--val', inside('tokens')],
      ...['--out', inside('retrieval'), '--stages', '256:50@512,128+256:2@512', '--search-from', '0'],
      ...['--lengths', '256,512', '--depths', '3', '--trials', '2', '--device', 'cpu'],
    ]);
    expect(code, stderr).toBe(0);
    const result = JSON.parse(readFileSync(inside('retrieval', 'retrieval.json'), 'utf8')) as {
      rows: { task: string; length: number; depth: number; without: string | null; cases: number; correct: number }[];
      curve: { step: number; length: number }[];
      misses: { task: string; length: number; value: string; answered: string }[];
      text_loss: { before: number; after: number };
    };
    const passkeys = result.rows.filter(({ task, without }) => task === 'passkey' && without === null);
    expect(passkeys.map(({ length, depth, cases }) => [length, depth, cases])).toEqual(
      [256, 512].flatMap((length) => [0, 0.5, 1].map((depth) => [length, depth, 2])),
    );
    expect(result.rows.filter(({ without }) => without === 'sel')).toHaveLength(result.rows.length / 2);
    expect(result.curve.map(({ step, length }) => [step, length])).toEqual([
      [50, 256],
      [52, 256],
    ]);
    // A model of 256 bytes that has seen two steps guesses.
    expect(Math.abs(result.text_loss.before - Math.log(256))).toBeLessThan(1);
    expect(result.text_loss.after).toBeLessThan(result.text_loss.before);
    // Every wrong answer is listed.
    const wrong = result.rows.filter(({ without }) => without === null).map(({ cases, correct }) => cases - correct);
    expect(result.misses).toHaveLength(wrong.reduce((sum, count) => sum + count, 0));
    for (const { value, answered } of result.misses) expect(answered).not.toBe(value);
    // The fine-tuned model can be loaded.
    const { code: generated } = await trefoil([
      ...['generate', '--model', inside('retrieval'), '--prompt', '# set ', '--max-new-tokens', '4', '--greedy'],
    ]);
    expect(generated).toBe(0);
  });
});

describe('pages of measurements', () => {
  it.each([
    ['code-model.md', ['code-model.mjs', 'page']],
    ['context.md', ['context-page.mjs']],
  ])('docs/explain/%s has the tables and charts of the stored results', async (_, [name, ...words]) => {
    const { code, stdout, stderr } = await runNode([join(root, 'bench', name), ...words, '--check']);
    expect(code, stdout + stderr).toBe(0);
  });
});

describe('faults.mjs', () => {
  it('ends with the weights of an undisturbed run after a hang, kill -9 and a full disk', async () => {
    const shape = ['model.dim=32', 'model.n_layers=1', 'model.n_heads=2', 'model.n_kv_groups=1', 'train.seq_len=64'];
    const { code, stdout, stderr } = await runNode([
      ...[program('faults.mjs'), '--data', join(root, 'docs', 'guide'), '--out', inside('faults'), '--steps', '480'],
      ...['--deadline', '8', '--disk-mb', '24', ...shape.flatMap((setting) => ['--set', setting])],
    ]);
    expect(code, stdout + stderr).toBe(0);
    expect(stdout).toContain('equal, and so are all losses');
    const { events, starts } = JSON.parse(readFileSync(inside('faults', 'faults.json'), 'utf8')) as {
      events: { what: string }[];
      starts: number;
    };
    const happened = events.map(({ what }) => what).join('\n');
    expect(starts).toBeGreaterThanOrEqual(3);
    expect(happened).toMatch(/fault: SIGSTOP[\s\S]*watchdog, rule section[\s\S]*SIGKILL[\s\S]*resumed/);
    expect(happened).toMatch(/fault: kill -9[\s\S]*resumed/);
    if (happened.includes('no full disk')) console.log(/no full disk: .*/.exec(stdout)![0]);
    else expect(happened).toMatch(/the disk is full[\s\S]*was not saved; training goes on[\s\S]*done/);
  });
});
