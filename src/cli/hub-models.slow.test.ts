/** Names of the hub where commands take a model, on a test hub with a real model. */
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Command } from 'commander';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { testFolder } from '../data/testing/folder.js';
import { byteLevelTokenizerJson } from '../data/testing/tokenizer-json.js';
import { LLAMA, writeHfFolder } from '../exchange/testing/hf-folder.js';
import { type HubServer, SHA, startHub } from '../hub/testing/hub-server.js';
import { runPaths } from '../run/paths.js';
import { readSafetensors, writeSafetensors } from '../run/safetensors.js';
import { ended, startTrefoil } from '../testing/cli.js';
import { COMMANDS, type SingleCommand } from './commands.js';
import { createIo } from './shared/io.js';
import { ModelArgument, ModelFlag } from './shared/options.js';
import { runCli } from './testing/run.js';

const folder = testFolder();
const NAME = 'hf:owner/llama';
const PINNED = `${NAME}@${SHA}`;
const before = { HF_HOME: process.env['HF_HOME'], HF_ENDPOINT: process.env['HF_ENDPOINT'] };
let server: HubServer;
let env: Record<string, string>;

beforeAll(async () => {
  const vocabulary = { vocab_size: 264, bos_token_id: 262, eos_token_id: [262] };
  const written = writeHfFolder(folder.path('llama'), { ...LLAMA, ...vocabulary });
  writeFileSync(join(written.folder, 'tokenizer.json'), JSON.stringify(byteLevelTokenizerJson()));
  const names = ['config.json', 'model.safetensors', 'tokenizer.json'];
  const files = new Map(names.map((name) => [name, readFileSync(join(written.folder, name))]));
  server = await startHub({ models: [{ name: 'owner/llama', files }] });
  env = { HF_HOME: folder.path('home'), HF_ENDPOINT: server.endpoint };
  Object.assign(process.env, env); // the cache is looked up where the model is loaded
});
afterAll(async () => {
  for (const [name, value] of Object.entries(before))
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  await server.close();
});

async function run(...argv: string[]) {
  const outcome = await runCli(argv, { env: { ...env, PATH: process.env['PATH']! } });
  expect(outcome.code, outcome.stderr).toBe(0);
  return outcome;
}

