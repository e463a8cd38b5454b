/**
 * From dense to sparse attention. A converted model starts with a gate that lets only the selected branch through, and with
 * enough blocks to select all of them: that is dense attention. While training continues, the gate opens and the number of
 * blocks falls. Both follow from the step alone, so that a resumed run continues bit for bit.
 */
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import type { RunMetrics } from '../run/metrics.js';
import type { Parameter } from '../tensor/parameter.js';

/** Added to the logits of the closed branches: their weight, exp(-20) = 2e-9, is lost in the rounding of fp32. */
export const CLOSED_LOGIT = -20;

/** Logits (cmp, sel, win) of every head, in the order of the gate's bias [3 * heads]. */
export function closedGateBias(heads: number): Float32Array {
  return openedGateBias(heads, CLOSED_LOGIT);
}

/** The bias with `logit` for the compressed and the window branch, and 0 for the selected one. */
function openedGateBias(heads: number, logit: number): Float32Array {
  return Float32Array.from({ length: 3 * heads }, (_, i) => (i % 3 === 1 ? 0 : logit));
}

/** Weight of the compressed and the window branch together after `step`, as far as the gate has learned nothing. */
export function releasedShare({ train }: Pick<Config, 'train'>, step: number): number {
  const { gate_release_steps: steps, gate_release_share: share } = train;
  return steps === 0 ? 0 : share * Math.min(1, step / steps);
}

/**
 * The value that the schedule has added to the logits of these branches after `step`, from `CLOSED_LOGIT` at step 0.
 */
export function releasedLogit(config: Pick<Config, 'train'>, step: number): number {
  const share = releasedShare(config, step);
  // Softmax over (logit, 0, logit) gives the two branches share / 2 each.
  return share === 0 ? CLOSED_LOGIT : Math.max(CLOSED_LOGIT, Math.log(share / 2 / (1 - share)));
}

/** Blocks that are selected in `step`: from `train.n_sel_from`, halved at equal intervals, down to `nsa.n_sel`. */
export function selectedBlocks({ nsa, train }: Pick<Config, 'nsa' | 'train'>, step: number): number {
  const { n_sel_from: from, n_sel_steps: steps } = train;
  if (from === null || step > steps) return nsa.n_sel;
  const counts: number[] = [];
  for (let count = from; count > nsa.n_sel; count = Math.ceil(count / 2)) counts.push(count);
  const stage = Math.floor((Math.max(0, step - 1) * counts.length) / steps);
  return counts[stage] ?? nsa.n_sel;
}

/** The config of the model as it is after `step`. */
export function configAfter(config: Config, step: number): Config {
  return { ...config, nsa: { ...config.nsa, n_sel: selectedBlocks(config, step) } };
}

/** The part of a model that the schedule changes. */
export interface SparseStartModel {
  readonly parameters: readonly Parameter[];
  /** Changes `shape.nsa.nSel`. */
  setSelectedBlocks?(nSel: number): void;
}

/** The schedule of a config; null if it has none. */
export function sparseStartOf(model: SparseStartModel, config: Config): SparseStart | null {
  const { gate_release_steps: gateSteps, n_sel_from: from } = config.train;
  return gateSteps === 0 && from === null ? null : new SparseStart(model, config);
}

/** Applies the schedule to a model, before every step. */
export class SparseStart {
  readonly #model: SparseStartModel;
  readonly #config: Config;

  constructor(model: SparseStartModel, config: Config) {
    this.#model = model;
    this.#config = config;
    if (config.train.n_sel_from !== null && !model.setSelectedBlocks)
      throw new UsageError('train.n_sel_from: this model has no setSelectedBlocks; leave the key out');
  }

  /** The state of the schedule in a step; empty when it is over. */
  metrics(step: number): RunMetrics {
    const { gate_release_steps: gateSteps, n_sel_from: from, n_sel_steps: blockSteps } = this.#config.train;
    if (step > Math.max(gateSteps, from === null ? 0 : blockSteps)) return {};
    return { n_sel: selectedBlocks(this.#config, step), gate_released: releasedShare(this.#config, step) };
  }

  /** Sets the number of blocks as it is in `step`. Idempotent. */
  setBlocks(step: number): void {
    if (this.#config.train.n_sel_from !== null) this.#model.setSelectedBlocks!(selectedBlocks(this.#config, step));
  }

  /** Once before every step. The gate's bias holds what the schedule has added: each step adds the difference. */
  enter(step: number): void {
    this.setBlocks(step);
    const config = this.#config;
    const change = releasedLogit(config, step) - releasedLogit(config, step - 1);
    if (config.train.gate_release_steps === 0 || change === 0) return;
    for (const parameter of gateBiases(this.#model)) {
      const addend = openedGateBias(parameter.value.size / 3, change);
      parameter.value.write(parameter.value.read().map((value, i) => value + addend[i]));
      parameter.changed();
    }
  }

  /** Before a new run: throws unless its gates are as `trefoil convert` writes them. */
  expectClosedGates(path: string | null): void {
    if (this.#config.train.gate_release_steps === 0) return;
    const isClosed = gateBiases(this.#model).every(({ value }) => {
      const expected = openedGateBias(value.size / 3, CLOSED_LOGIT);
      return value.read().every((logit, i) => logit === expected[i]);
    });
    if (!isClosed)
      throw new UsageError(
        `train.gate_release_steps: the gates of ${path ?? 'a new model'} are open already; start from a model that ` +
          'trefoil convert --sparse wrote (train.init_from), or leave the key out',
      );
  }
}

function gateBiases({ parameters }: SparseStartModel) {
  return parameters.filter(({ name }) => name.endsWith('.attention.gate.bias'));
}
