/**
 * Every command and every subcommand of the real program, from end to end on a small model: it does its work, with code 0,
 * and `--json` prints exactly one JSON value of the promised shape. A new command without a row here fails.
 */
import { once } from 'node:events';
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it, type TestContext } from 'vitest';
import { stringify } from 'yaml';
import { BENCHES, COMMANDS, DATA_COMMANDS, EVALUATIONS, EXPORTS, IMPORTS } from '../src/cli/commands.js';
import { readSafetensors, writeSafetensors } from '../src/run/safetensors.js';
import { ended, root, startTrefoil, trefoil } from '../src/testing/cli.js';
import { GOLDEN_SMALL } from '../src/testing/golden.js';
import { mpirunAbsence } from '../src/testing/ranks.js';
import { temporaryFolder, tinyConfig } from '../src/testing/run.js';

let folder: { path: string; remove: () => void };
let configFile: string;
let model: string;
const at = (...names: string[]) => join(folder.path, ...names);

async function jsonOf(...words: string[]) {
  const { code, stdout, stderr } = await trefoil([...words, '--json']);
  expect(code, stderr).toBe(0);
  return JSON.parse(stdout);
}

beforeAll(async () => {
  folder = temporaryFolder();
  const train = { steps: 12, eval_every: 6, save_every: 6, out_dir: at('run') };
  configFile = at('config.yaml');
  writeFileSync(configFile, stringify(tinyConfig(folder.path, { train })));
  model = at('run');
  const { code, stderr } = await trefoil(['train', '--config', configFile]);
  expect(code, stderr).toBe(0);
  mkdirSync(at('documents'));
  const lines = Array.from({ length: 80 }, (_, i) => JSON.stringify({ text: `document ${i}: ${'word '.repeat(i)}` }));
  writeFileSync(at('documents', 'a.jsonl'), `${lines.join('\n')}\n`);
  writeFileSync(at('text.txt'), 'line 1 of a text to look at. '.repeat(20));
});
afterAll(() => folder.remove());

/** Starts a command that serves, asks it for `path`, and ends it by SIGTERM. Returns the status of the answer. */
async function statusFrom(path: string, ...words: string[]): Promise<number> {
  const child = startTrefoil([...words, '--port', '0']);
  const [line] = await once(child.stdout!.setEncoding('utf8'), 'data');
  const [, url] = /^listening on (http:\S+)/.exec(line) ?? expect.fail(`first line: ${line}`);
  const { status } = await fetch(url + path);
  child.kill('SIGTERM');
  expect(await ended(child)).toMatchObject({ code: 0 });
  return status;
}

/** A folder in the format of Hugging Face, exported once from a dense model. */
let exported: Promise<{ folder: string; result: unknown }> | null = null;
function hfFolder() {
  exported ??= (async () => {
    const file = at('dense.yaml');
    const train = { steps: 2, eval_every: 0, save_every: 0, out_dir: at('dense') };
    writeFileSync(file, stringify(tinyConfig(folder.path, { model: { attention: 'dense', mlp: 'swiglu' }, train })));
    expect((await trefoil(['train', '--config', file])).code).toBe(0);
    return { folder: at('hf'), result: await jsonOf('export', 'hf', at('dense'), '--out', at('hf')) };
  })();
  return exported;
}

const keys = (value: object) => Object.keys(value);
const rowKeys = (result: { rows: object[] }) => keys(result.rows[0]);
const documents = () => ['--dataset', 'files', '--local-path', at('documents')];

