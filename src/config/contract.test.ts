/**
 * The contract, name by name: each config key, flag and variable it lists changes the resolved config (or what the
 * command it belongs to reads). The lists are copied from the contract on purpose: a name dropped from a table fails here.
 */
import { describe, expect, it } from 'vitest';
import { parseTrainFlags } from '../cli/shared/train-flags.js';
import { resolveRank } from '../train/ranks/identity.js';
import { trainFlags } from './flags.js';
import { configKeys } from './keys.js';
import { readTimeoutMinutes, readVariable } from './legacy/environment.js';
import { environmentVariables } from './legacy/variables.js';
import { loadConfig } from './load.js';
import { configValue } from './print.js';

const load = (argv: string[] = [], env: Record<string, string> = {}) => {
  const line = parseTrainFlags(argv);
  return loadConfig({ env, flags: line.layer, config: line.config });
};

/** Key, a value that is not its default, as written on a command line. */
const KEYS: [key: string, text: string, value: unknown, needed?: string][] = [
  ['model.dim', '512', 512],
  ['model.n_layers', '3', 3],
  ['model.n_heads', '8', 8],
  ['model.n_kv_groups', '4', 4],
  ['model.d_k', '32', 32],
  ['model.d_v', '48', 48],
  ['model.mlp', 'swiglu', 'swiglu'],
  ['model.mlp_ratio', '2.5', 2.5],
  ['model.mlp_hidden', '100', 100],
  ['model.qkv_bias', 'true', true],
  ['model.qk_norm', 'true', true],
  ['model.out_bias', 'true', true],
  ['model.mlp_bias', 'true', true],
  ['model.tie_embeddings', 'true', true],
  ['model.layer_pattern', '[nsa, window]', ['nsa', 'window']],
  ['model.attention', 'dense', 'dense'],
  ['model.rope_theta', '5e5', 5e5],
  ['model.rope_scale', '2', 2],
  ['model.rope_type', 'yarn', 'yarn'],
  ['model.rope_factor', '4', 4],
  ['model.rope_original_context', '4096', 4096],
  ['model.rope_low_freq_factor', '0.5', 0.5],
  ['model.rope_high_freq_factor', '8', 8],
  ['model.rope_beta_fast', '16', 16],
  ['model.rope_beta_slow', '2', 2],
  ['model.rope_attention_factor', '1.5', 1.5],
  ['model.vocab_size', '300', 300],
  ['model.norm_eps', '1e-5', 1e-5],
  ['nsa.l', '64', 64],
  ['nsa.d', '8', 8],
  ['nsa.l_sel', '128', 128],
  ['nsa.n_sel', '8', 8],
  ['nsa.init_blocks', '0', 0],
  ['nsa.local_blocks', '1', 1],
  ['nsa.selection', 'chunked', 'chunked'],
  ['nsa.score_pool', 'max', 'max'],
  ['nsa.w', '256', 256],
  ['nsa.shared_kv', 'true', true],
  ['nsa.phi', 'conv', 'conv'],
  ['nsa.phi_hidden', '64', 64],
  ['nsa.cmp_rope', 'before', 'before'],
  ['nsa.gate', 'sigmoid', 'sigmoid'],
  ['nsa.gate_temp', '0.5', 0.5],
  ['nsa.rope', 'window', 'window', 'nsa.cmp_rope=none'],
  ['nsa.force_branch', 'sel', 'sel'],
  ['nsa.force_uniform_gate', 'true', true],
  ['nsa.stopgrad_gates', 'true', true],
  ['data.source', 'hub', 'hub'],
  ['data.path', 'some/file', 'some/file'],
  ['data.tokenizer', 'path/tokenizer.json', 'path/tokenizer.json'],
  ['data.val_fraction', '0.2', 0.2],
  ['data.val_path', 'some/file', 'some/file', 'data.path=some/text'],
  ['data.document_mask', 'true', true],
  ['data.shuffle', 'false', false],
  ['data.seed', '5', 5],
  ['data.split_seed', '5', 5],
  [
    'data.sources',
    '[{name: a, source: stories, weight: 1}]',
    [{ name: 'a', source: 'stories', path: null, weight: 1, epochs: 1 }],
  ],
  ['data.text_field', 'body', 'body'],
  ['data.vocab_size', '1000', 1000],
  ['data.stories_drills', '4', 4],
  ['data.needle_records', '4', 4],
  ['data.needle_facts', '2', 2],
  ['data.needle_questions', '9', 9],
  ['data.needle_absent', '3', 3],
  ['data.needle_curriculum', '512:300', '512:300'],
  ['data.hub_dataset', 'owner/name', 'owner/name'],
  ['data.hub_config', 'sample-10BT', 'sample-10BT'],
  ['data.hub_split', 'test', 'test'],
  ['data.hub_revision', 'v1', 'v1'],
  ['data.cache_gb', '0.5', 0.5],
  ['data.workers', '3', 3],
  ['data.doc_batch', '8', 8],
  ['data.prefetch', 'false', false],
  ['data.queue', '9', 9],
  ['data.warmup_batches', '32', 32],
  ['data.warmup_timeout', '5', 5],
  ['data.loader_timeout', '120', 120],
  ['data.report_docs', '500', 500],
  ['data.synthetic_on_fail', 'true', true],
  ['runtime.device', 'cpu', 'cpu'],
  ['runtime.precision', 'bf16', 'bf16'],
  ['runtime.fp8', 'true', true],
  ['runtime.gradient_checkpointing', 'true', true],
  ['runtime.deterministic', 'true', true],
  ['runtime.cuda_graph', 'false', false],
  ['runtime.profile', 'cpu', 'cpu'],
  ['runtime.threads', '2', 2],
  ['runtime.selection_kernel', 'reference', 'reference'],
  ['runtime.selection_v2_min_len', '4096', 4096],
  ['runtime.prefill_tile', '2048', 2048],
  ['runtime.reference_kernels', 'true', true],
  ['runtime.strict_asserts', 'true', true],
  ['runtime.debug_compare', 'true', true],
  ['runtime.debug_timing', 'true', true],
  ['runtime.print_kernels', 'true', true],
  ['runtime.fused', 'false', false],
  ['runtime.fused_min_len', '16', 16],
  ['runtime.tensorboard', 'false', false],
  ['runtime.csv_logs', 'false', false],
  ['runtime.aux_stats', 'false', false],
  ['train.steps', '50000', 50000],
  ['train.seq_len', '512', 512],
  ['train.batch_size', '2', 2],
  ['train.accumulate_grad_batches', '4', 4],
  ['train.lr', '1e-3', 1e-3],
  ['train.lr_min_ratio', '0', 0],
  ['train.lr_schedule', 'wsd', 'wsd'],
  ['train.warmup_steps', '0', 0],
  ['train.wsd_decay_fraction', '0.1', 0.1],
  ['train.weight_decay', '0.1', 0.1],
  ['train.optimizer', 'muon', 'muon'],
  ['train.muon_momentum', '0.9', 0.9],
  ['train.muon_lr_ratio', '2', 2],
  ['train.betas', '[0.8, 0.99]', [0.8, 0.99]],
  ['train.eps', '1e-6', 1e-6],
  ['train.grad_clip', '0', 0],
  ['train.log_every', '1', 1],
  ['train.eval_every', '100', 100],
  ['train.eval_batches', '2', 2],
  ['train.save_every', '5000', 5000],
  ['train.keep_last', '1', 1],
  ['train.seed', '7', 7],
  ['train.init_from', 'runs/base', 'runs/base'],
  ['train.trainable', '[norm]', ['norm']],
  ['train.lora', '{rank: 4}', { rank: 4, alpha: 16, targets: ['all-linear'], dropout: 0 }, 'train.init_from=runs/base'],
  ['train.async_save', 'false', false],
  ['train.gate_release_steps', '500', 500],
  ['train.gate_release_share', '0.4', 0.4],
  ['train.n_sel_from', '64', 64],
  ['train.n_sel_steps', '800', 800],
  ['train.scorer_loss', '0.1', 0.1],
  ['train.out_dir', 'artifacts/x', 'artifacts/x'],
  ['train.spike_skip', 'true', true],
  ['train.spike_z', '4', 4],
  ['train.sample_every', '10', 10],
  ['train.ddp', '1', 1],
  ['train.ddp_safe', 'true', true],
  ['train.bucket_mb', '25', 25],
  ['train.wire', 'bf16', 'bf16'],
  ['train.zero', '1', 1],
  ['train.hash_every', '10', 10],
];

