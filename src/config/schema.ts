/**
 * The one schema of a config: every key, its default and what it means. Defaults are the 125m shape (configs/base.yaml).
 * A key that may be left open is null, not missing: a resolved config always has every key, so it prints and compares whole.
 */
import { z } from 'zod';
import { relationProblems } from './rules.js';

const count = () => z.int().min(1);
const countOrZero = () => z.int().min(0);
const positive = () => z.number().positive();
const notNegative = () => z.number().min(0);
const fraction = () => z.number().min(0).max(1);
const text = () => z.string().min(1);
const off = () => z.boolean().default(false);
const on = () => z.boolean().default(true);
const branchSwitch = () => z.boolean().nullable().default(null);

const model = z.strictObject({
  dim: count().default(768).describe('width of the residual stream'),
  n_layers: count().default(12).describe('transformer blocks'),
  n_heads: count().default(12).describe('query heads H'),
  n_kv_groups: count().default(2).describe('key/value groups G; divides n_heads, 1 to 16 heads each'),
  d_k: count().default(64).describe('size of a query or key head; even, because rotary positions turn pairs'),
  d_v: count().default(64).describe('size of a value head'),
  mlp: z
    .enum(['silu', 'swiglu'])
    .default('silu')
    .describe('feed-forward: two matrices with SiLU, or three with a gate'),
  mlp_ratio: positive().default(4).describe('hidden size of the feed-forward = round(dim * mlp_ratio)'),
  tie_embeddings: off().describe('use the embedding table as output matrix'),
  attention: z.enum(['nsa', 'dense']).default('nsa').describe('sparse attention, or the dense baseline'),
  rope_theta: positive().default(10000).describe('base of the rotary angles'),
  rope_scale: positive().default(1).describe('positions are divided by this'),
  vocab_size: z.int().min(2).nullable().default(null).describe('rows of the embedding; null = the vocabulary in use'),
  norm_eps: positive().default(1e-6).describe('epsilon of RMSNorm'),
});

const nsa = z.strictObject({
  l: count().default(32).describe('tokens in a compression block'),
  d: count().default(16).describe('stride of the compression blocks; divides l and l_sel'),
  l_sel: count().default(64).describe('tokens in a selection block; at least l'),
  n_sel: z.int().min(3).default(16).describe('blocks selected per token, the three forced ones among them'),
  w: count().default(512).describe('tokens in the sliding window'),
  phi: z.enum(['avg', 'conv', 'mlp']).default('avg').describe('how a block becomes one compressed key and value'),
  phi_hidden: count().nullable().default(null).describe('hidden size of phi mlp; null = chosen by the model'),
  cmp_rope: z
    .enum(['after', 'before', 'none'])
    .default('after')
    .describe('where compressed keys get positions: after or before compression'),
  gate: z.enum(['softmax', 'sigmoid']).default('softmax').describe('how the three branches are weighed'),
  gate_temp: positive().default(1).describe('temperature of the gate'),
  force_branch: z.enum(['none', 'cmp', 'sel', 'win']).default('none').describe('debug: use one branch only'),
  force_uniform_gate: off().describe('debug: every branch weighs one third'),
  stopgrad_gates: off().describe('debug: no gradient into the gate'),
});