/** By command, or by command and subcommand. */
const ROWS: Readonly<Record<string, (context: TestContext) => Promise<void>>> = {
  train: async () => {
    const resumed = ['--config', configFile, '--resume', 'auto', '--steps', '14'];
    expect(await jsonOf('train', ...resumed)).toMatchObject({ status: 'done', step: 14 });
  },
  configs: async () => {
    const { configs, profiles } = await jsonOf('configs');
    const names = configs.map(({ name }: { name: string }) => name);
    expect(names).toEqual(expect.arrayContaining(['base', 'quickstart', '125m_80g']));
    for (const { name, description } of [...configs, ...profiles]) {
      expect(description, name).toMatch(/^[A-Z0-9]/);
      expect(description.length, name).toBeLessThan(110);
    }
    const printed = await trefoil(['configs', 'quickstart']);
    expect(printed.stdout).toBe(readFileSync(join(root, 'configs', 'quickstart.yaml'), 'utf8'));
    expect(await jsonOf('configs', 'quickstart')).toMatchObject({
      name: 'quickstart',
      description: expect.stringMatching(/^The first run/),
      config: { data: { source: 'stories' } },
    });
  },
  launch: async ({ skip }) => {
    const absence = mpirunAbsence();
    if (absence) skip(absence);
    const words = ['train', '--config', configFile, '--steps', '2', '--out-dir', at('two')];
    const { code, stdout, stderr } = await trefoil(['launch', '-n', '2', '--', ...words]);
    expect(code, stderr).toBe(0);
    expect(stdout).toMatch(/^\[0\] step 0002 \| loss /m);
    expect(stderr).toMatch(/^launch: starting 2 ranks with mpirun\n/);
  },
  generate: async () => {
    const words = ['--model', model, '--prompt', 'line ', '--max-new-tokens', '5', '--greedy'];
    expect(await jsonOf('generate', ...words)).toMatchObject({ prompt: 'line ', tokens: 5, text: expect.any(String) });
  },
  chat: async () => {
    const { code, stderr } = await trefoil(['chat', '--model', model, '--prompt', 'Hello']);
    expect(code).toBe(2);
    expect(stderr).toContain(
      'tokenizer byte has no chat template; put a chat_template.jinja beside its tokenizer.json',
    );
  },
  serve: async () => expect(await statusFrom('/v1/models', 'serve', '--model', model)).toBe(200),
  dashboard: async () => expect(await statusFrom('/', 'dashboard', '--dir', folder.path)).toBe(200),
  'bench serve': async () => {
    const load = ['--requests', '4', '--concurrency', '2', '--prompt-tokens', '8', '--output-tokens', '4'];
    expect(await jsonOf('bench', 'serve', '--model', model, ...load)).toMatchObject({ requests: 4, completed: 4 });
  },
  'eval loss': async () => {
    const words = ['--model', model, '--dataset', 'text', '--local-path', at('text.txt'), '--seq-len', '64'];
    const { loss, perplexity } = await jsonOf('eval', 'loss', ...words);
    expect(Math.abs(perplexity / Math.exp(loss) - 1)).toBeLessThan(1e-6);
  },
  'eval needle': async () => {
    const words = [
      '--lengths',
      '64',
      '--depths',
      '0,100',
      '--trials',
      '2',
      '--records',
      '2',
      '--out-dir',
      at('needle'),
    ];
    await jsonOf('eval', 'needle', '--model', model, ...words);
    expect(readFileSync(at('needle', 'needle.svg'), 'utf8')).toMatch(/^<svg /);
    expect(JSON.parse(readFileSync(at('needle', 'needle.json'), 'utf8'))).toHaveProperty('rows');
  },
  'eval long': async () => {
    const words = [
      '--text-file',
      at('text.txt'),
      '--lengths',
      '400',
      '--depths',
      '50',
      '--trials',
      '1',
      '--tasks',
      'single',
    ];
    const { rows } = await jsonOf('eval', 'long', '--model', model, ...words);
    expect(rows).toHaveLength(1);
  },
  'eval selection': async () => {
    const words = ['--text-file', at('text.txt'), '--out-dir', at('selection')];
    await jsonOf('eval', 'selection', '--model', model, ...words);
    for (const name of ['selection.svg', 'gates.svg'])
      expect(readFileSync(at('selection', name), 'utf8')).toMatch(/^<svg /);
  },
  'export hf': async () => {
    const { folder: out, result } = await hfFolder();
    expect(result).toMatchObject({ architecture: 'LlamaForCausalLM', files: 1 });
    expect(JSON.parse(readFileSync(join(out, 'config.json'), 'utf8'))).toMatchObject({ model_type: 'llama' });
  },
  'import hf': async () => {
    const { folder: from } = await hfFolder();
    const result = await jsonOf('import', 'hf', from, '--out', at('imported'));
    expect(result).toMatchObject({ folder: at('imported'), architecture: 'LlamaForCausalLM' });
  },
  convert: async () => {
    await hfFolder();
    const result = await jsonOf('convert', '--sparse', at('dense'), '--out', at('sparse'), '--context', '200');
    expect(keys(result)).toEqual(['folder', 'parameters', 'bytes', 'seconds', 'exact_tokens', 'nsa', 'companions']);
    expect(result).toMatchObject({ folder: at('sparse'), exact_tokens: 208, nsa: { n_sel: 13, cmp_rope: 'before' } });
    const prompt = ['--prompt', 'line ', '--max-new-tokens', '4', '--greedy'];
    const [dense, sparse] = [at('dense'), at('sparse')].map((path) => jsonOf('generate', '--model', path, ...prompt));
    expect((await sparse).text).toBe((await dense).text);
  },
  'eval logits': async () => {
    const data = new Uint8Array(Int32Array.of(1, 2, 3).buffer);
    writeSafetensors(at('ids.safetensors'), [{ name: 'input_ids', dtype: 'I32', shape: [3], data: () => data }]);
    const { code, stderr } = await trefoil([
      'eval',
      'logits',
      '--model',
      model,
      '--in',
      at('ids.safetensors'),
      '--out',
      at('logits.safetensors'),
    ]);
    expect(code, stderr).toBe(0);
    expect(readSafetensors(at('logits.safetensors')).tensors.get('logits')!.shape).toEqual([3, 256]);
  },
  'bench attention': async () => {
    const small = ['--heads', '2', '--groups', '1', '--dim', '16', '--lengths', '64', '--quick'];
    const result = await jsonOf('bench', 'attention', ...small);
    expect(keys(result)).toEqual(['machine', 'device', 'threads', 'peak_gflops', 'rows']);
    expect(rowKeys(result)).toEqual([
      ...['what', 'pass', 'kernel', 'S', 'sequences', 'ms', 'gflops', 'peak_share', 'extra_bytes'],
    ]);
  },
  'bench train': async () => {
    const result = await jsonOf('bench', 'train', '--config', configFile, '--seq-len', '64', '--quick');
    expect(keys(result)).toEqual(['machine', 'device', 'threads', 'peak_gflops', 'rows']);
    expect(rowKeys(result)).toEqual([
      ...['config', 'attention', 'kernel', 'S', 'batch', 'tokens_per_s', 'ms_step', 'mfu', 'mfu_palm'],
      ...['peak_mem_mib', 'params', 'layers', 'precision', 'hfu'],
    ]);
  },
  'bench decode': async () => {
    const result = await jsonOf('bench', 'decode', '--config', configFile, '--lengths', '64', '--quick');
    expect(rowKeys(result)).toEqual([
      ...['S', 'batch', 'ms_total', 'ms_cmp', 'ms_sel', 'ms_win', 'ms_dense'],
      ...['reads_measured', 'reads_predicted', 'tokens_per_s'],
    ]);
  },
  'bench prefill': async () => {
    const { rows } = await jsonOf('bench', 'prefill', '--config', configFile, '--lengths', '64', '--quick');
    expect(rows[0]).toMatchObject({ S: 64, ms_total: expect.any(Number), ms_dense: expect.any(Number) });
  },
  'data smoke': async () => {
    const result = await jsonOf('data', 'smoke', ...documents(), '--seq-len', '32', '--batches', '2');
    expect(result).toMatchObject({ ok: true, source: 'files', batches: 2, tokens: 64 });
  },
  'data bootstrap': async () => {
    const result = await jsonOf('data', 'bootstrap', ...documents(), '--bytes', '2KB', '--out', at('staged'));
    expect(result).toMatchObject({ files: 1, exhausted: false });
  },
  'data prepare': async () => {
    const result = await jsonOf('data', 'prepare', ...documents(), '--tokenizer', 'gpt2', '--out', at('shards'));
    expect(result).toMatchObject({ documents: 80 });
  },
  'data join': async () => {
    for (const part of ['1/2', '2/2'])
      await jsonOf('data', 'prepare', ...documents(), '--tokenizer', 'byte', '--out', at('parts'), '--part', part);
    expect(await jsonOf('data', 'join', '--out', at('parts'))).toMatchObject({ documents: 80, shards: 1 });
  },
  'data tokenizer': async () => {
    const result = await jsonOf('data', 'tokenizer', ...documents(), '--vocab-size', '262', '--out', at('tokenizer'));
    expect(result).toMatchObject({ vocab_size: 262, documents: 80 });
  },
  'data cache': async () => {
    expect(keys(await jsonOf('data', 'cache'))).toEqual(['folder', 'bytes', 'entries', 'removed']);
  },
  'data inspect': async () => {
    const result = await jsonOf('data', 'inspect', ...documents(), '--samples', '1');
    expect(result).toMatchObject({ documents: 80, tokenizer: 'byte' });
    expect(result.samples).toHaveLength(1);
  },
  attend: async () => {
    await jsonOf('attend', '--in', GOLDEN_SMALL, '--out', at('out.safetensors'), '--device', 'cpu');
    expect([...readSafetensors(at('out.safetensors')).tensors.keys()].sort()).toEqual(
      [
        ...['out', 'o_cmp', 'o_sel', 'o_win', 'selected', 'dq', 'dk_cmp', 'dv_cmp', 'dk_sel', 'dv_sel'],
        ...['dk_win', 'dv_win', 'd_gates'],
      ].sort(),
    );
  },
  doctor: async () => {
    const result = await jsonOf('doctor', '--config', 'quickstart');
    expect(result.ok).toBe(true);
    expect(rowKeys(result)).toEqual(['check', 'level', 'found', 'remedy']);
  },
  plan: async () => {
    const { rows } = await jsonOf('plan', '--gpus', '16');
    expect(rows.map(({ gpus }: { gpus: number }) => gpus)).toContain(16);
  },
  status: async () => {
    const { runs } = await jsonOf('status', '--dir', model);
    expect(runs[0]).toMatchObject({ run: 'run', state: 'ended' });
  },
  watch: async () => expect(rowKeys(await jsonOf('watch', '--once', '--dir', model))).toEqual(RULE),
  health: async () => expect(rowKeys(await jsonOf('health', '--dir', model))).toEqual(RULE),
  check: async () => expect(rowKeys(await jsonOf('check', '--dir', model))).toEqual(RULE),
  halt: async () => expect(await jsonOf('halt', '--dir', model)).toMatchObject({ status: 'ended' }),
  backup: async () => {
    await jsonOf('backup', '--dir', model, '--out', at('run.tar.gz'));
    expect([...readFileSync(at('run.tar.gz')).subarray(0, 2)]).toEqual([0x1f, 0x8b]);
  },
  report: async () => {
    const { runs } = await jsonOf('report', '--dir', model, '--out', at('report'));
    expect(runs).toHaveLength(1);
    expect(readFileSync(at('report', 'report.md'), 'utf8')).toContain('# Training report');
  },
};
const RULE = ['rule', 'level', 'value', 'limit'];