describe('every config key', () => {
  it('is in this list', () =>
    expect(KEYS.map(([path]) => path).sort()).toEqual(configKeys.map((key) => key.path).sort()));

  it.each(KEYS)('%s takes %s', (path, text, value, needed = `${path}=${text}`) => {
    expect(configValue(load().config, path)).not.toEqual(value);
    const { config, origins } = load(['--set', needed, '--set', `${path}=${text}`]);
    expect(configValue(config, path)).toEqual(value);
    expect(origins.get(path)).toBe('flag --set');
  });

  const nonsense = configKeys.filter((key) => key.kind !== 'text').map((key) => [key.path, key.allowed]);
  it.each(nonsense)('%s refuses nonsense by name: %s', (path, allowed) => {
    expect(() => load(['--set', `${path}={a: 1}`])).toThrow(`${path}: {"a":1} is not allowed; ${allowed}`);
  });
});

/** Choices the contract spells out. */
const CHOICES: [string, string][] = [
  ['model.mlp', 'silu swiglu'],
  ['model.attention', 'nsa dense'],
  ['nsa.phi', 'avg conv mlp'],
  ['nsa.cmp_rope', 'after before none'],
  ['nsa.gate', 'softmax sigmoid'],
  ['runtime.selection_kernel', 'adaptive v1 v2 reference'],
  ['runtime.device', 'auto cpu cuda'],
  ['runtime.precision', 'fp32 bf16'],
  ['train.lr_schedule', 'cosine wsd linear constant'],
  ['data.source', 'synthetic needle stories text jsonl hub files tokens'],
];
it.each(CHOICES)('%s is one of %s', (path, words) => {
  for (const word of words.split(' ')) {
    const takesPath = ['text', 'jsonl', 'files', 'tokens'].includes(word);
    const argv = ['--set', `${path}=${word}`, ...(takesPath ? ['--local-path', 'x'] : [])];
    expect(configValue(load(argv).config, path)).toBe(word);
  }
});

