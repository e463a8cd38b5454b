/**
 * The environment variables of the PyTorch system whose runbooks Trefoil follows, and of launchers: which config key each
 * one sets, or which command reads it.
 */

/**
 * flag: 0 or 1. disable: 1 sets the key to false, 0 leaves it unchanged. ranges: NSA_SEL_RANGES_V2, 0 = v1 and 1 = v2.
 * none: recognized, but without effect.
 */
export type VariableType = 'flag' | 'disable' | 'integer' | 'number' | 'text' | 'ranges' | 'none';

export interface EnvironmentVariable {
  name: string;
  type: VariableType;
  /** The config key it sets, maybe by an earlier name with a meaning of its own; null if a command reads it directly. */
  key: string | null;
  /** The reader: all commands that resolve a config, one command, or nothing. */
  readBy: 'config' | 'watch' | 'train' | 'launch' | 'nothing';
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
  sets('NSA_SEQ_LEN', 'integer', 'train.seq_len', 'tokens per sequence'),
  sets('NSA_BATCH_SIZE', 'integer', 'train.batch_size', 'sequences per micro-batch'),
  sets('NSA_ACCUM', 'integer', 'train.accumulate_grad_batches', 'micro-batches per optimizer step'),
  sets('NSA_LR', 'number', 'train.lr', 'peak learning rate'),
  sets('NSA_TOKENIZER', 'text', 'data.tokenizer', 'byte, gpt2, stories or the path of a tokenizer.json'),
  sets('NSA_NO_GC', 'disable', 'runtime.gradient_checkpointing', 'disable gradient checkpointing'),
  sets('NSA_ROPE_SCALE', 'number', 'model.rope_scale', 'positions are divided by this factor'),
  sets('NSA_PREFILL_BATCHED', 'flag', 'runtime.prefill_batched', '0 = process the prompt token by token'),
  sets('NSA_PREFILL_TILE', 'integer', 'runtime.prefill_tile', 'tokens of a prompt processed at a time, 0 = all'),
  sets('NSA_USE_SEL_PACK', 'flag', 'runtime.use_sel_pack', '0 = selection kernel v1'),
  sets('NSA_FORCE_PARITY', 'flag', 'runtime.reference_kernels', 'reference kernels only'),
  sets('NSA_SEL_RANGES_V2', 'ranges', 'runtime.selection_kernel', 'selection kernel: 0 = v1, 1 = v2, unset = adaptive'),
  sets(
    'NSA_SEL_RANGES_V2_MIN_S',
    'integer',
    'runtime.selection_v2_min_len',
    'minimum sequence length for v2 if adaptive',
  ),
  sets('NSA_FORCE_BRANCH', 'text', 'nsa.force_branch', 'debug: cmp, sel or win only'),
  sets('NSA_FORCE_UNIFORM_GATE', 'flag', 'nsa.force_uniform_gate', 'debug: weight every branch with 1/3'),
  sets('NSA_STOPGRAD_GATES', 'flag', 'nsa.stopgrad_gates', 'debug: no gradient into the gate'),
  sets('NSA_STRICT_ASSERTS', 'flag', 'runtime.strict_asserts', 'check gates and selections in every pass; slow'),
  sets('NSA_DEBUG_COMPARE', 'flag', 'runtime.debug_compare', 'compare fast kernels with the reference; slow'),
  sets('NSA_DEBUG_TIMING', 'flag', 'runtime.debug_timing', 'time the sections of a step'),
  sets('NSA_SDPA_AUDIT', 'flag', 'runtime.print_kernels', 'print once which kernel computes each branch'),
  sets('NSA_USE_FA2', 'flag', 'runtime.use_fa2', 'fused attention kernels'),
  sets('NSA_USE_FA2_WIN', 'flag', 'runtime.use_fa2_win', '0 = no fused kernels, which compute all branches'),
  sets('NSA_USE_FA2_CMP', 'flag', 'runtime.use_fa2_cmp', 'as NSA_USE_FA2_WIN'),
  sets(
    'NSA_FA2_MIN_LEN_WIN',
    'integer',
    'runtime.fa2_min_len_win',
    'minimum sequence length for the fused kernels, -1 = never; the larger of both counts',
  ),
  sets('NSA_FA2_MIN_LEN_CMP', 'integer', 'runtime.fa2_min_len_cmp', 'as NSA_FA2_MIN_LEN_WIN'),
  sets('NSA_FWE_DOC_BATCH', 'integer', 'data.doc_batch', 'documents tokenized at a time'),
  sets('NSA_FWE_PREFETCH', 'flag', 'data.prefetch', 'read ahead of the trainer'),
  sets('NSA_FWE_Q', 'integer', 'data.queue', 'batches kept ready'),
  sets('NSA_FWE_WARMUP_BATCHES', 'integer', 'data.warmup_batches', 'batches that must be ready before step 1'),
  sets('NSA_FWE_WARMUP_TIMEOUT', 'number', 'data.warmup_timeout', 'seconds to wait for the warm-up batches'),
  sets('NSA_TB_DISABLE', 'disable', 'runtime.tensorboard', 'do not write TensorBoard events'),
  sets('NSA_DISABLE_CSV_LOGS', 'disable', 'runtime.csv_logs', 'do not write CSV files'),
  sets('NSA_DDP_SAFE_MODE', 'flag', 'train.ddp_safe', 'exchange gradients after the backward pass, in small pieces'),
  sets('DDP_SAFE', 'flag', 'train.ddp_safe', 'same as NSA_DDP_SAFE_MODE'),
  sets('NSA_DISABLE_AUX_STATS', 'disable', 'runtime.aux_stats', 'do not collect gate and selection statistics'),

