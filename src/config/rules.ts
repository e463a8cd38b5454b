/** Rules between keys (docs/explain/attention.md). Each problem names one key and the allowed values. */
import { greatestCommonDivisor } from '../numbers.js';
import { isOneOf, readsPath, VALIDATION_PATH_SOURCES } from './data-sources.js';
import { mixtureProblems } from './mixture.js';
import type { Config } from './schema.js';

export interface ConfigProblem {
  /** The key, as `section.name`; empty for the config as a whole. */
  path: string;
  message: string;
}

/** Maximum heads per group that the kernels of all devices support. */
const MAX_HEADS_PER_GROUP = 32;

/** Limits the search for divisors when a config contains a nonsensical size. */
const MAX_LISTED_DIVISOR = 1024;

function divisors(value: number): number[] {
  const found: number[] = [];
  for (let candidate = 1; candidate <= Math.min(value, MAX_LISTED_DIVISOR); candidate++) {
    if (value % candidate === 0) found.push(candidate);
  }
  return found;
}

/** Numbers of groups with 1 to 32 heads per group. */
function groupCounts(heads: number): number[] {
  return divisors(heads)
    .filter((perGroup) => perGroup <= MAX_HEADS_PER_GROUP)
    .map((perGroup) => heads / perGroup)
    .reverse();
}

const oneOf = (values: readonly number[]) => (values.length === 1 ? `${values[0]}` : `one of ${values.join(', ')}`);

function headProblems({ n_heads, n_kv_groups, d_k, ...model }: Config['model']): ConfigProblem[] {
  const problems: ConfigProblem[] = [];
  const perGroup = n_heads / n_kv_groups;
  if (!Number.isInteger(perGroup) || perGroup > MAX_HEADS_PER_GROUP) {
    const reason = Number.isInteger(perGroup)
      ? `leaves ${perGroup} heads in a group, more than ${MAX_HEADS_PER_GROUP}`
      : `does not divide model.n_heads ${n_heads}`;
    const allowed = oneOf(groupCounts(n_heads));
    problems.push({ path: 'model.n_kv_groups', message: `${n_kv_groups} ${reason}; ${allowed}` });
  }
  if (d_k % 2 !== 0) {
    const message = `${d_k} is odd; rotary positions need an even size such as ${d_k + 1}`;
    problems.push({ path: 'model.d_k', message });
  }
  const { rope_low_freq_factor: low, rope_high_freq_factor: high } = model;
  if (model.rope_type === 'llama3' && low >= high) {
    const message = `${low} is not below model.rope_high_freq_factor ${high}; lower it`;
    problems.push({ path: 'model.rope_low_freq_factor', message });
  }
  return problems;
}

function blockProblems({ l, d, l_sel, n_sel, init_blocks, local_blocks }: Config['nsa']): ConfigProblem[] {
  const problems: ConfigProblem[] = [];
  const missed = [
    ...(l % d === 0 ? [] : [`nsa.l ${l}`]),
    // The stride must divide both block sizes; else a compression block would cross selection blocks within a stride.
    ...(l_sel % d === 0 ? [] : [`nsa.l_sel ${l_sel}`]),
  ];
  if (missed.length > 0) {
    const allowed = oneOf(divisors(greatestCommonDivisor(l, l_sel)));
    problems.push({ path: 'nsa.d', message: `${d} does not divide ${missed.join(' and ')}; ${allowed}` });
  }
  if (l > l_sel) {
    problems.push({ path: 'nsa.l', message: `${l} is greater than nsa.l_sel ${l_sel}; at most nsa.l_sel` });
  }
  if (n_sel < init_blocks + local_blocks) {
    const forced = `nsa.init_blocks ${init_blocks} + nsa.local_blocks ${local_blocks}`;
    problems.push({ path: 'nsa.n_sel', message: `${n_sel} is less than ${forced}; at least their sum` });
  }
  return problems;
}

/** A model of window layers alone would select nothing anywhere: what reports on the selection needs one sparse layer. */
function patternProblems({ attention, layer_pattern: pattern, n_layers: layers }: Config['model']): ConfigProblem[] {
  const path = 'model.layer_pattern';
  const written = `[${pattern.join(', ')}]`;
  if (!pattern.includes('window')) return [];
  if (attention !== 'nsa') return [{ path, message: `${written} needs model.attention nsa; set it, or [nsa]` }];
  if (pattern.slice(0, layers).includes('nsa')) return [];
  return [{ path, message: `${written} gives none of the ${layers} layers sparse attention; at least one nsa` }];
}