const GROUPS = new Map([
  ['bench', BENCHES],
  ['eval', EVALUATIONS],
  ['data', DATA_COMMANDS],
  ['import', IMPORTS],
  ['export', EXPORTS],
]);
const all = COMMANDS.flatMap(({ name }) => GROUPS.get(name)?.map((second) => `${name} ${second.name}`) ?? [name]);

/** Commands that take long are run as programs in other tests, and not twice. */
const ELSEWHERE: Readonly<Record<string, readonly [file: string, command: string]>> = {
  start: ['test/readme.slow.test.ts', 'npm start'],
  verify: ['test/package.slow.test.ts', "'verify', '--json'"],
  pull: ['src/hub/pull.slow.test.ts', "'pull', "],
  // As JSON in src/cli/data/data.slow.test.ts.
  'bench data': ['test/terminal.slow.test.ts', "'bench', 'data'"],
};

describe('the real program', () => {
  it('has a row here for every command, or a test elsewhere', () => {
    expect([...Object.keys(ROWS), ...Object.keys(ELSEWHERE)].sort()).toEqual([...all].sort());
    for (const [file, command] of Object.values(ELSEWHERE))
      expect(readFileSync(join(root, file), 'utf8')).toContain(command);
  });

  it.for(Object.keys(ROWS))('%s', (name, context) => ROWS[name](context));
});