  readBy('watch', 'NSA_WATCH_INTERVAL_S', 'number', 'seconds between checks'),
  readBy('watch', 'NSA_WATCH_HALT', 'flag', 'write .HALT on a critical alert'),
  readBy('watch', 'NSA_WATCH_HEARTBEAT_STALL_S', 'number', 'maximum age of a heartbeat'),
  readBy('watch', 'NSA_WATCH_GONE_S', 'number', 'seconds after which a run of unknown state is critical'),
  readBy('watch', 'NSA_WATCH_DEADLINE_FETCH_S', 'number', 'maximum time in the section fetch'),
  readBy('watch', 'NSA_WATCH_DEADLINE_STEP_S', 'number', 'maximum time in the section step'),
  readBy('watch', 'NSA_WATCH_DEADLINE_SAVE_S', 'number', 'maximum time in the section save'),
  readBy('watch', 'NSA_WATCH_DEADLINE_EVAL_S', 'number', 'maximum time in the sections eval, sample and boot'),
  readBy('watch', 'NSA_WATCH_FLATLINE_N', 'integer', 'consecutive heartbeats without throughput'),
  readBy('watch', 'NSA_WATCH_LOSS_FLATLINE_N', 'integer', 'consecutive heartbeats with the same loss, 0 = off'),
  readBy('watch', 'NSA_WATCH_GRAD_ZERO_N', 'integer', 'consecutive heartbeats with a gradient norm of 0'),
  readBy('watch', 'NSA_WATCH_GRAD_SPIKE', 'number', 'ratio of a gradient norm to its median that is a spike'),
  readBy('watch', 'NSA_WATCH_SPIKE_RATE', 'number', 'share of recent steps with a spike that is a warning'),
  readBy('watch', 'NSA_WATCH_SPIKE_WINDOW', 'integer', 'recent steps whose spikes are counted'),
  readBy('watch', 'NSA_WATCH_LOSS_WINDOW', 'integer', 'steps over which the loss must fall, 0 = off'),
  readBy('watch', 'NSA_WATCH_THROUGHPUT_DROP', 'number', 'drop of throughput that is a warning'),
  readBy('watch', 'NSA_WATCH_THROUGHPUT_WINDOW_S', 'number', 'seconds for which throughput must be low'),
  readBy('watch', 'NSA_WATCH_FETCH_S', 'number', 'median of recent fetch times that is a warning'),
  readBy('watch', 'NSA_WATCH_FETCH_STALL_RATIO', 'number', 'ratio of recent to usual fetch times that is a warning'),
  readBy('watch', 'NSA_WATCH_FETCH_P95_MS', 'number', 'fetch_p95_ms that is a warning'),
  readBy('watch', 'NSA_WATCH_GATE_COLLAPSE_N', 'integer', 'consecutive heartbeats with collapsed gates'),
  readBy('watch', 'NSA_WATCH_COLLAPSE_WARNING', 'number', 'share of collapsed gates that is a warning'),
  readBy('watch', 'NSA_WATCH_COLLAPSE_CRITICAL', 'number', 'share of collapsed gates that is critical'),
  readBy('watch', 'NSA_WATCH_COMMAND', 'text', 'command to run on an alert'),
  readBy('watch', 'NSA_WATCH_WEBHOOK', 'text', 'URL that receives a POST on an alert'),
  readBy('watch', 'NSA_WATCH_GATE_ENTROPY_MIN', 'number', 'mean gate entropy below which gates are collapsed'),
  readBy('watch', 'NSA_WATCH_GATE_MAX_THRESHOLD', 'number', 'mean of the largest gate that is a warning'),

  readBy('train', 'NSA_PG_TIMEOUT_MIN', 'number', 'minutes that a rank waits for the others'),
  readBy('train', 'RANK', 'integer', 'rank of this process'),
  readBy('train', 'WORLD_SIZE', 'integer', 'number of ranks'),
  readBy('train', 'LOCAL_RANK', 'integer', 'rank on this machine; selects the GPU'),
  readBy('train', 'MASTER_ADDR', 'text', 'host of the rendezvous'),
  readBy('train', 'MASTER_PORT', 'integer', 'port of the rendezvous'),

  readBy('nothing', 'NSA_USE_TRITON_SEL', 'none', 'Triton is not used; set runtime.selection_kernel'),
  readBy('nothing', 'NSA_USE_SEL_VARLEN', 'none', 'selection always supports ragged batches'),
  readBy('nothing', 'NSA_ENV_STATIC', 'none', 'the environment is always read once, at start-up'),
];