/** Flag, its value, the key it sets and to what; the flags without a key are below. */
const FLAGS: [string[], string, unknown][] = [
  [['--dataset', 'hub'], 'data.source', 'hub'],
  [['--local-path', '/data/fineweb.jsonl'], 'data.path', '/data/fineweb.jsonl'],
  [['--steps', '200'], 'train.steps', 200],
  [['--seq-len', '512'], 'train.seq_len', 512],
  [['--batch-size', '2'], 'train.batch_size', 2],
  [['--accum-batches', '4'], 'train.accumulate_grad_batches', 4],
  [['--precision', 'bf16'], 'runtime.precision', 'bf16'],
  [['--device', 'cpu'], 'runtime.device', 'cpu'],
  [['--out-dir', 'artifacts/y'], 'train.out_dir', 'artifacts/y'],
  [['--loader-timeout', '120'], 'data.loader_timeout', 120],
  [['--fwe-report-docs', '500'], 'data.report_docs', 500],
  [['--synthetic-on-fail'], 'data.synthetic_on_fail', true],
  [['--ddp', '0'], 'train.ddp', 0],
  [['--tokenizer', 'gpt2'], 'data.tokenizer', 'gpt2'],
  [['--lr', '3e-4'], 'train.lr', 3e-4],
  [['--threads', '3'], 'runtime.threads', 3],
  [['--seed', '7'], 'train.seed', 7],
  [['--from', 'runs/base'], 'train.init_from', 'runs/base'],
];

/** Flags that steer the command and set no key of their own; `--no-gc` sets one to what its default is. */
const STEERING = ['config', 'resume', 'resume-from', 'save', 'set', 'print-config', 'dashboard', 'json', 'no-gc'];

