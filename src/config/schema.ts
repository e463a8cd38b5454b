/**
 * The schema of a config: every key with its default. The comments of the keys are copied to configs/base.yaml
 * and docs/reference/config.md by `npm run docs:reference`. A resolved config has every key; one without a value is null.
 *
 * Each section is a plain object before it is a zod schema: only so do the declarations of the package keep the comments.
 */
import * as z from '../zod.js';
import { DATA_SOURCES } from './data-sources.js';
import { type MixedSourceInput, mixtureSchema } from './mixture.js';
import { relationProblems } from './rules.js';

const count = () => z.int().min(1);
const countOrZero = () => z.int().min(0);
const positive = () => z.number().positive();
const notNegative = () => z.number().min(0);
/** More than any model has: longer lists of weights take seconds to make. */
const MAX_LAYERS = 10_000;
const fraction = () => z.number().min(0).max(1);
const text = () => z.string().min(1);
const off = () => z.boolean().default(false);
const on = () => z.boolean().default(true);

const model = {
  /** Width of the residual stream. */
  dim: count().default(768),
  /** Number of transformer blocks. */
  n_layers: count().max(MAX_LAYERS).default(12),
  /** Number of query heads H. */
  n_heads: count().default(12),
  /** Number of key/value groups G; must divide n_heads, with 1 to 32 heads per group. */
  n_kv_groups: count().default(2),
  /** Size of a query or key head; even, because rotary embeddings rotate pairs. */
  d_k: count().default(64),
  /** Size of a value head. */
  d_v: count().default(64),
  /** Feed-forward: two matrices with SiLU, or three with a gate (SwiGLU). */
  mlp: z.enum(['silu', 'swiglu']).default('silu'),
  /** Hidden size of the feed-forward is round(dim * mlp_ratio), unless mlp_hidden is set. */
  mlp_ratio: positive().default(4),
  /** Hidden size of the feed-forward; null = from mlp_ratio. */
  mlp_hidden: count().nullable().default(null),
  /** Bias of the projections to queries, keys and values. */
  qkv_bias: off(),
  /** RMSNorm of every query and key head, before rotary positions. */
  qk_norm: off(),
  /** Bias of the output projection of attention. */
  out_bias: off(),
  /** Biases of the feed-forward layers. */
  mlp_bias: off(),
  /** Use the embedding table as the output matrix. */
  tie_embeddings: off(),
  /** Native sparse attention, or dense attention as a baseline. */
  attention: z.enum(['nsa', 'dense']).default('nsa'),
  /** Attention of the layers in turn, repeated over all: sparse, or its window alone (attention nsa). */
  layer_pattern: z
    .array(z.enum(['nsa', 'window']))
    .min(1)
    .default(['nsa']),
  /** Base of the rotary angles. */
  rope_theta: positive().default(10000),
  /** Positions are divided by this factor. */
  rope_scale: positive().default(1),
  /** Scaling of the rotary frequencies: none, all of them, or by wavelength as Llama 3 or YaRN do. */
  rope_type: z.enum(['default', 'linear', 'llama3', 'yarn']).default('default'),
  /** Frequencies are divided by up to this factor (rope_type linear, llama3 and yarn). */
  rope_factor: positive().default(1),
  /** Context length before scaling (rope_type llama3 and yarn). */
  rope_original_context: count().default(8192),
  /** Waves that fit fewer times into the original context are divided by the factor (llama3). */
  rope_low_freq_factor: positive().default(1),
  /** Waves that fit more times into the original context are unchanged (llama3). */
  rope_high_freq_factor: positive().default(4),
  /** Pairs that turn more often in the original context are unchanged (yarn). */
  rope_beta_fast: positive().default(32),
  /** Pairs that turn less often in the original context are divided by the factor (yarn). */
  rope_beta_slow: positive().default(1),
  /** Factor on queries and keys (yarn); null = 0.1 ln(rope_factor) + 1. */
  rope_attention_factor: positive().nullable().default(null),
  /** Rows of the embedding; null = the vocabulary of the data. */
  vocab_size: z.int().min(2).nullable().default(null),
  /** Epsilon of RMSNorm. */
  norm_eps: positive().default(1e-6),
};