/** Settings that positions in the window alone require. */
function branchProblems({ nsa }: Config): ConfigProblem[] {
  const problems: ConfigProblem[] = [];
  const path = 'nsa.rope';
  if (nsa.rope === 'window' && nsa.cmp_rope !== 'none')
    problems.push({ path, message: `window needs nsa.cmp_rope none, not ${nsa.cmp_rope}; set it, or all` });
  if (nsa.rope === 'window' && nsa.shared_kv)
    problems.push({ path, message: 'window needs keys of its own: nsa.shared_kv false; set it, or all' });
  return problems;
}

/** Settings that the loss of the scorer requires. */
function scorerLossProblems({ model, nsa, train, runtime }: Config): ConfigProblem[] {
  const { scorer_loss: weight } = train;
  const path = 'train.scorer_loss';
  // Dense attention chooses nothing: like the keys of nsa the weight has no effect there.
  if (weight === 0 || model.attention !== 'nsa') return [];
  if (nsa.score_pool === 'max') return [{ path, message: `${weight} needs nsa.score_pool sum; set it, or 0` }];
  if (runtime.reference_kernels)
    return [{ path, message: `${weight} is not computed by runtime.reference_kernels; set it to false, or 0` }];
  return [];
}

/** The schedule from dense to sparse attention. */
function sparseStartProblems({ model, nsa, train }: Config): ConfigProblem[] {
  const { gate_release_steps: gateSteps, n_sel_from: from } = train;
  const problems: ConfigProblem[] = [];
  const add = (path: string, message: string) => void problems.push({ path, message });
  if (gateSteps > 0) {
    const path = 'train.gate_release_steps';
    if (model.attention !== 'nsa') add(path, `${gateSteps} needs model.attention nsa; set it, or 0`);
    else if (nsa.gate !== 'softmax') add(path, `${gateSteps} needs nsa.gate softmax; set it, or 0`);
    else if (nsa.force_branch !== 'none' || nsa.force_uniform_gate)
      add(path, `${gateSteps} has no effect with a forced gate (nsa.force_branch, nsa.force_uniform_gate); set 0`);
  }
  if (from !== null) {
    if (model.attention !== 'nsa') add('train.n_sel_from', `${from} needs model.attention nsa; set it, or null`);
    if (from < nsa.n_sel) add('train.n_sel_from', `${from} is less than nsa.n_sel ${nsa.n_sel}; at least nsa.n_sel`);
  }
  return problems;
}

/** Adapters, and what contradicts them. */
function trainedProblems({ train, runtime }: Config): ConfigProblem[] {
  const path = 'train.lora';
  if (train.lora === null) return [];
  if (train.init_from === null)
    return [{ path, message: 'adapters need a model that they adapt; give it with --from (train.init_from)' }];
  if (train.trainable !== null)
    return [{ path, message: 'only adapters are trained, which contradicts train.trainable; set one of the two' }];
  if (runtime.fp8) return [{ path, message: 'adapters are not computed with runtime.fp8; set it to false' }];
  return [];
}

export function relationProblems(config: Config): ConfigProblem[] {
  const problems = [
    ...headProblems(config.model),
    ...patternProblems(config.model),
    ...blockProblems(config.nsa),
    ...branchProblems(config),
    ...sparseStartProblems(config),
    ...scorerLossProblems(config),
    ...mixtureProblems(config.data),
    ...trainedProblems(config),
  ];
  if (config.nsa.force_branch !== 'none' && config.nsa.force_uniform_gate) {
    const message = `true contradicts nsa.force_branch ${config.nsa.force_branch}; set one of the two`;
    problems.push({ path: 'nsa.force_uniform_gate', message });
  }
  if (config.train.optimizer === 'muon' && config.train.zero === 1) {
    const message = 'muon needs whole matrices, which train.zero 1 splits between ranks; set train.zero 0, or adamw';
    problems.push({ path: 'train.optimizer', message });
  }
  if (readsPath(config.data.source) && config.data.path === null) {
    const message = `missing; data.source ${config.data.source} needs a path (--local-path)`;
    problems.push({ path: 'data.path', message });
  }
  if (
    config.data.val_path !== null &&
    config.data.sources === null &&
    !isOneOf(VALIDATION_PATH_SOURCES, config.data.source)
  ) {
    const message = `not read by data.source ${config.data.source}; one of ${VALIDATION_PATH_SOURCES.join(', ')} reads it`;
    problems.push({ path: 'data.val_path', message });
  }
  return problems;
}
