/** The table of environment variables: which key each one sets, or which command reads it. */

/**
 * flag: 0 or 1. disable: 1 turns the key off, 0 leaves it alone (a variable that says "not disabled" is no wish to have
 * the thing on). ranges: NSA_SEL_RANGES_V2, 0 = v1 and 1 = v2. none: known, without effect here.
 */
export type VariableType = 'flag' | 'disable' | 'integer' | 'number' | 'text' | 'ranges' | 'none';

export interface EnvironmentVariable {
  name: string;
  type: VariableType;
  /** The config key it sets; null when it belongs to a command and not to the config. */
  key: string | null;
  /** Who reads it: every command that resolves a config, or the one named. */
  readBy: 'config' | 'watch' | 'train' | 'launch' | 'nobody';
  meaning: string;
}

const sets = (name: string, type: VariableType, key: string, meaning: string): EnvironmentVariable => ({
  name,
  type,
  key,
  readBy: 'config',
  meaning,
});

const readBy = (
  reader: EnvironmentVariable['readBy'],
  name: string,
  type: VariableType,
  meaning: string,
): EnvironmentVariable => ({ name, type, key: null, readBy: reader, meaning });

export const environmentVariables: readonly EnvironmentVariable[] = [
  sets('NSA_SEQ_LEN', 'integer', 'train.seq_len', 'tokens in a sequence'),
  sets('NSA_BATCH_SIZE', 'integer', 'train.batch_size', 'sequences in a micro-batch'),
  sets('NSA_ACCUM', 'integer', 'train.accumulate_grad_batches', 'micro-batches in a step'),
  sets('NSA_LR', 'number', 'train.lr', 'peak learning rate'),
  sets('NSA_TOKENIZER', 'text', 'data.tokenizer', 'byte, gpt2 or the path of a tokenizer.json'),
  sets('NSA_NO_GC', 'disable', 'runtime.gradient_checkpointing', 'no gradient checkpointing'),
  sets('NSA_ROPE_SCALE', 'number', 'model.rope_scale', 'positions are divided by this'),
  sets('NSA_PREFILL_BATCHED', 'flag', 'runtime.prefill_batched', 'prefill all tokens at once'),
  sets('NSA_PREFILL_TILE', 'integer', 'runtime.prefill_tile', 'tokens of a prefill chunk, 0 = no chunks'),
  sets('NSA_USE_SEL_PACK', 'flag', 'runtime.use_sel_pack', 'pack selected blocks'),
  sets('NSA_FORCE_PARITY', 'flag', 'runtime.force_parity', 'reference kernels only'),
  sets('NSA_SEL_RANGES_V2', 'ranges', 'runtime.selection_kernel', 'selection kernel: 0 = v1, 1 = v2, unset = adaptive'),
  sets('NSA_SEL_RANGES_V2_MIN_S', 'integer', 'runtime.sel_v2_min_s', 'length from which adaptive takes v2'),
  sets('NSA_FORCE_BRANCH', 'text', 'nsa.force_branch', 'debug: cmp, sel or win only'),
  sets('NSA_FORCE_UNIFORM_GATE', 'flag', 'nsa.force_uniform_gate', 'debug: every branch weighs one third'),
  sets('NSA_STOPGRAD_GATES', 'flag', 'nsa.stopgrad_gates', 'debug: no gradient into the gate'),
  sets('NSA_STRICT_ASSERTS', 'flag', 'runtime.strict_asserts', 'check every invariant; slow'),
  sets('NSA_DEBUG_COMPARE', 'flag', 'runtime.debug_compare', 'compare fast kernels with the reference; slow'),
  sets('NSA_DEBUG_TIMING', 'flag', 'runtime.debug_timing', 'time the sections of a step'),
  sets('NSA_SDPA_AUDIT', 'flag', 'runtime.sdpa_audit', 'say once which kernel served each branch'),
  sets('NSA_USE_FA2', 'flag', 'runtime.use_fa2', 'fused attention kernels'),
  sets('NSA_USE_FA2_WIN', 'flag', 'runtime.use_fa2_win', 'fused kernel of the window branch'),
  sets('NSA_USE_FA2_CMP', 'flag', 'runtime.use_fa2_cmp', 'fused kernel of the compressed branch'),
  sets('NSA_FA2_MIN_LEN_WIN', 'integer', 'runtime.fa2_min_len_win', 'fused window kernel from here on, -1 = never'),
  sets('NSA_FA2_MIN_LEN_CMP', 'integer', 'runtime.fa2_min_len_cmp', 'fused compressed kernel from here on, -1 = never'),
  sets('NSA_FWE_DOC_BATCH', 'integer', 'data.fwe_doc_batch', 'documents tokenised at a time'),
  sets('NSA_FWE_PREFETCH', 'flag', 'data.fwe_prefetch', 'read ahead of the trainer'),
  sets('NSA_FWE_Q', 'integer', 'data.fwe_queue', 'batches that wait ready'),
  sets('NSA_FWE_WARMUP_BATCHES', 'integer', 'data.fwe_warmup_batches', 'batches to have ready before step 1'),
  sets('NSA_FWE_WARMUP_TIMEOUT', 'number', 'data.fwe_warmup_timeout', 'seconds to wait for them'),
  sets('NSA_TB_DISABLE', 'disable', 'runtime.tb', 'no TensorBoard events'),
  sets('NSA_DISABLE_CSV_LOGS', 'disable', 'runtime.csv_logs', 'no CSV files'),
  sets('NSA_DDP_SAFE_MODE', 'flag', 'train.ddp_safe', 'ranks exchange gradients after the backward, in small pieces'),
  sets('DDP_SAFE', 'flag', 'train.ddp_safe', 'the same as NSA_DDP_SAFE_MODE'),
  sets('NSA_DISABLE_AUX_STATS', 'disable', 'runtime.aux_stats', 'no gate and selection statistics'),

  readBy('watch', 'NSA_WATCH_INTERVAL_S', 'number', 'seconds between checks'),
  readBy('watch', 'NSA_WATCH_HALT', 'flag', 'write .HALT on an anomaly'),
  readBy('watch', 'NSA_WATCH_HEARTBEAT_STALL_S', 'number', 'age of a heartbeat that counts as a stall'),
  readBy('watch', 'NSA_WATCH_GONE_S', 'number', 'time without the process that is an alarm'),
  readBy('watch', 'NSA_WATCH_DEADLINE_FETCH_S', 'number', 'longest time in the section fetch'),
  readBy('watch', 'NSA_WATCH_DEADLINE_STEP_S', 'number', 'longest time in the section step'),
  readBy('watch', 'NSA_WATCH_DEADLINE_SAVE_S', 'number', 'longest time in the section save'),
  readBy('watch', 'NSA_WATCH_DEADLINE_EVAL_S', 'number', 'longest time in the sections eval, sample and boot'),
  readBy('watch', 'NSA_WATCH_FLATLINE_N', 'integer', 'heartbeats without throughput before an alarm'),
  readBy('watch', 'NSA_WATCH_LOSS_FLATLINE_N', 'integer', 'heartbeats with the same loss before a warning, 0 = off'),
  readBy('watch', 'NSA_WATCH_GRAD_ZERO_N', 'integer', 'heartbeats with a zero gradient before an alarm'),
  readBy('watch', 'NSA_WATCH_GRAD_SPIKE', 'number', 'gradient norm over its median that is a spike'),
  readBy('watch', 'NSA_WATCH_THROUGHPUT_DROP', 'number', 'loss of throughput that is a warning'),
  readBy('watch', 'NSA_WATCH_THROUGHPUT_WINDOW_S', 'number', 'how long throughput must be down'),
  readBy('watch', 'NSA_WATCH_FETCH_S', 'number', 'median of recent fetches that is a warning'),
  readBy('watch', 'NSA_WATCH_FETCH_STALL_RATIO', 'number', 'recent fetches over the usual that is a warning'),
  readBy('watch', 'NSA_WATCH_FETCH_P95_MS', 'number', 'fetch_p95_ms that is a warning'),
  readBy('watch', 'NSA_WATCH_GATE_COLLAPSE_N', 'integer', 'heartbeats with collapsed gates before an alarm'),
  readBy('watch', 'NSA_WATCH_COLLAPSE_WARNING', 'number', 'share of collapsed gates that is a warning'),
  readBy('watch', 'NSA_WATCH_COLLAPSE_CRITICAL', 'number', 'share of collapsed gates that is an alarm'),
  readBy('watch', 'NSA_WATCH_COMMAND', 'text', 'command to run on an alert'),
  readBy('watch', 'NSA_WATCH_WEBHOOK', 'text', 'URL that gets a POST on an alert'),
  readBy('watch', 'NSA_WATCH_GATE_ENTROPY_MIN', 'number', 'gate entropy below this is a collapse'),
  readBy('watch', 'NSA_WATCH_GATE_MAX_THRESHOLD', 'number', 'mean of the largest gate above this is a collapse'),

  readBy('train', 'NSA_PG_TIMEOUT_MIN', 'number', 'minutes a rank waits for the others'),
  readBy('train', 'RANK', 'integer', 'number of this process among all'),
  readBy('train', 'WORLD_SIZE', 'integer', 'number of processes'),
  readBy('train', 'LOCAL_RANK', 'integer', 'number of this process on its machine: which GPU it takes'),
  readBy('train', 'MASTER_ADDR', 'text', 'machine where the ranks meet'),
  readBy('train', 'MASTER_PORT', 'integer', 'port where the ranks meet'),

  readBy('nobody', 'NSA_USE_TRITON_SEL', 'none', 'there is no Triton here; runtime.selection_kernel chooses'),
  readBy('nobody', 'NSA_USE_SEL_VARLEN', 'none', 'selection always takes ragged batches here'),
  readBy('nobody', 'NSA_ENV_STATIC', 'none', 'the environment is always read once, at the start'),
];
