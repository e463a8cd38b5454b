/** The types of a config, generated from schema.ts (testing/types.ts). */

/** Section `model` of a config. The shape of the model. */
export interface ModelConfig {
  /** Width of the residual stream. Default: `768`. */
  dim: number;
  /** Transformer blocks. Default: `12`. */
  n_layers: number;
  /** Query heads H. Default: `12`. */
  n_heads: number;
  /** Key/value groups G; divides n_heads, 1 to 16 heads each. Default: `2`. */
  n_kv_groups: number;
  /** Size of a query or key head; even, because rotary positions turn pairs. Default: `64`. */
  d_k: number;
  /** Size of a value head. Default: `64`. */
  d_v: number;
  /** Feed-forward: two matrices with SiLU, or three with a gate. Default: `'silu'`. */
  mlp: 'silu' | 'swiglu';
  /** Hidden size of the feed-forward = round(dim * mlp_ratio). Default: `4`. */
  mlp_ratio: number;
  /** Use the embedding table as output matrix. Default: `false`. */
  tie_embeddings: boolean;
  /** Sparse attention, or the dense baseline. Default: `'nsa'`. */
  attention: 'nsa' | 'dense';
  /** Base of the rotary angles. Default: `10000`. */
  rope_theta: number;
  /** Positions are divided by this. Default: `1`. */
  rope_scale: number;
  /** Rows of the embedding; null = the vocabulary in use. Default: `null`. */
  vocab_size: number | null;
  /** Epsilon of RMSNorm. Default: `0.000001`. */
  norm_eps: number;
}

/** Section `nsa` of a config. The sparse attention of the model. */
export interface NsaConfig {
  /** Tokens in a compression block. Default: `32`. */
  l: number;
  /** Stride of the compression blocks; divides l and l_sel. Default: `16`. */
  d: number;
  /** Tokens in a selection block; at least l. Default: `64`. */
  l_sel: number;
  /** Blocks selected per token, the three forced ones among them. Default: `16`. */
  n_sel: number;
  /** Tokens in the sliding window. Default: `512`. */
  w: number;
  /** How a block becomes one compressed key and value. Default: `'avg'`. */
  phi: 'avg' | 'conv' | 'mlp';
  /** Hidden size of phi mlp; null = chosen by the model. Default: `null`. */
  phi_hidden: number | null;
  /** Where compressed keys get positions: after or before compression. Default: `'after'`. */
  cmp_rope: 'after' | 'before' | 'none';
  /** How the three branches are weighed. Default: `'softmax'`. */
  gate: 'softmax' | 'sigmoid';
  /** Temperature of the gate. Default: `1`. */
  gate_temp: number;
  /** Debug: use one branch only. Default: `'none'`. */
  force_branch: 'none' | 'cmp' | 'sel' | 'win';
  /** Debug: every branch weighs one third. Default: `false`. */
  force_uniform_gate: boolean;
  /** Debug: no gradient into the gate. Default: `false`. */
  stopgrad_gates: boolean;
}