const nsa = {
  /** Tokens per compression block. */
  l: count().default(32),
  /** Stride of compression blocks; must divide l and l_sel. */
  d: count().default(16),
  /** Tokens per selection block; at least l. */
  l_sel: count().default(64),
  /** Selection blocks per token, including the forced ones: at least init_blocks + local_blocks. */
  n_sel: count().default(16),
  /** Blocks at the beginning of a sequence that every token selects. */
  init_blocks: countOrZero().default(1),
  /** Blocks up to its own, its own included, that every token selects. */
  local_blocks: count().default(2),
  /** The best of all blocks, or by chunks of n_sel blocks: half of the slots for those before the token's chunk. */
  selection: z.enum(['best', 'chunked']).default('best'),
  /** Importance of a selection block: sum of its compressed blocks, weighted by their overlap, or the largest of them. */
  score_pool: z.enum(['sum', 'max']).default('sum'),
  /** Tokens in the sliding window. */
  w: count().default(512),
  /** One projection to keys and values for all three branches, instead of one for each. */
  shared_kv: off(),
  /** Compression of a block to one key and value: mean, convolution or MLP. */
  phi: z.enum(['avg', 'conv', 'mlp']).default('avg'),
  /** Hidden size of phi mlp; null = 2 * d_k. */
  phi_hidden: count().nullable().default(null),
  /** Rotary embedding of compressed keys: after compression, before it, or none. */
  cmp_rope: z.enum(['after', 'before', 'none']).default('after'),
  /** Which branches see positions: all, or the window alone. */
  rope: z.enum(['all', 'window']).default('all'),
  /** Normalization of the three branch gates. */
  gate: z.enum(['softmax', 'sigmoid']).default('softmax'),
  /** Temperature of the gate. */
  gate_temp: positive().default(1),
  /** Debug: use only this branch. */
  force_branch: z.enum(['none', 'cmp', 'sel', 'win']).default('none'),
  /** Debug: weight every branch with 1/3. */
  force_uniform_gate: off(),
  /** Debug: no gradient into the gate. */
  stopgrad_gates: off(),
};

const data = {
  /** Where documents come from. */
  source: z.enum(DATA_SOURCES).default('synthetic'),
  /** Several sources, mixed by their weights, in place of one; see docs/guide/own-data.md. */
  sources: mixtureSchema.nullable().default(null),
  /** File, folder or glob of a local source; package:PATH is relative to the installed package. */
  path: text().nullable().default(null),
  /** Tokenizer: byte, gpt2, stories, the path of a tokenizer.json, or hf:owner/name. */
  tokenizer: text().default('byte'),
  /** Share of documents reserved for validation. */
  val_fraction: z.number().min(0).lt(1).default(0.01),
  /** Validation documents of their own, in the format of data.path; null = val_fraction of data.path. */
  val_path: text().nullable().default(null),
  /** Attention does not cross document boundaries in packed sequences. */
  document_mask: off(),
  /** Visit samples of shards, or documents of a stream, in a seeded random order. */
  shuffle: on(),
  /** Seed of the data order; null = train.seed. */
  seed: countOrZero().nullable().default(null),
  /** Seed of the choice of validation documents (val_fraction). train.seed and data.seed do not change it. */
  split_seed: countOrZero().default(1337),
  /** Field of a JSONL or Parquet row that contains the document. */
  text_field: text().default('text'),
  /** Vocabulary of synthetic tokens; null = that of the tokenizer. */
  vocab_size: z.int().min(2).nullable().default(null),
  /** Source needle: records hidden in a sequence. */
  needle_records: count().default(16),
  /** Source needle: facts per record. */
  needle_facts: count().default(4),
  /** Source needle: questions at the end of a sequence. */
  needle_questions: count().default(64),
  /** Source needle: number of questions about keys that do not occur. */
  needle_absent: countOrZero().default(0),
  /** Source needle: shorter sequences first, as LENGTH+LENGTH:SAMPLES, …; null = seq_len from the start. */
  needle_curriculum: text().nullable().default(null),
  /** Source stories: three of four samples practise recall, at distances that grow over this number of samples; 0 disables it. */
  stories_drills: countOrZero().default(0),
  /** Source hub: dataset on the Hugging Face hub, as owner/name. */
  hub_dataset: text().default('HuggingFaceFW/fineweb-edu'),
  /** Source hub: configuration, such as sample-10BT; null = the default one. */
  hub_config: text().nullable().default(null),
  /** Source hub: split. */
  hub_split: text().default('train'),
  /** Source hub: branch, tag or commit. */
  hub_revision: text().default('main'),
  /** Limit of each data cache in GiB: downloaded data (0 = keep none), tokenized text. */
  cache_gb: notNegative().default(4),
  /** Threads that download and tokenize. */
  workers: count().default(2),
  /** Documents tokenized at a time. */
  doc_batch: count().default(64),
  /** Read ahead of the trainer. */
  prefetch: on(),
  /** Batches kept ready, at least; besides, each lane of a stream keeps two samples. */
  queue: count().default(4),
  /** Batches that must be ready before step 1. */
  warmup_batches: countOrZero().default(0),
  /** Seconds to wait for the warm-up batches. */
  warmup_timeout: notNegative().default(60),
  /** Seconds without data after which a source has failed. */
  loader_timeout: positive().default(60),
  /** Print progress every N documents; 0 = never. */
  report_docs: countOrZero().default(1000),
  /** Train on synthetic tokens if the source fails. */
  synthetic_on_fail: off(),
};

