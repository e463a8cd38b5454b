/** Applies the schedule of a model that turns from dense to sparse attention, before every step. */
import type { Config } from '../config/schema.js';
import { UsageError } from '../errors.js';
import { CLOSED_LOGIT, openedGateBias, releasedLogit, releasedShare, selectedBlocks } from '../model/sparse-start.js';
import type { TrainableModel } from './step.js';

/** State of the schedule in a step, for logs. */
export interface SparseStartState {
  readonly nSel: number;
  /** Weight that the schedule has given to the compressed and window branch; 0 if it does not open the gate. */
  readonly releasedShare: number;
}

export class SparseStart {
  readonly #model: TrainableModel;
  readonly #config: Config;

  constructor(model: TrainableModel, config: Config) {
    this.#model = model;
    this.#config = config;
    if (config.train.n_sel_from !== null && !model.setSelectedBlocks)
      throw new UsageError('train.n_sel_from: this model has no setSelectedBlocks; leave the key out');
  }

  /** Null without a schedule, and when it is over. */
  state(step: number): SparseStartState | null {
    const { gate_release_steps: gateSteps, n_sel_from: from, n_sel_steps: blockSteps } = this.#config.train;
    if (step > Math.max(gateSteps, from === null ? 0 : blockSteps)) return null;
    return { nSel: selectedBlocks(this.#config, step), releasedShare: releasedShare(this.#config, step) };
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

function gateBiases({ parameters }: TrainableModel) {
  return parameters.filter(({ name }) => name.endsWith('.attention.gate.bias'));
}