const data = z.strictObject({
  source: z
    .enum(['synthetic', 'needle', 'text', 'jsonl', 'fineweb_edu', 'fineweb_edu_local', 'tokens'])
    .default('synthetic')
    .describe('where documents come from'),
  path: text().nullable().default(null).describe('file, folder or glob of a local source; package:… = inside Trefoil'),
  tokenizer: text().default('byte').describe('byte, gpt2 or the path of a tokenizer.json'),
  val_fraction: z.number().min(0).lt(1).default(0.01).describe('share of documents kept for validation'),
  document_mask: off().describe('packed documents do not see each other'),
  shuffle: on().describe('visit documents in a seeded random order'),
  seed: countOrZero().nullable().default(null).describe('seed of the data order; null = train.seed'),
  text_field: text().default('text').describe('field of a JSONL or Parquet row that holds the document'),
  vocab_size: z
    .int()
    .min(2)
    .nullable()
    .default(null)
    .describe('vocabulary of synthetic tokens; null = the tokenizer’s'),
  needle_records: count().default(16).describe('source needle: records hidden in a sequence'),
  needle_facts: count().default(4).describe('source needle: facts of a record'),
  needle_questions: count().default(64).describe('source needle: questions at the end of a sequence'),
  needle_absent: countOrZero()
    .default(0)
    .describe('source needle: so many of the questions are about keys that are not there'),
  needle_curriculum: text()
    .nullable()
    .default(null)
    .describe('source needle: shorter sequences first, as LENGTH+LENGTH:SAMPLES, …; null = seq_len from the start'),
  hub_dataset: text().default('HuggingFaceFW/fineweb-edu').describe('dataset of fineweb_edu, as owner/name'),
  hub_config: text().nullable().default(null).describe('its configuration, such as sample-10BT; null = its default'),
  hub_split: text().default('train').describe('its split'),
  hub_revision: text().default('main').describe('its branch, tag or commit'),
  cache_gb: notNegative().default(4).describe('disk for fetched data; 0 = keep nothing'),
  workers: count().default(2).describe('threads that fetch and tokenise'),
  fwe_doc_batch: count().default(64).describe('documents tokenised at a time'),
  fwe_prefetch: on().describe('read ahead of the trainer'),
  fwe_queue: count().default(4).describe('batches that wait ready'),
  fwe_warmup_batches: countOrZero().default(0).describe('batches to have ready before step 1'),
  fwe_warmup_timeout: notNegative().default(60).describe('seconds to wait for them'),
  loader_timeout: positive().default(60).describe('seconds after which a source that gives nothing is dead'),
  report_docs: countOrZero().default(1000).describe('print progress every so many documents; 0 = never'),
  synthetic_on_fail: off().describe('train on synthetic tokens when the source gives up'),
});

const runtime = z.strictObject({
  device: z.enum(['auto', 'cpu', 'cuda']).default('auto').describe('where to compute; auto = CUDA when there is one'),
  precision: z.enum(['fp32', 'bf16']).default('fp32').describe('type of activations and products; masters stay fp32'),
  gradient_checkpointing: off().describe('run each block again in the backward pass instead of keeping activations'),
  deterministic: off().describe('bitwise equal runs on CUDA too'),
  cuda_graph: on().describe('replay a training step of fixed shapes as one CUDA graph'),
  profile: text().nullable().default(null).describe('name of a file in configs/profiles: values for one machine'),
  threads: count().nullable().default(null).describe('CPU threads; null = all cores'),
  selection_kernel: z
    .enum(['adaptive', 'v1', 'v2', 'reference'])
    .default('adaptive')
    .describe('v1 query-major, v2 shared loads, adaptive = v2 from sel_v2_min_s on'),
  sel_v2_min_s: countOrZero().default(1024).describe('sequence length from which adaptive takes v2'),
  prefill_batched: on().describe('prefill all tokens at once; false = one by one through decode'),
  prefill_tile: countOrZero().default(0).describe('tokens of a prefill chunk; 0 = no chunks'),
  use_sel_pack: on().describe('pack the selected blocks of many tokens into one call'),
  force_parity: off().describe('reference kernels only'),
  strict_asserts: off().describe('check every invariant in the hot path; slow'),
  debug_compare: off().describe('compare each fast kernel with its reference; slow'),
  debug_timing: off().describe('time the sections of a step'),
  sdpa_audit: off().describe('say once which kernel served each branch'),
  use_fa2: on().describe('fused attention kernels; false = portable ones'),
  use_fa2_win: branchSwitch().describe('the same for the window branch; null = as use_fa2'),
  use_fa2_cmp: branchSwitch().describe('the same for the compressed branch; null = as use_fa2'),
  fa2_min_len_win: z.int().min(-1).default(0).describe('fused window kernel from this length on; -1 = never'),
  fa2_min_len_cmp: z.int().min(-1).default(0).describe('fused compressed kernel from this length on; -1 = never'),
  tb: on().describe('write TensorBoard events'),
  csv_logs: on().describe('write training.csv, val.csv and the counters'),
  aux_stats: on().describe('gather gate and selection statistics'),
});