/** Section `data` of a config. Where tokens come from. */
export interface DataConfig {
  /** Where documents come from. Default: `'synthetic'`. */
  source: 'synthetic' | 'needle' | 'text' | 'jsonl' | 'fineweb_edu' | 'fineweb_edu_local' | 'tokens';
  /** File, folder or glob of a local source; package:… = inside Trefoil. Default: `null`. */
  path: string | null;
  /** Byte, gpt2 or the path of a tokenizer.json. Default: `'byte'`. */
  tokenizer: string;
  /** Share of documents kept for validation. Default: `0.01`. */
  val_fraction: number;
  /** Packed documents do not see each other. Default: `false`. */
  document_mask: boolean;
  /** Visit documents in a seeded random order. Default: `true`. */
  shuffle: boolean;
  /** Seed of the data order; null = train.seed. Default: `null`. */
  seed: number | null;
  /** Field of a JSONL or Parquet row that holds the document. Default: `'text'`. */
  text_field: string;
  /** Vocabulary of synthetic tokens; null = the tokenizer’s. Default: `null`. */
  vocab_size: number | null;
  /** Source needle: records hidden in a sequence. Default: `16`. */
  needle_records: number;
  /** Source needle: facts of a record. Default: `4`. */
  needle_facts: number;
  /** Source needle: questions at the end of a sequence. Default: `64`. */
  needle_questions: number;
  /** Source needle: so many of the questions are about keys that are not there. Default: `0`. */
  needle_absent: number;
  /** Source needle: shorter sequences first, as LENGTH+LENGTH:SAMPLES, …; null = seq_len from the start. Default: `null`. */
  needle_curriculum: string | null;
  /** Dataset of fineweb_edu, as owner/name. Default: `'HuggingFaceFW/fineweb-edu'`. */
  hub_dataset: string;
  /** Its configuration, such as sample-10BT; null = its default. Default: `null`. */
  hub_config: string | null;
  /** Its split. Default: `'train'`. */
  hub_split: string;
  /** Its branch, tag or commit. Default: `'main'`. */
  hub_revision: string;
  /** Disk for fetched data; 0 = keep nothing. Default: `4`. */
  cache_gb: number;
  /** Threads that fetch and tokenise. Default: `2`. */
  workers: number;
  /** Documents tokenised at a time. Default: `64`. */
  fwe_doc_batch: number;
  /** Read ahead of the trainer. Default: `true`. */
  fwe_prefetch: boolean;
  /** Batches that wait ready. Default: `4`. */
  fwe_queue: number;
  /** Batches to have ready before step 1. Default: `0`. */
  fwe_warmup_batches: number;
  /** Seconds to wait for them. Default: `60`. */
  fwe_warmup_timeout: number;
  /** Seconds after which a source that gives nothing is dead. Default: `60`. */
  loader_timeout: number;
  /** Print progress every so many documents; 0 = never. Default: `1000`. */
  report_docs: number;
  /** Train on synthetic tokens when the source gives up. Default: `false`. */
  synthetic_on_fail: boolean;
}

/** Section `runtime` of a config. How and on what to compute. */
export interface RuntimeConfig {
  /** Where to compute; auto = CUDA when there is one. Default: `'auto'`. */
  device: 'auto' | 'cpu' | 'cuda';
  /** Type of activations and products; masters stay fp32. Default: `'fp32'`. */
  precision: 'fp32' | 'bf16';
  /** Run each block again in the backward pass instead of keeping activations. Default: `false`. */
  gradient_checkpointing: boolean;
  /** Bitwise equal runs on CUDA too. Default: `false`. */
  deterministic: boolean;
  /** Replay a training step of fixed shapes as one CUDA graph. Default: `true`. */
  cuda_graph: boolean;
  /** Name of a file in configs/profiles: values for one machine. Default: `null`. */
  profile: string | null;
  /** CPU threads; null = all cores. Default: `null`. */
  threads: number | null;
  /** V1 query-major, v2 shared loads, adaptive = v2 from sel_v2_min_s on. Default: `'adaptive'`. */
  selection_kernel: 'adaptive' | 'v1' | 'v2' | 'reference';
  /** Sequence length from which adaptive takes v2. Default: `1024`. */
  sel_v2_min_s: number;
  /** Prefill all tokens at once; false = one by one through decode. Default: `true`. */
  prefill_batched: boolean;
  /** Tokens of a prefill chunk; 0 = no chunks. Default: `0`. */
  prefill_tile: number;
  /** Pack the selected blocks of many tokens into one call. Default: `true`. */
  use_sel_pack: boolean;
  /** Reference kernels only. Default: `false`. */
  force_parity: boolean;
  /** Check every invariant in the hot path; slow. Default: `false`. */
  strict_asserts: boolean;
  /** Compare each fast kernel with its reference; slow. Default: `false`. */
  debug_compare: boolean;
  /** Time the sections of a step. Default: `false`. */
  debug_timing: boolean;
  /** Say once which kernel served each branch. Default: `false`. */
  sdpa_audit: boolean;
  /** Fused attention kernels; false = portable ones. Default: `true`. */
  use_fa2: boolean;
  /** The same for the window branch; null = as use_fa2. Default: `null`. */
  use_fa2_win: boolean | null;
  /** The same for the compressed branch; null = as use_fa2. Default: `null`. */
  use_fa2_cmp: boolean | null;
  /** Fused window kernel from this length on; -1 = never. Default: `0`. */
  fa2_min_len_win: number;
  /** Fused compressed kernel from this length on; -1 = never. Default: `0`. */
  fa2_min_len_cmp: number;
  /** Write TensorBoard events. Default: `true`. */
  tb: boolean;
  /** Write training.csv, val.csv and the counters. Default: `true`. */
  csv_logs: boolean;
  /** Gather gate and selection statistics. Default: `true`. */
  aux_stats: boolean;
}

