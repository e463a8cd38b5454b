/** Meaning of each health rule, and the remedy when it is not green. */
import { METRIC_ENTRIES } from '../run/metrics.js';
import type { RuleRow } from './row.js';

const EXPLANATIONS: Readonly<Record<string, string>> = {
  process: 'The run is neither running nor done. trefoil status says what to do.',
  halt: 'A .HALT file stops the run after its step. The next start with train --resume auto removes it.',
  anomaly:
    'The trainer or a watchdog found a critical problem and wrote .anomaly_type. Find its cause; delete the file if ' +
    'the run has recovered. The next start with train --resume auto removes it.',
  files: 'Some files of the run cannot be read, so the other rules may be incomplete.',
  out_of_memory:
    'Memory of the host or of the device ran out, or is about to. Lower train.batch_size (and raise ' +
    'train.accumulate_grad_batches) or train.seq_len, or set runtime.gradient_checkpointing; doctor --config estimates it.',
  data:
    'The source failed and random tokens replace it (--synthetic-on-fail): nothing is learned from them. Halt the run, ' +
    'repair the source and resume from the last checkpoint before; the position in the real data is kept.',
  ranks: 'Ranks must advance together. A rank that is missing or behind is lost or stuck.',
  heartbeat:
    'No step has finished for too long: the trainer hangs or was killed. See stackdump_*.txt in the run folder.',
  section: 'One part of the step takes far longer than it should, so the rank is probably stuck there.',
  loss: 'The loss or the gradient is NaN or infinite. Resume from an earlier checkpoint, with a lower learning rate.',
  gate_entropy:
    'The gate gives almost all weight to one branch, so the other branches stop learning. See ' +
    'gate_collapse_details.json. A converted model starts like this: train it with train.gate_release_steps.',
  gate_collapse:
    'For many tokens a single branch takes over the gate. See gate_collapse_details.json. A converted model starts ' +
    'like this: train it with train.gate_release_steps.',
  grad_zero: 'The gradient is exactly zero: nothing is being learned.',
  grad_spike:
    'The gradient is far above its median. A single spike is harmless; repeated ones need a lower learning rate.',
  spikes:
    'Many steps have an unusual loss or gradient norm. Single spikes are harmless; many need a lower learning rate, a lower ' +
    'train.grad_clip, or train.spike_skip, which leaves such updates out.',
  loss_trend:
    'The loss does not fall any more over this window, beyond its noise: lower the learning rate, look at the data, or end ' +
    'the run. --loss-window 0 switches the rule off.',
  fetch: 'The trainer waits for data. Add data.workers, or prepare the data with trefoil data prepare.',
  fetch_stall: 'Fetching data became much slower than usual: check the disk or the network.',
  flatline: 'Heartbeats arrive but no tokens are processed.',
  loss_flatline: 'The loss does not change at all, so the weights are probably not being updated.',
  throughput: 'The run is much slower than before or than required. Check other processes on the machine and the data.',
  fallbacks: 'A fallback replaced the normal path, or a save failed, and the counter grows. See fallback_counters.csv.',
  memory: 'Reserved memory keeps growing, which suggests a leak; the run may end with an out-of-memory error.',
  steps: 'The run has fewer steps than required.',
  loss_finite: 'Some logged losses are NaN or infinite.',
  loss_falls: 'The loss at the end is not below the loss at the start: the model did not learn.',
  csv: 'training.csv contains rows that cannot be parsed.',
  heartbeats: 'The heartbeat file has no steps.',
  gradients: 'Some gradient norms are zero, NaN or infinite.',
  selection: 'Tokens select no blocks, so the selected branch has no effect.',
  baseline_toks_per_s: 'The run is slower than the baseline allows.',
  baseline_loss: 'The final loss is higher than the baseline allows.',
  baseline_memory: 'The run uses more memory than the baseline allows.',
  ...Object.fromEntries(METRIC_ENTRIES.flatMap(([, { limit }]) => (limit ? [[limit.rule, limit.advice]] : []))),
};

/** The explanation of a row's rule. Rules of one of several ranks end in ` rankN`. */
export function explainRule(rule: string): string {
  return EXPLANATIONS[rule.replace(/ rank\d+$/, '')] ?? '';
}

/** `rule: explanation` for every row that is not green. */
export function explainRows(rows: readonly RuleRow[]): string[] {
  return rows.filter(({ level }) => level !== 'green').map(({ rule }) => `${rule}: ${explainRule(rule)}`);
}
