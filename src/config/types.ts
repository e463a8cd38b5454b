/** The types of a config, generated from schema.ts (testing/types.ts). */

/** Section `model` of a config. The shape of the model. */
export interface ModelConfig {
  /** . Default: `768`. */
  dim: number;
  /** . Default: `12`. */
  n_layers: number;
  /** . Default: `12`. */
  n_heads: number;
  /** . Default: `2`. */
  n_kv_groups: number;
  /** . Default: `64`. */
  d_k: number;
  /** . Default: `64`. */
  d_v: number;
  /** . Default: `'silu'`. */
  mlp: 'silu' | 'swiglu';
  /** . Default: `4`. */
  mlp_ratio: number;
  /** . Default: `null`. */
  mlp_hidden: number | null;
  /** . Default: `false`. */
  qkv_bias: boolean;
  /** . Default: `false`. */
  qk_norm: boolean;
  /** . Default: `false`. */
  out_bias: boolean;
  /** . Default: `false`. */
  mlp_bias: boolean;
  /** . Default: `false`. */
  tie_embeddings: boolean;
  /** . Default: `'nsa'`. */
  attention: 'nsa' | 'dense';
  /** . Default: `10000`. */
  rope_theta: number;
  /** . Default: `1`. */
  rope_scale: number;
  /** . Default: `'default'`. */
  rope_type: 'default' | 'linear' | 'llama3' | 'yarn';
  /** . Default: `1`. */
  rope_factor: number;
  /** . Default: `8192`. */
  rope_original_context: number;
  /** . Default: `1`. */
  rope_low_freq_factor: number;
  /** . Default: `4`. */
  rope_high_freq_factor: number;
  /** . Default: `32`. */
  rope_beta_fast: number;
  /** . Default: `1`. */
  rope_beta_slow: number;
  /** . Default: `null`. */
  rope_attention_factor: number | null;
  /** . Default: `null`. */
  vocab_size: number | null;
  /** . Default: `0.000001`. */
  norm_eps: number;
}

/** Section `nsa` of a config. The sparse attention of the model. */
export interface NsaConfig {
  /** . Default: `32`. */
  l: number;
  /** . Default: `16`. */
  d: number;
  /** . Default: `64`. */
  l_sel: number;
  /** . Default: `16`. */
  n_sel: number;
  /** . Default: `512`. */
  w: number;
  /** . Default: `'avg'`. */
  phi: 'avg' | 'conv' | 'mlp';
  /** . Default: `null`. */
  phi_hidden: number | null;
  /** . Default: `'after'`. */
  cmp_rope: 'after' | 'before' | 'none';
  /** . Default: `'softmax'`. */
  gate: 'softmax' | 'sigmoid';
  /** . Default: `1`. */
  gate_temp: number;
  /** . Default: `'none'`. */
  force_branch: 'none' | 'cmp' | 'sel' | 'win';
  /** . Default: `false`. */
  force_uniform_gate: boolean;
  /** . Default: `false`. */
  stopgrad_gates: boolean;
}

/** Section `data` of a config. Where tokens come from. */
export interface DataConfig {
  /** . Default: `'synthetic'`. */
  source: 'synthetic' | 'needle' | 'stories' | 'text' | 'jsonl' | 'fineweb_edu' | 'fineweb_edu_local' | 'tokens';
  /** . Default: `null`. */
  path: string | null;
  /** . Default: `'byte'`. */
  tokenizer: string;
  /** . Default: `0.01`. */
  val_fraction: number;
  /** . Default: `false`. */
  document_mask: boolean;
  /** . Default: `true`. */
  shuffle: boolean;
  /** . Default: `null`. */
  seed: number | null;
  /** . Default: `'text'`. */
  text_field: string;
  /** . Default: `null`. */
  vocab_size: number | null;
  /** . Default: `16`. */
  needle_records: number;
  /** . Default: `4`. */
  needle_facts: number;
  /** . Default: `64`. */
  needle_questions: number;
  /** . Default: `0`. */
  needle_absent: number;
  /** . Default: `null`. */
  needle_curriculum: string | null;
  /** . Default: `0`. */
  stories_drills: number;
  /** . Default: `'HuggingFaceFW/fineweb-edu'`. */
  hub_dataset: string;
  /** . Default: `null`. */
  hub_config: string | null;
  /** . Default: `'train'`. */
  hub_split: string;
  /** . Default: `'main'`. */
  hub_revision: string;
  /** . Default: `4`. */
  cache_gb: number;
  /** . Default: `2`. */
  workers: number;
  /** . Default: `64`. */
  fwe_doc_batch: number;
  /** . Default: `true`. */
  fwe_prefetch: boolean;
  /** . Default: `4`. */
  fwe_queue: number;
  /** . Default: `0`. */
  fwe_warmup_batches: number;
  /** . Default: `60`. */
  fwe_warmup_timeout: number;
  /** . Default: `60`. */
  loader_timeout: number;
  /** . Default: `1000`. */
  report_docs: number;
  /** . Default: `false`. */
  synthetic_on_fail: boolean;
}