const runtime = {
  /** Where to compute; auto = CUDA if available. */
  device: z.enum(['auto', 'cpu', 'cuda']).default('auto'),
  /** Type of activations and matrix products; master weights stay fp32. */
  precision: z.enum(['fp32', 'bf16']).default('fp32'),
  /** Experimental: FP8 matrix products where they save time, in training with bf16 on a GPU that has them. */
  fp8: off(),
  /** Recompute each block in the backward pass instead of storing its activations. */
  gradient_checkpointing: off(),
  /** Bitwise reproducible runs on CUDA too. */
  deterministic: off(),
  /** Replay a training step of fixed shapes as one CUDA graph. */
  cuda_graph: on(),
  /** Name of a file in configs/profiles with settings for one machine. */
  profile: text().nullable().default(null),
  /** CPU threads; null = all cores. */
  threads: count().nullable().default(null),
  /** Kernel of the selected branch: v1 query-major, v2 shared loads, adaptive = v2 for sequences of at least selection_v2_min_len. */
  selection_kernel: z.enum(['adaptive', 'v1', 'v2', 'reference']).default('adaptive'),
  /** Minimum sequence length for v2 if selection_kernel is adaptive; the fused kernels use v2 at every length. */
  selection_v2_min_len: countOrZero().default(1024),
  /** Tokens of a prompt that decoding processes at a time; 0 = all, 1 = token by token. */
  prefill_tile: countOrZero().default(0),
  /** Use the reference kernels only. */
  reference_kernels: off(),
  /** Check gates and selections in every pass of a training; slow. */
  strict_asserts: off(),
  /** Compare each fast kernel with its reference; slow. */
  debug_compare: off(),
  /** Time the sections of a step. */
  debug_timing: off(),
  /** Print once which kernel computes each branch. */
  print_kernels: off(),
  /** Use the fused attention kernels. */
  fused: on(),
  /** Minimum sequence length for the fused attention kernels; -1 = never. */
  fused_min_len: z.int().min(-1).default(0),
  /** Write TensorBoard events. */
  tensorboard: on(),
  /** Write training.csv, val.csv and the counters. */
  csv_logs: on(),
  /** Collect gate and selection statistics. */
  aux_stats: on(),
};

/** Low-rank adapters of linear layers (`train.lora`). */
const lora = {
  /** Rank of the adapters. */
  rank: count().default(8),
  /** The product of the two matrices is multiplied by alpha / rank. */
  alpha: positive().default(16),
  /** Names of layers, such as q_proj; all-linear = every linear layer but the head. */
  targets: z.array(text()).min(1).default(['all-linear']),
  /** Always 0. */
  dropout: z.literal(0).default(0),
};

const beta = () => z.number().min(0).lt(1);