describe('every train flag', () => {
  it('is in these lists', () => {
    const listed = [...FLAGS.map(([[flag]]) => flag.slice('--'.length)), ...STEERING];
    expect(listed.sort()).toEqual(trainFlags.map(({ name }) => name).sort());
  });

  it.each(FLAGS)('%j sets %s', (argv, path, value) => {
    expect(configValue(load().config, path)).not.toEqual(value);
    const { config, origins } = load(argv);
    expect(configValue(config, path)).toEqual(value);
    expect(origins.get(path)).toBe(`flag ${argv[0]}`);
  });

  it('--no-gc turns off what the config turned on', () => {
    const name = '125m_1xa100_production';
    expect(load(['--config', name]).config.runtime.gradient_checkpointing).toBe(true);
    expect(load(['--config', name, '--no-gc']).config.runtime.gradient_checkpointing).toBe(false);
  });

  it('--config, --resume, --resume-from, --save and --print-config steer the command', () => {
    expect(load(['--config', '125m_fast_log']).file).toBe('configs/125m_fast_log.yaml');
    expect(parseTrainFlags(['--resume', 'auto']).resume).toBe('auto');
    expect(parseTrainFlags(['--resume-from', 'artifacts/c/latest']).resume).toBe('artifacts/c/latest');
    expect(parseTrainFlags(['--save', 'model.safetensors']).save).toBe('model.safetensors');
    expect(parseTrainFlags(['--print-config']).printConfig).toBe(true);
  });
});

/** Variable, its text, the key it sets and to what. */
const VARIABLES: [string, string, string, unknown][] = [
  ['NSA_SEQ_LEN', '512', 'train.seq_len', 512],
  ['NSA_BATCH_SIZE', '4', 'train.batch_size', 4],
  ['NSA_ACCUM', '4', 'train.accumulate_grad_batches', 4],
  ['NSA_LR', '1e-3', 'train.lr', 1e-3],
  ['NSA_TOKENIZER', 'gpt2', 'data.tokenizer', 'gpt2'],
  ['NSA_ROPE_SCALE', '4.0', 'model.rope_scale', 4],
  ['NSA_PREFILL_BATCHED', '0', 'runtime.prefill_tile', 1],
  ['NSA_PREFILL_TILE', '2048', 'runtime.prefill_tile', 2048],
  ['NSA_USE_SEL_PACK', '0', 'runtime.selection_kernel', 'v1'],
  ['NSA_FORCE_PARITY', '1', 'runtime.reference_kernels', true],
  ['NSA_SEL_RANGES_V2', '0', 'runtime.selection_kernel', 'v1'],
  ['NSA_SEL_RANGES_V2', '1', 'runtime.selection_kernel', 'v2'],
  ['NSA_SEL_RANGES_V2_MIN_S', '512', 'runtime.selection_v2_min_len', 512],
  ['NSA_FORCE_BRANCH', 'win', 'nsa.force_branch', 'win'],
  ['NSA_FORCE_UNIFORM_GATE', '1', 'nsa.force_uniform_gate', true],
  ['NSA_STOPGRAD_GATES', '1', 'nsa.stopgrad_gates', true],
  ['NSA_STRICT_ASSERTS', '1', 'runtime.strict_asserts', true],
  ['NSA_DEBUG_COMPARE', '1', 'runtime.debug_compare', true],
  ['NSA_DEBUG_TIMING', '1', 'runtime.debug_timing', true],
  ['NSA_SDPA_AUDIT', '1', 'runtime.print_kernels', true],
  ['NSA_FWE_DOC_BATCH', '128', 'data.doc_batch', 128],
  ['NSA_FWE_PREFETCH', '0', 'data.prefetch', false],
  ['NSA_FWE_Q', '8', 'data.queue', 8],
  ['NSA_FWE_WARMUP_BATCHES', '32', 'data.warmup_batches', 32],
  ['NSA_FWE_WARMUP_TIMEOUT', '90', 'data.warmup_timeout', 90],
  ['NSA_TB_DISABLE', '1', 'runtime.tensorboard', false],
  ['NSA_DISABLE_CSV_LOGS', '1', 'runtime.csv_logs', false],
  ['NSA_DISABLE_AUX_STATS', '1', 'runtime.aux_stats', false],
  ['NSA_DDP_SAFE_MODE', '1', 'train.ddp_safe', true],
  ['DDP_SAFE', '1', 'train.ddp_safe', true],
  ['NSA_USE_FA2', '0', 'runtime.fused', false],
  ['NSA_USE_FA2_WIN', '0', 'runtime.fused', false],
  ['NSA_USE_FA2_CMP', '0', 'runtime.fused', false],
  ['NSA_FA2_MIN_LEN_WIN', '-1', 'runtime.fused_min_len', -1],
  ['NSA_FA2_MIN_LEN_CMP', '-1', 'runtime.fused_min_len', -1],
];