/** Section `train` of a config. The training run. */
export interface TrainConfig {
  /** Optimizer steps; the schedule covers exactly these. Default: `1000`. */
  steps: number;
  /** Tokens in a sequence. Default: `2048`. */
  seq_len: number;
  /** Sequences in a micro-batch of one rank. Default: `1`. */
  batch_size: number;
  /** Micro-batches in an optimizer step. Default: `1`. */
  accumulate_grad_batches: number;
  /** Peak learning rate. Default: `0.0002`. */
  lr: number;
  /** The schedule ends at lr * lr_min_ratio. Default: `0.1`. */
  lr_min_ratio: number;
  /** Shape after the warmup. Default: `'cosine'`. */
  lr_schedule: 'cosine' | 'wsd' | 'linear' | 'constant';
  /** Steps of linear warmup. Default: `100`. */
  warmup_steps: number;
  /** Share of the steps in which wsd decays. Default: `0.2`. */
  wsd_decay_fraction: number;
  /** Decoupled, on matrices only. Default: `0.01`. */
  weight_decay: number;
  /** Decay of the two Adam moments. Default: `[0.9,0.95]`. */
  betas: [number, number];
  /** Epsilon of Adam. Default: `1e-8`. */
  eps: number;
  /** Largest gradient norm; 0 = no clipping. Default: `1`. */
  grad_clip: number;
  /** Steps between rows of training.csv. Default: `20`. */
  log_every: number;
  /** Steps between evaluations; 0 = none. Default: `0`. */
  eval_every: number;
  /** Batches of one evaluation. Default: `8`. */
  eval_batches: number;
  /** Steps between checkpoints; 0 = the final model only. Default: `500`. */
  save_every: number;
  /** Checkpoints kept. Default: `3`. */
  keep_last: number;
  /** Seed of weights and data. Default: `1337`. */
  seed: number;
  /** Folder of the run. Default: `'artifacts/train'`. */
  out_dir: string;
  /** Skip the update of a step whose loss or gradient spikes. Default: `false`. */
  spike_skip: boolean;
  /** Standard deviations that make a spike. Default: `6`. */
  spike_z: number;
  /** Steps between printed samples; 0 = none. Default: `0`. */
  sample_every: number;
  /** Several ranks: 1 yes, 0 no, -1 when a launcher started several. Default: `-1`. */
  ddp: -1 | 0 | 1;
  /** Ranks exchange gradients after the backward pass, in small pieces. Default: `false`. */
  ddp_safe: boolean;
  /** MiB of gradients that ranks exchange at a time; null = 2 on CPUs, 16 on GPUs. Default: `null`. */
  bucket_mb: number | null;
  /** Type of gradients between ranks. Default: `'fp32'`. */
  wire: 'fp32' | 'bf16';
  /** 1 = ZeRO-1: every rank keeps the optimizer state of its part only. Default: `0`. */
  zero: 0 | 1;
  /** Steps between comparisons of all ranks’ weights; 0 = none. Default: `500`. */
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