const train = {
  /** Optimizer steps; the schedule covers exactly these. */
  steps: count().default(1000),
  /** Tokens per sequence. */
  seq_len: count().default(2048),
  /** Sequences per micro-batch and rank. */
  batch_size: count().default(1),
  /** Micro-batches per optimizer step. */
  accumulate_grad_batches: count().default(1),
  /** Peak learning rate. */
  lr: positive().default(2e-4),
  /** The schedule ends at lr * lr_min_ratio. */
  lr_min_ratio: fraction().default(0.1),
  /** Shape of the learning rate after the warm-up. */
  lr_schedule: z.enum(['cosine', 'wsd', 'linear', 'constant']).default('cosine'),
  /** Steps of linear warm-up. */
  warmup_steps: countOrZero().default(100),
  /** Share of the steps in which wsd decays. */
  wsd_decay_fraction: fraction().default(0.2),
  /** Decoupled weight decay, on matrices only. */
  weight_decay: notNegative().default(0.01),
  /** muon: Muon for the weight matrices of blocks, AdamW for all else. */
  optimizer: z.enum(['adamw', 'muon']).default('adamw'),
  /** Decay rate of Muon's momentum. */
  muon_momentum: beta().default(0.95),
  /** Learning rate of the matrices that Muon trains, as a multiple of the step's. */
  muon_lr_ratio: positive().default(1),
  /** Decay rates of the two Adam moments. */
  betas: z.tuple([beta(), beta()]).default([0.9, 0.95]),
  /** Epsilon of Adam. */
  eps: positive().default(1e-8),
  /** Maximum gradient norm; 0 = no clipping. */
  grad_clip: notNegative().default(1),
  /** Steps between rows of training.csv. */
  log_every: count().default(20),
  /** Steps between evaluations; 0 = none. */
  eval_every: countOrZero().default(0),
  /** Batches per evaluation. */
  eval_batches: count().default(8),
  /** Steps between checkpoints; 0 = only the final model. */
  save_every: countOrZero().default(500),
  /** Write checkpoints in a thread of their own, from a copy in memory, while training goes on. */
  async_save: on(),
  /** Number of checkpoints to keep. */
  keep_last: count().default(3),
  /** Seed of the weights and the data order. */
  seed: countOrZero().default(1337),
  /** Model whose weights, shape and tokenizer a new run starts from: anything `--model` takes; null = random weights. */
  init_from: text().nullable().default(null),
  /** Parameters that are trained, by name, with * for any characters; the others are frozen. null = all. */
  trainable: z.array(text()).min(1).nullable().default(null),
  /** Train low-rank adapters alone: rank, alpha and targets; null = the weights themselves. */
  lora: z.strictObject(lora).nullable().default(null),
  /** Steps in which the gate of a converted model opens to all branches; 0 = it stays as it is. */
  gate_release_steps: countOrZero().default(0),
  /** Weight of the loss that teaches the compressed branch to rank blocks as the selected branch attends to them; 0 = off. No effect on dense attention. */
  scorer_loss: notNegative().default(0),
  /** Weight that the compressed and window branch then have together, unless the gate has learned another. */
  gate_release_share: z
    .number()
    .gt(0)
    .max(2 / 3)
    .default(0.2),
  /** nsa.n_sel at the first step, halved at equal intervals down to nsa.n_sel; null = nsa.n_sel from the start. */
  n_sel_from: z.int().min(3).nullable().default(null),
  /** With n_sel_from: steps after which nsa.n_sel is reached. */
  n_sel_steps: count().default(1000),
  /** Run folder. */
  out_dir: text().default('artifacts/train'),
  /** Skip the update of a step whose loss or gradient spikes. */
  spike_skip: off(),
  /** Standard deviations above the mean that count as a spike. */
  spike_z: positive().default(6),
  /** Steps between printed samples; 0 = none. */
  sample_every: countOrZero().default(0),
  /** Several ranks: 1 yes, 0 no, -1 if a launcher started several. */
  ddp: z.literal([-1, 0, 1]).default(-1),
  /** Exchange gradients after the backward pass, in small pieces. */
  ddp_safe: off(),
  /** MiB of gradients exchanged at a time; null = 2 on CPUs, 16 on GPUs. */
  bucket_mb: positive().nullable().default(null),
  /** Type of gradients exchanged between ranks. */
  wire: z.enum(['fp32', 'bf16']).default('fp32'),
  /** 1 = ZeRO-1: each rank keeps the optimizer state of its share of the parameters. */
  zero: z.literal([0, 1]).default(0),
  /** Steps between comparisons of the weights of all ranks; 0 = none. */
  hash_every: countOrZero().default(500),
};

/** The sections, without the rules between keys. keys.ts reads names, defaults and limits from it. */
/** The keys of a config with their types and defaults, without the rules between keys. */
export const configShape = z.strictObject({
  model: z.strictObject(model).prefault({}),
  nsa: z.strictObject(nsa).prefault({}),
  data: z.strictObject(data).prefault({}),
  runtime: z.strictObject(runtime).prefault({}),
  train: z.strictObject(train).prefault({}),
});

/** Section `model` of a config: the shape of the model. */
export type ModelConfig = z.infer<z.ZodObject<typeof model>>;
/** Section `nsa` of a config: the sparse attention of the model. */
export type NsaConfig = z.infer<z.ZodObject<typeof nsa>>;
/** Section `data` of a config: where tokens come from. */
export type DataConfig = z.infer<z.ZodObject<typeof data>>;
/** Section `runtime` of a config: how and on what to compute. */
export type RuntimeConfig = z.infer<z.ZodObject<typeof runtime>>;
/** Section `train` of a config: the training run. */
export type TrainConfig = z.infer<z.ZodObject<typeof train>>;

/** A whole config: every key has a value. */
export interface Config {
  model: ModelConfig;
  nsa: NsaConfig;
  data: DataConfig;
  runtime: RuntimeConfig;
  train: TrainConfig;
}

/** A config as it is written down: every key may be omitted. */
export type ConfigInput = {
  [S in keyof Config]?: { [K in keyof Config[S]]?: InputOf<K, Config[S][K]> | undefined } | undefined;
};

/**
 * Keys of a mapping may be omitted too.
 * @opaque
 */
type InputOf<Key, Value> = Key extends 'sources'
  ? readonly MixedSourceInput[] | null
  : Value extends readonly unknown[]
    ? Value
    : Value extends object
      ? { [K in keyof Value]?: Value[K] | undefined }
      : Value;

/** A config that also obeys the rules between keys (rules.ts). */
export const configSchema = configShape.superRefine((config, context) => {
  for (const problem of relationProblems(config)) {
    context.addIssue({ code: 'custom', path: problem.path.split('.'), message: problem.message });
  }
});
