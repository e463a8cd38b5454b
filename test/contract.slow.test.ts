/**
 * Every key of the config in a real run: each changes the numbers, or the files, or what is said, or is refused or
 * warned of by its name. A key that is read and forgotten fails here, and so does a new key without a row.
 * (src/config/contract.test.ts walks the names: keys, flags and variables into the resolved config.)
 */
import { existsSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { deviceOptions } from '../src/cli/train.js';
import { configKeys } from '../src/config/keys.js';
import { readConfig } from '../src/config/load.js';
import { CpuDevice } from '../src/device/cpu/cpu.js';
import { tailHeartbeats } from '../src/run/logs/heartbeat.js';
import { type RunPaths, runPaths } from '../src/run/paths.js';
import { trefoil } from '../src/testing/cli.js';
import { runTraining, type TinyOverrides, temporaryFolder, tinyConfig } from '../src/testing/run.js';

interface Seen {
  readonly losses: readonly number[];
  readonly said: string;
  readonly warned: string;
  readonly paths: RunPaths;
  readonly weights: string;
  readonly peakBytes: number;
}

let folder: { path: string; remove: () => void };
let baseline: Seen;
let runs = 0;
/** One for all runs, with a pool of its own: no run is going on beside another, so its peak is that of one run. */
const device = new CpuDevice();

const BASE = { train: { steps: 3, seq_len: 96, log_every: 1, eval_every: 3, save_every: 1, warmup_steps: 1 } };

function merged(changes: TinyOverrides): TinyOverrides {
  return { ...changes, train: { ...BASE.train, ...changes.train } };
}

async function trained(changes: TinyOverrides = {}): Promise<Seen> {
  const outDir = join(folder.path, `run-${runs++}`);
  const overrides = merged(changes);
  const config = tinyConfig(folder.path, { ...overrides, train: { out_dir: outDir, ...overrides.train } });
  const losses: number[] = [];
  device.pool.trim();
  device.pool.resetPeak();
  const { said, warned } = await runTraining(config, { device, onStep: ({ loss }) => losses.push(loss) });
  const paths = runPaths(config.train.out_dir);
  const weights = readFileSync(paths.model, 'base64');
  const peakBytes = device.pool.peakBytesInUse;
  return { losses, peakBytes, said: said.join('\n'), warned: warned.join('\n'), paths, weights };
}

/** The run that a key is compared with; trained once for all keys that share it. */
const bases = new Map<string, Promise<Seen>>();
function baseOf(against: TinyOverrides | undefined): Promise<Seen> {
  if (!against) return Promise.resolve(baseline);
  const name = JSON.stringify(against);
  const base = bases.get(name) ?? trained(placed(against));
  bases.set(name, base);
  return base;
}

beforeAll(async () => {
  process.env['HF_ENDPOINT'] = 'http://127.0.0.1:9'; // nothing listens there
  folder = temporaryFolder();
  baseline = await trained();
  writeFileSync(
    join(folder.path, 'docs.jsonl'),
    Array.from(
      { length: 60 },
      (_, i) => `${JSON.stringify({ text: `${i} text `.repeat(40), body: `${i} body `.repeat(40) })}\n`,
    ).join(''),
  );
});
afterAll(() => folder.remove());

/** Effect of a key: changes the numbers of the run, or leaves them (`same`: bit for bit) and shows elsewhere. */
type Effect =
  | { readonly kind: 'numbers'; readonly against?: TinyOverrides }
  | {
      readonly kind: 'same' | 'shown';
      readonly shows: (seen: Seen, baseline: Seen) => void;
      readonly against?: TinyOverrides;
    }
  | { readonly kind: 'refused'; readonly message: string };

const numbers: Effect = { kind: 'numbers' };
const numbersAgainst = (against: TinyOverrides): Effect => ({ kind: 'numbers', against });
const same = (shows: (seen: Seen, baseline: Seen) => void): Effect => ({ kind: 'same', shows });
const shown = (shows: (seen: Seen) => void): Effect => ({ kind: 'shown', shows });
const refused = (message: string): Effect => ({ kind: 'refused', message });
const warns = (path: string) => same(({ warned }) => expect(warned).toContain(path));
const says = (text: string | RegExp) => same(({ said }) => expect(said).toMatch(text));
const steps = (paths: RunPaths) =>
  readdirSync(paths.checkpoints)
    .filter((name) => name.startsWith('step-'))
    .sort();
/** A hub without a server: the request shows in the refusal. */
const HUB = { source: 'hub', loader_timeout: 1 };
/** Streamed from a folder; how it is read ahead must not change what is read. */
const STREAM = { source: 'files', path: 'stream' };
const sameStream: Effect = { kind: 'same', shows: () => {}, against: { data: STREAM } };
const STORIES = { source: 'stories', tokenizer: 'stories' };
const NEEDLE = { source: 'needle', needle_records: 2, needle_facts: 2 };
const SPIKE = { steps: 40, spike_z: 0.5, eval_every: 0, save_every: 0 };

const LLAMA3 = { rope_type: 'llama3', rope_factor: 8, rope_original_context: 32 } as const;
/** Blocks of 8 tokens of which one is chosen by its score. */
const POOLED = { l: 4, d: 2, l_sel: 8, n_sel: 3, init_blocks: 1, local_blocks: 1 };
const OWN_BLOCK = { l: 4, d: 4, l_sel: 4, n_sel: 4, init_blocks: 0, local_blocks: 1 };
const YARN = { rope_type: 'yarn', rope_factor: 4, rope_original_context: 64 } as const;

/** Key, what to change, and what must come of it. */
const KEYS: Readonly<Record<string, readonly [TinyOverrides, Effect]>> = {
  'model.dim': [{ model: { dim: 48 } }, numbers],
  'model.n_layers': [{ model: { n_layers: 1 } }, numbers],
  'model.n_heads': [{ model: { n_heads: 2 } }, numbers],
  'model.n_kv_groups': [{ model: { n_kv_groups: 1 } }, numbers],
  'model.d_k': [{ model: { d_k: 16 } }, numbers],
  'model.d_v': [{ model: { d_v: 16 } }, numbers],
  'model.mlp': [{ model: { mlp: 'swiglu' } }, numbers],
  'model.mlp_ratio': [{ model: { mlp_ratio: 3 } }, numbers],
  'model.mlp_hidden': [{ model: { mlp_hidden: 37 } }, numbers],
  'model.qkv_bias': [{ model: { qkv_bias: true } }, numbers],
  'model.qk_norm': [{ model: { qk_norm: true } }, numbers],
  'model.out_bias': [{ model: { out_bias: true } }, numbers],
  'model.mlp_bias': [{ model: { mlp_bias: true } }, numbers],
  'model.tie_embeddings': [{ model: { tie_embeddings: true } }, numbers],
  'model.layer_pattern': [{ model: { layer_pattern: ['window', 'nsa'] } }, numbers],
  'model.attention': [{ model: { attention: 'dense' } }, numbers],
  'model.rope_theta': [{ model: { rope_theta: 500 } }, numbers],
  'model.rope_scale': [{ model: { rope_scale: 2 } }, numbers],
  'model.rope_type': [{ model: { rope_type: 'yarn', rope_factor: 4 } }, numbers],
  'model.rope_factor': [{ model: { ...YARN, rope_factor: 2 } }, numbersAgainst({ model: YARN })],
  // src/ops/rope/frequencies.test.ts compares the table with the formulas.
  'model.rope_original_context': [
    { model: { ...LLAMA3, rope_original_context: 16 } },
    numbersAgainst({ model: LLAMA3 }),
  ],
  'model.rope_low_freq_factor': [
    { model: { ...LLAMA3, rope_low_freq_factor: 0.5 } },
    numbersAgainst({ model: LLAMA3 }),
  ],
  'model.rope_high_freq_factor': [
    { model: { ...LLAMA3, rope_high_freq_factor: 8 } },
    numbersAgainst({ model: LLAMA3 }),
  ],
  'model.rope_beta_fast': [
    { model: { ...YARN, rope_original_context: 4096, rope_beta_fast: 2 } },
    numbersAgainst({ model: { ...YARN, rope_original_context: 4096 } }),
  ],
  'model.rope_beta_slow': [{ model: { ...YARN, rope_beta_slow: 2 } }, numbersAgainst({ model: YARN })],
  'model.rope_attention_factor': [{ model: { ...YARN, rope_attention_factor: 2 } }, numbersAgainst({ model: YARN })],
  'model.vocab_size': [{ model: { vocab_size: 300 } }, numbers],
  'model.norm_eps': [{ model: { norm_eps: 1e-2 } }, numbers],
  'nsa.l': [{ nsa: { l: 16 } }, numbers],
  'nsa.d': [{ nsa: { d: 8 } }, numbers],
  'nsa.l_sel': [{ nsa: { l_sel: 8 } }, numbers],
  'nsa.n_sel': [{ nsa: { n_sel: 3 } }, numbers],
  'nsa.init_blocks': [{ nsa: { init_blocks: 0 } }, numbers],
  'nsa.local_blocks': [{ nsa: { local_blocks: 1 } }, numbers],
  'nsa.selection': [{ nsa: { ...OWN_BLOCK, selection: 'chunked' } }, numbersAgainst({ nsa: OWN_BLOCK })],
  'nsa.score_pool': [{ nsa: { ...POOLED, score_pool: 'max' } }, numbersAgainst({ nsa: POOLED })],
  'nsa.w': [{ nsa: { w: 4 } }, numbers],
  'nsa.shared_kv': [{ nsa: { shared_kv: true } }, numbers],
  'nsa.phi': [{ nsa: { phi: 'mlp' } }, numbers],
  'nsa.phi_hidden': [{ nsa: { phi: 'mlp', phi_hidden: 24 } }, numbersAgainst({ nsa: { phi: 'mlp' } })],
  'nsa.cmp_rope': [{ nsa: { cmp_rope: 'before' } }, numbers],
  'nsa.gate': [{ nsa: { gate: 'sigmoid' } }, numbers],
  'nsa.gate_temp': [{ nsa: { gate_temp: 0.25 } }, numbers],
  'nsa.rope': [{ nsa: { cmp_rope: 'none', rope: 'window' } }, numbersAgainst({ nsa: { cmp_rope: 'none' } })],
  'nsa.force_branch': [{ nsa: { force_branch: 'win' } }, numbers],
  'nsa.force_uniform_gate': [{ nsa: { force_uniform_gate: true } }, numbers],
  'nsa.stopgrad_gates': [{ nsa: { stopgrad_gates: true } }, numbers],
  'data.source': [{ data: { source: 'synthetic' } }, numbers],
  'data.sources': [
    {
      data: {
        source: 'mixture',
        sources: [
          { name: 'noise', source: 'synthetic', weight: 0.5 },
          { name: 'tales', source: 'stories', weight: 0.5 },
        ],
      },
    },
    numbers,
  ],
  'data.path': [{ data: { source: 'jsonl', path: 'docs.jsonl' } }, numbers],
  'data.tokenizer': [{ data: { tokenizer: 'gpt2' } }, numbers],
  'data.val_fraction': [{ data: { val_fraction: 0.5 } }, numbers],
  // Training takes all of data.path then, as it does with val_fraction 0.
  'data.val_path': [
    { data: { source: 'jsonl', path: 'docs.jsonl', val_path: 'docs.jsonl' } },
    numbersAgainst({ data: { source: 'jsonl', path: 'docs.jsonl' } }),
  ],
  'data.document_mask': [{ data: { document_mask: true } }, numbers],
  'data.shuffle': [{ data: { shuffle: false } }, numbers],
  'data.seed': [{ data: { seed: 99 } }, numbers],
  'data.split_seed': [{ data: { split_seed: 99 } }, numbers],
  'data.text_field': [
    { data: { source: 'jsonl', path: 'docs.jsonl', text_field: 'body' } },
    numbersAgainst({ data: { source: 'jsonl', path: 'docs.jsonl' } }),
  ],
  'data.vocab_size': [
    { data: { source: 'synthetic', vocab_size: 100 } },
    numbersAgainst({ data: { source: 'synthetic' } }),
  ],
  'data.needle_records': [{ data: { ...NEEDLE, needle_records: 1 } }, numbersAgainst({ data: NEEDLE })],
  'data.needle_facts': [{ data: { ...NEEDLE, needle_facts: 1 } }, numbersAgainst({ data: NEEDLE })],
  'data.needle_questions': [{ data: { ...NEEDLE, needle_questions: 1 } }, numbersAgainst({ data: NEEDLE })],
  'data.needle_absent': [{ data: { ...NEEDLE, needle_absent: 2 } }, numbersAgainst({ data: NEEDLE })],
  'data.stories_drills': [{ data: { ...STORIES, stories_drills: 1000 } }, numbersAgainst({ data: STORIES })],
  'data.needle_curriculum': [{ data: { ...NEEDLE, needle_curriculum: '48:2' } }, numbersAgainst({ data: NEEDLE })],
  'data.doc_batch': [{ data: { ...STREAM, doc_batch: 2 } }, sameStream],
  'data.prefetch': [{ data: { ...STREAM, prefetch: false } }, sameStream],
  'data.queue': [{ data: { ...STREAM, queue: 1 } }, sameStream],
  'data.warmup_batches': [{ data: { ...STREAM, warmup_batches: 2 } }, sameStream],
  'data.warmup_timeout': [{ data: { ...STREAM, warmup_batches: 2, warmup_timeout: 5 } }, sameStream],
  'data.workers': [{ data: { ...STREAM, workers: 1 } }, sameStream],
  'data.cache_gb': [{ data: { ...STREAM, cache_gb: 0.5 } }, sameStream], // a folder needs none; src/data/sources/range-cache.test.ts tests the limit
  'data.hub_dataset': [{ data: { ...HUB, hub_dataset: 'some/where' } }, refused('some/where')],
  'data.hub_revision': [{ data: { ...HUB, hub_revision: 'v7' } }, refused('v7')],
  // Read when the dataset is there: src/data/sources/hub.test.ts chooses both from a hub of its own.
  'data.hub_config': [{ data: { ...HUB, hub_config: 'sample' } }, refused('api/datasets')],
  'data.hub_split': [{ data: { ...HUB, hub_split: 'test' } }, refused('api/datasets')],
  // Too short for anything to be read.
  'data.loader_timeout': [{ data: { path: 'many', loader_timeout: 1e-6 } }, refused('--loader-timeout')],
  'data.report_docs': [
    { data: { path: 'other', report_docs: 10 } },
    shown(({ said }) => expect(said).toMatch(/^tokenised \d+ documents/m)),
  ],
  'data.synthetic_on_fail': [
    { data: { ...HUB, synthetic_on_fail: true } },
    { kind: 'numbers' }, // and the warning and heartbeats of train.test.ts
  ],
  'runtime.device': [{}, refused('--device cuda')],
  'runtime.precision': [{ runtime: { precision: 'bf16' } }, warns('runtime.precision')],
  'runtime.fp8': [{ runtime: { fp8: true } }, refused('runtime.fp8')], // the CPU has none; src/ops/linear/fp8.slow.test.ts
  'runtime.gradient_checkpointing': [
    { runtime: { gradient_checkpointing: true } },
    same((seen, base) => expect(seen.peakBytes).toBeLessThan(0.8 * base.peakBytes)),
  ],
  'runtime.deterministic': [{ runtime: { deterministic: true } }, same(() => {})], // the CPU always is
  'runtime.cuda_graph': [{ runtime: { cuda_graph: false } }, same(() => {})], // CUDA's
  'runtime.profile': [
    {},
    same(() => expect(readConfig('base', { runtime: { profile: 'cpu' } }).runtime.device).toBe('cpu')),
  ],
  'runtime.threads': [
    { runtime: { threads: 1 } },
    // The device is handed in here; that its threads leave the bits alone is every operation's test.
    same(() => expect(deviceOptions(readConfig('base', { runtime: { threads: 3 } }))).toMatchObject({ threads: 3 })),
  ],
  'runtime.selection_kernel': [{ runtime: { selection_kernel: 'v2', print_kernels: true } }, says('sel = v2')],
  'runtime.selection_v2_min_len': [{ runtime: { selection_v2_min_len: 32, print_kernels: true } }, says('sel = v2')],
  'runtime.prefill_tile': [{ runtime: { prefill_tile: 64 } }, same(() => {})], // of prompts
  'runtime.reference_kernels': [{ runtime: { reference_kernels: true } }, numbers], // other roundings
  'runtime.strict_asserts': [{ runtime: { strict_asserts: true } }, same(() => {})], // strict.test.ts breaks what it guards
  'runtime.debug_compare': [{ runtime: { debug_compare: true } }, says(/^compare 1 \| largest distance/m)],
  'runtime.debug_timing': [{ runtime: { debug_timing: true } }, says(/^timing 1 \| fetch/m)],
  'runtime.print_kernels': [{ runtime: { print_kernels: true } }, says(/^attention kernels at S = 96/m)],
  'runtime.fused': [{ runtime: { fused: false } }, warns('runtime.fused:')],
  'runtime.fused_min_len': [{ runtime: { fused_min_len: 64 } }, warns('runtime.fused_min_len')],
  'runtime.tensorboard': [
    { runtime: { tensorboard: false } },
    same(({ paths }) => expect(existsSync(paths.tensorboard)).toBe(false)),
  ],
  'runtime.csv_logs': [
    { runtime: { csv_logs: false } },
    same(({ paths }) => expect(existsSync(paths.training)).toBe(false)),
  ],
  'runtime.aux_stats': [
    { runtime: { aux_stats: false } },
    same(({ paths }) =>
      expect(tailHeartbeats(paths.heartbeat(0), 9).some((beat) => beat.gate_entropy_mean !== undefined)).toBe(false),
    ),
  ],
  'train.steps': [{ train: { steps: 4 } }, numbers],
  'train.seq_len': [{ train: { seq_len: 64 } }, numbers],
  'train.batch_size': [{ train: { batch_size: 3 } }, numbers],
  'train.accumulate_grad_batches': [{ train: { accumulate_grad_batches: 2 } }, numbers],
  'train.lr': [{ train: { lr: 1e-3 } }, numbers],
  'train.lr_min_ratio': [{ train: { lr_min_ratio: 0.9 } }, numbers],
  'train.lr_schedule': [{ train: { lr_schedule: 'constant' } }, numbers],
  'train.warmup_steps': [{ train: { warmup_steps: 0 } }, numbers],
  'train.wsd_decay_fraction': [
    { train: { lr_schedule: 'wsd', wsd_decay_fraction: 0.9 } },
    numbersAgainst({ train: { lr_schedule: 'wsd' } }),
  ],
  'train.weight_decay': [{ train: { weight_decay: 0.5 } }, numbers],
  'train.optimizer': [{ train: { optimizer: 'muon' } }, numbers],
  'train.muon_momentum': [
    { train: { optimizer: 'muon', muon_momentum: 0.5 } },
    numbersAgainst({ train: { optimizer: 'muon' } }),
  ],
  'train.muon_lr_ratio': [
    { train: { optimizer: 'muon', muon_lr_ratio: 2 } },
    numbersAgainst({ train: { optimizer: 'muon' } }),
  ],
  'train.betas': [{ train: { betas: [0.5, 0.9] } }, numbers],
  'train.eps': [{ train: { eps: 1e-3 } }, numbers],
  'train.grad_clip': [{ train: { grad_clip: 1e-9 } }, numbers],
  'train.log_every': [
    { train: { log_every: 2 } },
    same(({ paths }) => expect(readFileSync(paths.training, 'utf8').split('\n')).toHaveLength(5)), // 1, 2, 3
  ],
  'train.eval_every': [
    { train: { eval_every: 1 } },
    same(({ paths }) => expect(readFileSync(paths.val, 'utf8').split('\n')).toHaveLength(5)),
  ],
  'train.eval_batches': [
    { train: { eval_batches: 1 } },
    same(({ paths }, base) => expect(readFileSync(paths.val, 'utf8')).not.toBe(readFileSync(base.paths.val, 'utf8'))),
  ],
  'train.save_every': [
    { train: { save_every: 2 } },
    same(({ paths }) => expect(steps(paths)).toEqual(['step-2', 'step-3'])),
  ],
  'train.keep_last': [{ train: { keep_last: 1 } }, same(({ paths }) => expect(steps(paths)).toEqual(['step-3']))],
  'train.seed': [{ train: { seed: 7 } }, numbers],
  // src/train/init-from.slow.test.ts has what it does.
  'train.init_from': [{ train: { init_from: 'nowhere' } }, refused('train.init_from: nowhere')],
  'train.trainable': [{ train: { trainable: ['norm'] } }, numbers],
  // src/train/lora.slow.test.ts has what it does.
  'train.lora': [{ train: { lora: { rank: 2 } } }, refused('train.lora: adapters need a model that they adapt')],
  // test/slow-saves.slow.test.ts has what it does.
  'train.async_save': [
    { train: { async_save: false } },
    same(({ paths }) => expect(steps(paths)).toEqual(['step-1', 'step-2', 'step-3'])),
  ],
  // src/train/sparse-start.test.ts has what they do to a converted model.
  'train.gate_release_steps': [{ train: { gate_release_steps: 2 } }, refused('train.gate_release_steps: the gates of')],
  'train.gate_release_share': [
    { train: { gate_release_steps: 2, gate_release_share: 0.5 } },
    refused('train.gate_release_steps: the gates of'),
  ],
  'train.n_sel_from': [
    { nsa: { n_sel: 3 }, train: { n_sel_from: 4, n_sel_steps: 2 } },
    numbersAgainst({ nsa: { n_sel: 3 } }),
  ],
  'train.n_sel_steps': [
    { nsa: { n_sel: 3 }, train: { n_sel_from: 4, n_sel_steps: 1 } },
    numbersAgainst({ nsa: { n_sel: 3 }, train: { n_sel_from: 4, n_sel_steps: 3 } }),
  ],
  'train.scorer_loss': [{ train: { scorer_loss: 0.5 } }, numbersAgainst({})],
  'train.out_dir': [
    { train: { out_dir: 'elsewhere' } },
    same(({ paths }) => expect(paths.model).toMatch(/elsewhere\/model/)),
  ],
  'train.spike_skip': [{ train: { ...SPIKE, spike_skip: true } }, numbersAgainst({ train: SPIKE })],
  'train.spike_z': [{ train: SPIKE }, shown(({ warned }) => expect(warned).toMatch(/^spike at step/m))],
  'train.sample_every': [{ train: { sample_every: 2 } }, says(/^sample 2 \| /m)],
  'train.ddp': [{ train: { ddp: 1 } }, refused('train.ddp')],
  // Their effect on several ranks is tested in test/ranks.slow.test.ts.
  'train.ddp_safe': [{ train: { ddp_safe: true } }, warns('train.ddp_safe')],
  'train.bucket_mb': [{ train: { bucket_mb: 1 } }, warns('train.bucket_mb')],
  'train.wire': [{ train: { wire: 'bf16' } }, warns('train.wire')],
  'train.zero': [{ train: { zero: 1 } }, warns('train.zero')],
  'train.hash_every': [{ train: { hash_every: 1 } }, warns('train.hash_every')],
};

/** Relative paths of a row lie in the folder of this test. */
function placed({ data, train, ...rest }: TinyOverrides): TinyOverrides {
  const path = data?.['path'];
  if (path === 'many' || path === 'other' || path === 'stream') writeDocuments(String(path));
  const outDir = train?.['out_dir'];
  const paths = Object.fromEntries(
    ['path', 'val_path'].filter((key) => data?.[key]).map((key) => [key, join(folder.path, String(data![key]))]),
  );
  return {
    ...rest,
    ...(data && { data: { ...data, ...paths } }),
    ...(train && { train: { ...train, ...(outDir !== undefined && { out_dir: join(folder.path, String(outDir)) }) } }),
  };
}

/** Text that no cache has seen: the loader must read it. */
function writeDocuments(name: string): void {
  mkdirSync(join(folder.path, name), { recursive: true });
  for (let i = 0; i < 60; i++)
    writeFileSync(join(folder.path, name, `${i}.txt`), `${folder.path} ${i} `.repeat(name === 'many' ? 20_000 : 200));
}

describe('every config key does what it says, or is refused by name', () => {
  it('is in this list', () => {
    expect(Object.keys(KEYS).sort()).toEqual(configKeys.map(({ path }) => path).sort());
  });

  it.each(Object.entries(KEYS))('%s', async (key, [changes, effect]) => {
    if (key === 'runtime.device') {
      const run = await trefoil(['train', '--set', 'runtime.device=cuda', '--out-dir', join(folder.path, 'cuda')]);
      expect(run.code).toBe(2);
      expect(run.stderr).toContain('--device cuda');
      return;
    }
    if (effect.kind === 'refused') {
      const run = trained(placed(changes));
      await expect(run).rejects.toThrow(effect.message);
      return;
    }
    const base = await baseOf(effect.against);
    const seen = await trained(placed(changes));
    if (effect.kind === 'numbers') {
      expect(seen.weights === base.weights && `${seen.losses}` === `${base.losses}`).toBe(false);
    } else {
      if (effect.kind === 'same') expect(seen.weights === base.weights).toBe(true);
      effect.shows(seen, base);
    }
  });
});

describe('variables of several ranks', () => {
  it('WORLD_SIZE is refused by name, and --ddp 0 leaves it out', async () => {
    const words = ['train', '--config', 'small_smoke', '--print-config'];
    const out = join(folder.path, 'ranks');
    const run = await trefoil(['train', '--config', 'small_smoke', '--device', 'cpu', '--out-dir', out], {
      env: { WORLD_SIZE: '2', RANK: '0' },
    });
    expect(run.code).toBe(2);
    expect(run.stderr).toContain('WORLD_SIZE: ranks on CPUs meet through MPI');
    expect(existsSync(out)).toBe(false);
    expect((await trefoil(words, { env: { WORLD_SIZE: '2' } })).code).toBe(0);
  });
});