/** Section `runtime` of a config. How and on what to compute. */
export interface RuntimeConfig {
  /** . Default: `'auto'`. */
  device: 'auto' | 'cpu' | 'cuda';
  /** . Default: `'fp32'`. */
  precision: 'fp32' | 'bf16';
  /** . Default: `false`. */
  gradient_checkpointing: boolean;
  /** . Default: `false`. */
  deterministic: boolean;
  /** . Default: `true`. */
  cuda_graph: boolean;
  /** . Default: `null`. */
  profile: string | null;
  /** . Default: `null`. */
  threads: number | null;
  /** . Default: `'adaptive'`. */
  selection_kernel: 'adaptive' | 'v1' | 'v2' | 'reference';
  /** . Default: `1024`. */
  sel_v2_min_s: number;
  /** . Default: `true`. */
  prefill_batched: boolean;
  /** . Default: `0`. */
  prefill_tile: number;
  /** . Default: `true`. */
  use_sel_pack: boolean;
  /** . Default: `false`. */
  force_parity: boolean;
  /** . Default: `false`. */
  strict_asserts: boolean;
  /** . Default: `false`. */
  debug_compare: boolean;
  /** . Default: `false`. */
  debug_timing: boolean;
  /** . Default: `false`. */
  sdpa_audit: boolean;
  /** . Default: `true`. */
  use_fa2: boolean;
  /** . Default: `null`. */
  use_fa2_win: boolean | null;
  /** . Default: `null`. */
  use_fa2_cmp: boolean | null;
  /** . Default: `0`. */
  fa2_min_len_win: number;
  /** . Default: `0`. */
  fa2_min_len_cmp: number;
  /** . Default: `true`. */
  tb: boolean;
  /** . Default: `true`. */
  csv_logs: boolean;
  /** . Default: `true`. */
  aux_stats: boolean;
}

/** Section `train` of a config. The training run. */
export interface TrainConfig {
  /** . Default: `1000`. */
  steps: number;
  /** . Default: `2048`. */
  seq_len: number;
  /** . Default: `1`. */
  batch_size: number;
  /** . Default: `1`. */
  accumulate_grad_batches: number;
  /** . Default: `0.0002`. */
  lr: number;
  /** . Default: `0.1`. */
  lr_min_ratio: number;
  /** . Default: `'cosine'`. */
  lr_schedule: 'cosine' | 'wsd' | 'linear' | 'constant';
  /** . Default: `100`. */
  warmup_steps: number;
  /** . Default: `0.2`. */
  wsd_decay_fraction: number;
  /** . Default: `0.01`. */
  weight_decay: number;
  /** . Default: `[0.9,0.95]`. */
  betas: [number, number];
  /** . Default: `1e-8`. */
  eps: number;
  /** . Default: `1`. */
  grad_clip: number;
  /** . Default: `20`. */
  log_every: number;
  /** . Default: `0`. */
  eval_every: number;
  /** . Default: `8`. */
  eval_batches: number;
  /** . Default: `500`. */
  save_every: number;
  /** . Default: `3`. */
  keep_last: number;
  /** . Default: `1337`. */
  seed: number;
  /** . Default: `'artifacts/train'`. */
  out_dir: string;
  /** . Default: `false`. */
  spike_skip: boolean;
  /** . Default: `6`. */
  spike_z: number;
  /** . Default: `0`. */
  sample_every: number;
  /** . Default: `-1`. */
  ddp: -1 | 0 | 1;
  /** . Default: `false`. */
  ddp_safe: boolean;
  /** . Default: `null`. */
  bucket_mb: number | null;
  /** . Default: `'fp32'`. */
  wire: 'fp32' | 'bf16';
  /** . Default: `0`. */
  zero: 0 | 1;
  /** . Default: `500`. */
  hash_every: number;
}

/** A whole config: every key has a value. */
export interface Config {
  /** The shape of the model. */
  model: ModelConfig;
  /** The sparse attention of the model. */
  nsa: NsaConfig;
  /** Where tokens come from. */
  data: DataConfig;
  /** How and on what to compute. */
  runtime: RuntimeConfig;
  /** The training run. */
  train: TrainConfig;
}

/** A section in which every key may be omitted. */
export type Omissible<T> = { [K in keyof T]?: T[K] | undefined };

/** A config as it is written down: every key may be omitted. */
export interface ConfigInput {
  /** The shape of the model. */
  model?: Omissible<ModelConfig> | undefined;
  /** The sparse attention of the model. */
  nsa?: Omissible<NsaConfig> | undefined;
  /** Where tokens come from. */
  data?: Omissible<DataConfig> | undefined;
  /** How and on what to compute. */
  runtime?: Omissible<RuntimeConfig> | undefined;
  /** The training run. */
  train?: Omissible<TrainConfig> | undefined;
}