const beta = () => z.number().min(0).lt(1);

const train = z.strictObject({
  steps: count().default(1000).describe('optimizer steps; the schedule covers exactly these'),
  seq_len: count().default(2048).describe('tokens in a sequence'),
  batch_size: count().default(1).describe('sequences in a micro-batch of one rank'),
  accumulate_grad_batches: count().default(1).describe('micro-batches in an optimizer step'),
  lr: positive().default(2e-4).describe('peak learning rate'),
  lr_min_ratio: fraction().default(0.1).describe('the schedule ends at lr * lr_min_ratio'),
  lr_schedule: z.enum(['cosine', 'wsd', 'linear', 'constant']).default('cosine').describe('shape after the warmup'),
  warmup_steps: countOrZero().default(100).describe('steps of linear warmup'),
  wsd_decay_fraction: fraction().default(0.2).describe('share of the steps in which wsd decays'),
  weight_decay: notNegative().default(0.01).describe('decoupled, on matrices only'),
  betas: z.tuple([beta(), beta()]).default([0.9, 0.95]).describe('decay of the two Adam moments'),
  eps: positive().default(1e-8).describe('epsilon of Adam'),
  grad_clip: notNegative().default(1).describe('largest gradient norm; 0 = no clipping'),
  log_every: count().default(20).describe('steps between rows of training.csv'),
  eval_every: countOrZero().default(0).describe('steps between evaluations; 0 = none'),
  eval_batches: count().default(8).describe('batches of one evaluation'),
  save_every: countOrZero().default(500).describe('steps between checkpoints; 0 = the final model only'),
  keep_last: count().default(3).describe('checkpoints kept'),
  seed: countOrZero().default(1337).describe('seed of weights and data'),
  out_dir: text().default('artifacts/train').describe('folder of the run'),
  spike_skip: off().describe('skip the update of a step whose loss or gradient spikes'),
  spike_z: positive().default(6).describe('standard deviations that make a spike'),
  sample_every: countOrZero().default(0).describe('steps between printed samples; 0 = none'),
  ddp: z.literal([-1, 0, 1]).default(-1).describe('several ranks: 1 yes, 0 no, -1 when a launcher started several'),
  ddp_safe: off().describe('ranks exchange gradients after the backward pass, in small pieces'),
  bucket_mb: positive()
    .nullable()
    .default(null)
    .describe('MiB of gradients that ranks exchange at a time; null = 2 on CPUs, 16 on GPUs'),
  wire: z.enum(['fp32', 'bf16']).default('fp32').describe('type of gradients between ranks'),
  zero: z.literal([0, 1]).default(0).describe('1 = ZeRO-1: every rank keeps the optimizer state of its part only'),
  hash_every: countOrZero().default(500).describe('steps between comparisons of all ranks’ weights; 0 = none'),
});

/** The sections without the relations between keys; keys.ts reads names, defaults and limits from here. */
export const configShape = z.strictObject({
  model: model.prefault({}),
  nsa: nsa.prefault({}),
  data: data.prefault({}),
  runtime: runtime.prefault({}),
  train: train.prefault({}),
});

export type { Config, ConfigInput } from './types.js';

export const configSchema = configShape.superRefine((config, context) => {
  for (const problem of relationProblems(config)) {
    context.addIssue({ code: 'custom', path: problem.path.split('.'), message: problem.message });
  }
});