describe('a model of the hub by its name', () => {
  it('is what every option and argument for a model takes', async () => {
    const io = createIo(process.stdout, process.stderr, {});
    const all = COMMANDS.flatMap((entry): SingleCommand[] => ('commands' in entry ? [...entry.commands] : [entry]));
    const found: string[] = [];
    for (const { name, load } of all) {
      const command = new Command(name);
      (await load()).configure(command, io);
      for (const option of command.options) {
        const isModel = option.long === '--model' || /hf:owner\/name|further models/.test(option.description);
        if (isModel && !/data\.tokenizer/.test(option.description))
          found.push(`${name} ${option.long} ${option instanceof ModelFlag}`);
      }
      for (const argument of command.registeredArguments)
        if (argument.name() === 'model' || (/hf:/.test(argument.description) && name !== 'pull'))
          found.push(`${name} ${argument.name()} ${argument instanceof ModelArgument}`);
    }
    expect(found.length).toBeGreaterThan(12);
    expect(found.filter((line) => !line.endsWith('true'))).toEqual([]);
  });

  it('is downloaded by the first command and used by all', async () => {
    const ids = folder.path('ids.safetensors');
    writeSafetensors(ids, [
      { name: 'input_ids', dtype: 'I32', shape: [4], data: new Uint8Array(Int32Array.of(1, 2, 3, 4).buffer) },
    ]);
    const out = folder.path('logits.safetensors');
    const first = await run('eval', 'logits', '--model', NAME, '--in', ids, '--out', out, '--device', 'cpu');
    expect(first.stderr).toMatch(new RegExp(`${PINNED}: 0\\.\\d MB downloaded in .* s \\(3 files in all\\)`));
    const local = folder.path('local.safetensors');
    await run('eval', 'logits', '--model', folder.path('llama'), '--in', ids, '--out', local, '--device', 'cpu');
    expect(readSafetensors(out).tensors.get('logits')!.data).toEqual(
      readSafetensors(local).tensors.get('logits')!.data,
    );
    const asked = server.requests.filter((line) => line.includes('/resolve/')).length;
    const written = await run(
      'generate',
      '--model',
      NAME,
      '--prompt',
      'the',
      '--max-new-tokens',
      '4',
      '--device',
      'cpu',
    );
    expect(written.stderr).toContain(`${PINNED}: in the cache`);
    const text = folder.write('text.txt', 'the the the the the the '.repeat(20));
    const loss = await run(
      ...['eval', 'loss', '--model', NAME, '--compare', PINNED, '--local-path', text, '--dataset', 'text'],
      ...['--seq-len', '64', '--device', 'cpu', '--json'],
    );
    expect(JSON.parse(loss.stdout).models).toHaveLength(2);
    await run('import', 'hf', NAME, '--out', folder.path('imported'));
    await run('export', 'hf', NAME, '--out', folder.path('exported'));
    await run('convert', NAME, '--sparse', '--out', folder.path('sparse'), '--set', 'nsa.n_sel=4');
    for (const name of ['imported', 'exported', 'sparse'])
      expect(readFileSync(folder.path(name, 'tokenizer.json'), 'utf8'), name).toBe(
        readFileSync(folder.path('llama', 'tokenizer.json'), 'utf8'),
      );
    expect(server.requests.filter((line) => line.includes('/resolve/'))).toHaveLength(asked);
  });

  it('is what a run starts from; the run stores the commit and resumes with it', async () => {
    const out = folder.path('run');
    mkdirSync(folder.path('texts'));
    writeFileSync(folder.path('texts', 'a.txt'), 'the the the the the the '.repeat(400));
    const words = (steps: number, ...more: string[]) => [
      ...['train', '--config', 'base', '--dataset', 'text', '--local-path', folder.path('texts'), '--device', 'cpu'],
      ...['--set', `train.init_from=${NAME}`, '--set', `data.tokenizer=${NAME}`, '--set', 'data.vocab_size=264'],
      ...['--set', 'model.attention=dense', '--set', 'model.dim=32', '--set', 'model.n_layers=2'],
      ...['--set', 'model.n_heads=4', '--set', 'model.n_kv_groups=2', '--set', 'model.d_k=8', '--set', 'model.d_v=8'],
      ...[
        '--set',
        'model.mlp=swiglu',
        '--set',
        'model.mlp_hidden=44',
        '--set',
        'model.rope_theta=10000',
        '--set',
        'model.norm_eps=1e-5',
      ],
      ...['--set', 'model.tie_embeddings=false', '--seq-len', '32', '--batch-size', '1', '--out-dir', out],
      ...['--steps', String(steps), '--set', 'train.save_every=2', '--set', 'train.warmup_steps=0', ...more],
    ];
    const { stdout } = await run(...words(2));
    expect(stdout).toContain(`train.init_from: ${PINNED}`);
    expect(stdout).toContain('weights: from ');
    const stored = readFileSync(runPaths(out).config, 'utf8');
    expect(stored).toContain(`init_from: ${PINNED}`);
    expect(stored).toContain(`tokenizer: ${PINNED}`);
    // The same command goes on, even when the hub has another commit by now or is gone.
    server.dead = true;
    const resumed = await run(...words(4, '--resume', 'auto'));
    server.dead = false;
    expect(resumed.stdout).toMatch(/step 0004/);
    expect(readFileSync(runPaths(out).config, 'utf8')).toContain(`init_from: ${PINNED}`);
    expect(readFileSync(join(out, 'tokenizer.json'), 'utf8')).toContain('Ġ');
  });

  it('gives a run its shape with --from, also when it is not in the cache', async () => {
    const fresh = { HF_HUB_CACHE: folder.fresh() };
    Object.assign(process.env, fresh);
    try {
      const { code, stderr } = await runCli(
        ['train', '--from', NAME, '--local-path', folder.path('texts'), '--print-config', '--json'],
        { env: { ...env, ...fresh } },
      );
      expect(code, stderr).toBe(0);
      expect(stderr).toMatch(/hf:owner\/llama@\w+: 0\.\d MB downloaded/);
    } finally {
      delete process.env['HF_HUB_CACHE'];
    }
  });

  it('is served under its own name', async () => {
    const child = startTrefoil(['serve', '--model', NAME, '--device', 'cpu', '--port', '0'], env);
    try {
      const url = await new Promise<string>((resolve, reject) => {
        child.stdout!.on('data', (chunk) => {
          const found = /listening on (\S+)/.exec(String(chunk));
          if (found) resolve(found[1]);
        });
        child.once('close', (code) => reject(new Error(`ended with ${code}`)));
      });
      const models = (await (await fetch(`${url}/v1/models`)).json()) as { data: { id: string }[] };
      expect(models.data.map(({ id }) => id)).toEqual(['owner/llama']);
    } finally {
      child.kill('SIGTERM');
      await ended(child);
    }
  });
});
