import { mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Readable, Writable } from 'node:stream';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { toYaml } from '../config/print.js';
import { byteLevelTokenizerJson } from '../data/testing/tokenizer-json.js';
import { cudaAbsence } from '../device/cuda/cuda.js';
import { writeFinalModel } from '../infer/load.js';
import { saveTinyCheckpoint, tinyConfig, tinyModel } from '../infer/testing/tiny-model.js';
import { configure, type Input } from './generate.js';
import { main } from './program.js';
import { createIo, type Stream } from './shared/io.js';
import { runCli } from './testing/run.js';

let root: string;
let run: string;
beforeAll(() => {
  root = mkdtempSync(join(tmpdir(), 'trefoil-generate-'));
  run = join(root, 'run');
  const model = tinyModel(tinyConfig());
  writeFinalModel(run, model, tinyConfig());
  saveTinyCheckpoint(run, 3, model, tinyConfig());
  model.free();
});
afterAll(() => rmSync(root, { recursive: true, force: true }));

class Sink extends Writable {
  text = '';
  readonly isTTY: boolean;
  readonly closeAfter: number;
  writes = 0;

  constructor(isTTY = false, closeAfter = Number.POSITIVE_INFINITY) {
    super();
    this.isTTY = isTTY;
    this.closeAfter = closeAfter;
  }

  override _write(chunk: Buffer, _encoding: string, done: (error?: Error) => void): void {
    this.writes += 1;
    const isClosed = this.writes > this.closeAfter;
    if (!isClosed) this.text += chunk;
    done(isClosed ? Object.assign(new Error('closed'), { code: 'EPIPE' }) : undefined);
  }
}

interface Settings {
  stdin?: Input;
  env?: Record<string, string>;
  stdout?: Sink;
}

const terminal: Input = Object.assign(piped(), { isTTY: true });

async function* piped(...pieces: (string | Uint8Array)[]): AsyncGenerator<string | Uint8Array> {
  yield* pieces;
}

async function generate(words: readonly string[], { stdin = terminal, env = {}, stdout = new Sink() }: Settings = {}) {
  const stderr = new Sink();
  const entry = {
    name: 'generate',
    summary: 'text',
    load: async () => ({
      configure: (...given: Parameters<typeof configure>) => configure(given[0], given[1], stdin),
    }),
  };
  const code = await main(['generate', ...words], createIo(stdout as Stream, stderr as Stream, env), [entry]);
  return { code, out: stdout.text, err: stderr.text };
}

/** The one JSON value of a run that must succeed. */
async function json(words: readonly string[], settings: Settings = {}) {
  const { code, out, err } = await generate(['--model', run, '--json', '--max-new-tokens', '12', ...words], settings);
  expect(code, err).toBe(0);
  return JSON.parse(out);
}