const WATCH = [
  ...['INTERVAL_S', 'HALT', 'HEARTBEAT_STALL_S', 'GONE_S', 'DEADLINE_FETCH_S', 'DEADLINE_STEP_S', 'DEADLINE_SAVE_S'],
  ...['DEADLINE_EVAL_S', 'FLATLINE_N', 'LOSS_FLATLINE_N', 'GRAD_ZERO_N', 'GRAD_SPIKE', 'THROUGHPUT_DROP'],
  ...['THROUGHPUT_WINDOW_S', 'FETCH_S', 'FETCH_STALL_RATIO', 'FETCH_P95_MS', 'GATE_COLLAPSE_N', 'COLLAPSE_WARNING'],
  ...['SPIKE_RATE', 'SPIKE_WINDOW', 'LOSS_WINDOW'],
  ...['COLLAPSE_CRITICAL', 'COMMAND', 'WEBHOOK', 'GATE_ENTROPY_MIN', 'GATE_MAX_THRESHOLD'],
];
const RANKS = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT', 'NSA_PG_TIMEOUT_MIN'];
const WITHOUT_MEANING = ['NSA_USE_TRITON_SEL', 'NSA_USE_SEL_VARLEN', 'NSA_ENV_STATIC'];

describe('every environment variable', () => {
  it('is in these lists', () => {
    const listed = [...VARIABLES.map(([name]) => name), 'NSA_NO_GC', ...WATCH.map((name) => `NSA_WATCH_${name}`)];
    const all = new Set([...listed, ...RANKS, ...WITHOUT_MEANING]);
    expect([...all].sort()).toEqual(environmentVariables.map(({ name }) => name).sort());
  });

  it.each(VARIABLES)('%s=%s sets %s', (name, text, path, value) => {
    expect(configValue(load().config, path)).not.toEqual(value);
    const { config, origins, warnings } = load([], { [name]: text });
    expect(configValue(config, path)).toEqual(value);
    expect(origins.get(path)).toBe(`env ${name}`);
    expect(warnings).toEqual([]);
  });

  it('NSA_NO_GC turns off what the config turned on', () => {
    const argv = ['--config', '125m_1xa100_production'];
    expect(load(argv, { NSA_NO_GC: '1' }).config.runtime.gradient_checkpointing).toBe(false);
    expect(load(argv, { NSA_NO_GC: '0' }).config.runtime.gradient_checkpointing).toBe(true);
  });

  it('CONFIG names the config', () => {
    expect(load([], { CONFIG: 'configs/m7c_125m_fast_log.yaml' }).config.train.log_every).toBe(5);
  });

  it.each(WATCH)('NSA_WATCH_%s is read by watch', (name) => {
    expect(readVariable({ [`NSA_WATCH_${name}`]: '1' }, `NSA_WATCH_${name}`)).toBeTruthy();
    expect(load([], { [`NSA_WATCH_${name}`]: '1' }).warnings).toEqual([]);
  });

  it.each([
    ['RANK', '1', 'rank', 1],
    ['WORLD_SIZE', '3', 'world', 3],
    ['LOCAL_RANK', '1', 'localRank', 1],
    ['MASTER_ADDR', 'node0', 'masterAddress', 'node0'],
    ['MASTER_PORT', '4000', 'masterPort', 4000],
  ] as const)('%s is read by the ranks', (name, text, field, value) => {
    expect(resolveRank({ RANK: '0', WORLD_SIZE: '2', [name]: text })[field]).toBe(value);
  });

  it('NSA_PG_TIMEOUT_MIN is read by the ranks', () => {
    expect(readTimeoutMinutes({ NSA_PG_TIMEOUT_MIN: '5' })).toBe(5);
  });
});

/** Names from the runbooks that are not in the contract's lists: second names, or refused with the way to go. */
describe('names from the runbooks', () => {
  it.each([
    ['runtime.use_flash', 'runtime.fused'],
    ['runtime.fa2_enabled', 'runtime.fused'],
  ])('%s means %s', (name, path) => expect(configValue(load(['--set', `${name}=false`]).config, path)).toBe(false));

  it('runtime.no_gc means no gradient checkpointing', () => {
    const argv = ['--config', '125m_1xa100_production', '--set', 'runtime.no_gc=true'];
    expect(load(argv).config.runtime.gradient_checkpointing).toBe(false);
  });

  it.each(WITHOUT_MEANING)('%s is said to do nothing', (name) => {
    expect(load([], { [name]: '1' }).warnings[0]).toContain(`${name}: no effect`);
  });
});