describe('trefoil generate', () => {
  it('streams text to stdout and tells its speed on stderr', async () => {
    const { code, out, err } = await generate(['--model', run, '--prompt', 'Hello', '--seed', '3']);
    expect(code).toBe(0);
    expect(out.endsWith('\n')).toBe(true);
    expect(out.length).toBeGreaterThan(5);
    expect(err).toMatch(/model: .*model\.safetensors \(step 7, [\d,]+ parameters\)\n/);
    expect(err).toMatch(/\d+ tokens in [\d.]+ s, [\d.]+ tok\/s; .*; seed 3\n$/);
  });

  it('--json prints one value with the same text', async () => {
    const words = ['--prompt', 'Hello', '--seed', '3'];
    const value = await json(words);
    expect(Object.keys(value)).toEqual(['prompt', 'text', 'tokens', 'tokens_per_s', 'finish_reason']);
    expect(value).toMatchObject({ prompt: 'Hello', tokens: 12, finish_reason: 'length' });
    expect(value.tokens_per_s).toBeGreaterThan(0);
    const plain = await generate(['--model', run, '--max-new-tokens', '12', ...words]);
    expect(plain.out).toBe(`${value.text}\n`);
  });

  it('is decided by the seed; without one it draws another text and names the seed that repeats it', async () => {
    const text = async (...words: string[]) => (await json(['--prompt', 'a', ...words])).text;
    expect(await text('--seed', '1')).toBe(await text('--seed', '1', '--threads', '1'));
    expect(await text('--seed', '1')).not.toBe(await text('--seed', '2'));
    const free = await generate(['--model', run, '--prompt', 'a']);
    const [, seed] = /seed (\d+)\n$/.exec(free.err)!;
    const again = await generate(['--model', run, '--prompt', 'a', '--seed', seed]);
    expect(again.out).toBe(free.out);
  });

  it('--greedy, temperature 0 and top-k 1 are one', async () => {
    const greedy = await json(['--prompt', 'abc', '--greedy']);
    for (const words of [
      ['--temperature', '0'],
      ['--top-k', '1'],
      ['--top-p', '0.000001'],
    ])
      expect((await json(['--prompt', 'abc', ...words])).text).toBe(greedy.text);
    const { err } = await generate(['--model', run, '--prompt', 'abc', '--greedy']);
    expect(err).not.toContain('seed');
  });

  it('continues several prompts at once, each as it would be alone', async () => {
    const words = ['--prompt', 'abc', '--prompt', 'another one', '--seed', '4', '--repetition-penalty', '1.2'];
    const values = await json(words);
    expect(values).toHaveLength(2);
    for (const { prompt, text, finish_reason } of values) {
      const alone = await json(['--prompt', prompt, '--seed', '4', '--repetition-penalty', '1.2']);
      expect(alone).toMatchObject({ text, finish_reason });
    }
    const plain = await generate(['--model', run, '--max-new-tokens', '12', ...words]);
    expect(plain.out).toBe(`--- 1\n${values[0].text}\n--- 2\n${values[1].text}\n`);
    expect(plain.err).toMatch(/24 tokens in \d+\.\d s, [\d.]+ tok\/s; first text after \d+\.\d s; /);
  });

  it('--min-p 1 is greedy, and a penalty below 1 favours the context', async () => {
    const greedy = await json(['--prompt', 'abc', '--greedy']);
    expect((await json(['--prompt', 'abc', '--min-p', '1'])).text).toBe(greedy.text);
    const penalized = await json(['--prompt', 'abc', '--greedy', '--repetition-penalty', '0.01']);
    expect(penalized.text).not.toBe(greedy.text);
  });

  it('continues a prompt from the files of --prefix-cache-dir', async () => {
    const words = ['--prompt', 'many words '.repeat(60), '--seed', '3', '--max-new-tokens', '8'];
    const folder = join(root, 'prefixes');
    const { text } = await json(words);
    for (const _ of ['written', 'read']) expect((await json([...words, '--prefix-cache-dir', folder])).text).toBe(text);
    expect(readdirSync(folder).filter((name) => name.endsWith('.prefix'))).toHaveLength(3); // two blocks, and logits
  });

  describe('--json-schema', () => {
    const schemaFile = (schema: unknown): string => {
      const path = join(root, 'schema.json');
      writeFileSync(path, typeof schema === 'string' ? schema : JSON.stringify(schema));
      return path;
    };
    const FIND = {
      type: 'object',
      required: ['thing', 'count'],
      additionalProperties: false,
      properties: { thing: { type: 'string' }, count: { type: 'integer', minimum: 1 } },
    };

    it('makes every text a document of the schema', async () => {
      const words = ['--prompt', 'abc', '--prompt', 'd', '--json-schema', schemaFile(FIND), '--max-new-tokens', '60'];
      for (const seed of ['1', '2']) {
        const values = await json([...words, '--seed', seed]);
        for (const { text, finish_reason } of values) {
          expect(JSON.parse(text)).toEqual({ thing: expect.any(String), count: expect.any(Number) });
          expect(['stop', 'length']).toContain(finish_reason); // length: the last tokens closed the document
        }
      }
      const many = ['--prompt', 'abc', '--json-schema', schemaFile({ const: 1 }), '--max-new-tokens', '60'];
      expect((await generate(['--model', run, ...many])).err).toContain('; the document is complete; seed');
    });

    it.each<[string, unknown, RegExp]>([
      ['text that is not JSON', '{', /schema\.json: is not JSON \(.*\); --json-schema needs a JSON schema\n$/],
      ['a list', [], /schema\.json: .*schema/],
      ['an unknown keyword', { type: 'object', minProperties: 3 }, /schema\.json: .*"minProperties" is not supported/],
      [
        'a document that does not fit',
        FIND,
        /--json-schema: the shortest document has \d+ tokens, and at most 5 may be/,
      ],
    ])('refuses %s', async (_, schema, message) => {
      const words = ['--model', run, '--prompt', 'a', '--json-schema', schemaFile(schema), '--max-new-tokens', '5'];
      const { code, out, err } = await generate(words);
      expect([code, out]).toEqual([2, '']);
      expect(err).toMatch(message);
    });

    it('needs a prompt on a terminal', async () => {
      const refused = await generate(['--model', run, '--json-schema', schemaFile(FIND)], { stdout: new Sink(true) });
      expect(refused).toMatchObject({ code: 2, err: expect.stringContaining('add --prompt or --prompt-file') });
    });
  });

  it('takes a run folder, a checkpoint or a file', async () => {
    const { text } = await json(['--prompt', 'x', '--greedy']);
    for (const path of ['model.safetensors', 'checkpoints/step-3', 'checkpoints/latest'])
      expect((await json(['--model', join(run, path), '--prompt', 'x', '--greedy'])).text).toBe(text);
  });

  it('the prompt comes from a flag, a file or a pipe, and ends without the last newline', async () => {
    const file = join(root, 'prompt.txt');
    writeFileSync(file, '\uFEFFline one\nline é two\r\n');
    const prompt = 'line one\nline é two';
    expect((await json(['--prompt-file', file])).prompt).toBe(prompt);
    const bytes = Buffer.from(`${prompt}\n`);
    const stdin = piped(bytes.subarray(0, 15), bytes.subarray(15)); // between the two bytes of é
    expect((await json([], { stdin })).prompt).toBe(prompt);
    expect((await json(['--prompt', 'flag\n'], { stdin: piped('pipe') })).prompt).toBe('flag\n');
    expect((await json([])).prompt).toBe('');
  });

  it('ends before a stop text', async () => {
    const { text } = await json(['--prompt', 'a', '--seed', '4']);
    const middle = [...text][2];
    const stopped = await json(['--prompt', 'a', '--seed', '4', '--stop', 'never there', '--stop', middle]);
    expect(stopped).toMatchObject({ text: text.slice(0, text.indexOf(middle)), finish_reason: 'stop' });
  });

  it('says when the context is full', async () => {
    const words = ['--model', run, '--prompt', 'abc', '--max-context', '6', '--greedy', '--max-new-tokens', '99'];
    expect((await generate(words)).err).toContain('3 tokens in');
    expect((await generate(words)).err).toContain('--max-context is full: raise it for more');
    expect((await generate([...words, '--max-context', '3'])).err).toContain('the prompt has 3 tokens');
  });

  it('shows control characters as pictures on a terminal, and as they are elsewhere', async () => {
    const words = ['--model', run, '--prompt', 'a', '--temperature', '30', '--seed', '2', '--max-new-tokens', '300'];
    const [screen, file] = [await generate(words, { stdout: new Sink(true) }), await generate(words)];
    const isControl = /[^\P{Cc}\n\t]/u;
    expect(file.out).toMatch(isControl);
    expect(screen.out).not.toMatch(isControl);
    expect([...screen.out]).toHaveLength([...file.out].length);
  });

  it('stops when stdout is closed', async () => {
    const stdout = new Sink(false, 2);
    const words = ['--model', run, '--prompt', 'a', '--temperature', '5', '--seed', '1', '--max-new-tokens', '100000'];
    const { code, err } = await generate(words, { stdout });
    expect(code).toBe(0);
    expect(err).not.toContain('tok/s');
  });

  it('obeys the environment in the choice of kernels and warns of what does nothing', async () => {
    const words = ['--prompt', 'some longer text to continue', '--greedy'];
    const { text } = await json(words);
    for (const env of [{ NSA_FORCE_PARITY: '1' }, { NSA_PREFILL_TILE: '5' }, { NSA_PREFILL_BATCHED: '0' }])
      expect((await json(words, { env })).text).toBe(text);
    const { err } = await generate(['--model', run, '--prompt', 'a'], { env: { NSA_FORCE_PARTY: '1' } });
    expect(err).toContain('warning: NSA_FORCE_PARTY: unknown variable, ignored (did you mean NSA_FORCE_PARITY?)');
  });

  describe('--chat', () => {
    let chatModel: string;
    beforeAll(() => {
      const folder = join(root, 'tokenizer');
      mkdirSync(folder);
      writeFileSync(join(folder, 'tokenizer.json'), JSON.stringify(byteLevelTokenizerJson()));
      writeFileSync(join(folder, 'tokenizer_config.json'), JSON.stringify({ eos_token: '<|endoftext|>' }));
      writeFileSync(
        join(folder, 'chat_template.jinja'),
        '{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}',
      );
      const config = tinyConfig({ data: { tokenizer: folder } });
      const model = tinyModel(config, 263);
      chatModel = join(root, 'chat-model');
      writeFinalModel(chatModel, model, config);
      model.free();
      rmSync(folder, { recursive: true }); // the model's folder holds all that is needed
    });
    const options = ['--greedy', '--max-new-tokens', '6'];

    it('writes the prompt through the template of the model', async () => {
      const written = '[system] Be brief.\n[user] Hello\n[assistant] ';
      const { text } = await json(['--model', chatModel, '--prompt', written, ...options]);
      const words = ['--model', chatModel, '--chat', '--system', 'Be brief.', ...options];
      const chat = await json([...words, '--prompt', 'Hello']);
      expect(chat).toMatchObject({ prompt: 'Hello', text });
      const plain = await generate(words, { stdin: piped('Hel', 'lo\n') });
      expect(plain).toMatchObject({ code: 0, out: `${text}\n` });
    });

    it('is what trefoil chat does, and generate says so', async () => {
      const words = ['--model', chatModel, '--prompt', 'Hello', ...options];
      const chat = await runCli(['chat', ...words]);
      expect(chat).toMatchObject({ code: 0, stdout: (await runCli(['generate', '--chat', ...words])).stdout });
      const plain = await runCli(['generate', ...words]);
      expect(plain.stderr).toContain(`to talk to it: trefoil chat --model ${chatModel}`);
      expect(chat.stderr).not.toContain('to talk to it');
    });

    it('is what a training on chats ends with', async () => {
      const chats = join(root, 'chats.jsonl');
      const messages = [
        { role: 'user', content: 'How deep is the river?' },
        { role: 'assistant', content: 'Not deep.' },
      ];
      writeFileSync(chats, `${JSON.stringify({ messages })}\n`.repeat(4));
      const out = join(root, 'trained-on-chats');
      const config = join(root, 'chats.yaml');
      const data = { source: 'chat', path: chats, tokenizer: chatModel };
      const train = { steps: 1, seq_len: 64, batch_size: 1, save_every: 0, eval_every: 0, out_dir: out };
      writeFileSync(config, toYaml(tinyConfig({ data, train })));
      const { code, stdout, stderr } = await runCli(['train', '--config', config, '--device', 'cpu']);
      expect(code, stderr).toBe(0);
      expect(stdout.trimEnd().split('\n').at(-1)).toBe(`use it: npx trefoil chat --model ${out}`);
    });

    it('is a conversation on a terminal: turns, /reset, /help and /exit', async () => {
      const lines = ['Hello', 'Again', '/reset', 'Hello', '/help', '/exit', 'never read'];
      const stdin = Object.assign(Readable.from(lines.map((line) => `${line}\n`)), { isTTY: true }) as Input;
      const stdout = new Sink(true);
      const { code, err } = await generate(['--model', chatModel, '--chat', ...options], { stdin, stdout });
      expect(code).toBe(0);
      const contexts = [...err.matchAll(/\[(\d+) tokens of context/g)].map((match) => Number(match[1]));
      // One token per character, but for the merged "er" of "user".
      const first = '[user] Hello\n[assistant] '.length - 1 + 6;
      expect(contexts[0]).toBe(first);
      expect(contexts[1]).toBeGreaterThan(first);
      expect(contexts.slice(2)).toEqual([first]);
      expect(err).toContain('started over');
      expect(err.split('/help shows this')).toHaveLength(3); // at the start, and when asked
      expect(err).toContain('--max-new-tokens was reached');
    });

    it('needs a template, and names the remedy', async () => {
      const { code, out, err } = await generate(['--model', run, '--chat', '--prompt', 'a']);
      expect({ code, out }).toEqual({ code: 2, out: '' });
      expect(err).toContain(
        'tokenizer byte has no chat template; put a chat_template.jinja beside its tokenizer.json, or use a model',
      );
      const system = await generate(['--model', run, '--system', 'x', '--prompt', 'a']);
      expect(system).toMatchObject({ code: 2, err: 'trefoil: --system: is the first message of a chat; add --chat\n' });
    });
  });

  const bad: [string, string[], RegExp][] = [
    ['no model', [], /required option '--model <path>' not specified/],
    ['a missing model', ['--model', '/none'], /\/none: there is no such file or folder; give a run folder/],
    ['an unknown flag', ['--model', 'x', '--topk', '3'], /unknown option '--topk'.*did you mean --top-k/],
    ['a stray word', ['--model', 'x', 'hello'], /too many arguments/],
    ['a bad number', ['--model', 'x', '--max-new-tokens', '0'], /--max-new-tokens.*integer >= 1/],
    ['a bad temperature', ['--model', 'x', '--temperature', 'hot'], /--temperature.*number >= 0/],
    ['a bad share', ['--model', 'x', '--top-p', '1.5'], /--top-p.*number > 0 and <= 1/],
    ['a bad min-p', ['--model', 'x', '--min-p', '2'], /--min-p.*number >= 0 and <= 1/],
    ['a bias of no token', ['--model', 'x', '--logit-bias', 'a=1'], /--logit-bias a=1: use ID=X/],
    ['a bad shift', ['--model', 'x', '--frequency-penalty', '3'], /--frequency-penalty.*-2 to 2/],
    ['a bad penalty', ['--model', 'x', '--repetition-penalty', '0'], /--repetition-penalty.*number > 0/],
    [
      'a missing schema',
      ['--model', 'x', '--prompt', 'a', '--json-schema', '/none'],
      /\/none: cannot read: there is no/,
    ],
    ['a schema and a stop', ['--model', 'x', '--json-schema', 'a', '--stop', 'b'], /cannot be used with/],
    ['two prompts', ['--model', 'x', '--prompt', 'a', '--prompt-file', 'b'], /cannot be used with/],
    ['greedy and hot', ['--model', 'x', '--greedy', '--temperature', '2'], /cannot be used with/],
    ['a missing prompt file', ['--model', 'x', '--prompt-file', '/none'], /\/none: cannot read: there is no such file/],
  ];
  if (cudaAbsence() !== null)
    bad.push(['no CUDA', ['--model', 'x', '--prompt', 'a', '--device', 'cuda'], /--device cuda/]);
  it.each(bad)('%s is one line and exit code 2', async (_, words, message) => {
    const { code, out, err } = await generate(words);
    expect(code).toBe(2);
    expect(out).toBe('');
    expect(err).toMatch(message);
    expect(err.trimEnd().split('\n')).toHaveLength(1);
  });

  it('a prompt that is no text, and an empty stop, are refused', async () => {
    const file = join(root, 'binary');
    writeFileSync(file, Uint8Array.of(0x66, 0xff));
    expect(await generate(['--model', run, '--prompt-file', file])).toMatchObject({
      code: 2,
      err: `trefoil: ${file}: is not UTF-8 text; encode the prompt as UTF-8\n`,
    });
    const empty = await generate(['--model', run, '--prompt', 'a', '--stop', '']);
    expect(empty).toMatchObject({ code: 2, out: '' });
    expect(empty.err).toContain('stop: an empty text');
  });

  it('--help shows every flag', async () => {
    const { code, out } = await generate(['--help']);
    expect(code).toBe(0);
    const flags =
      'model adapter prompt prompt-file chat tools tool-choice system max-new-tokens max-context temperature top-k top-p min-p repetition-penalty frequency-penalty presence-penalty logit-bias seed greedy stop json-schema prefix-cache-dir device';
    const rest = ['precision', 'weights', 'threads', 'json', 'help'];
    const shown = Array.from(out.matchAll(/^ {2}(?:-\w, )?--([\w-]+)/gm), ([, name]) => name);
    expect(shown.sort()).toEqual([...flags.split(' '), ...rest].sort());
  });
});
