/**
 * From dense to sparse attention. A converted model starts with a gate that lets only the selected branch through, and with
 * enough blocks to select all of them: that is dense attention. While training continues, the gate opens and the number of
 * blocks falls. Both follow from the step alone, so that a resumed run continues bit for bit.
 */
import type { Config } from '../config/schema.js';

/** Added to the logits of the closed branches: their weight, exp(-20) = 2e-9, is lost in the rounding of fp32. */
export const CLOSED_LOGIT = -20;

/** Logits (cmp, sel, win) of every head, in the order of the gate's bias [3 * heads]. */
export function closedGateBias(heads: number): Float32Array {
  return openedGateBias(heads, CLOSED_LOGIT);
}

/** The bias with `logit` for the compressed and the window branch, and 0 for the selected one. */
export function openedGateBias(heads: number, logit: number): Float32Array {
  return Float32Array.from({ length: 3 * heads }, (_, i) => (i % 3 === 1 ? 0 : logit));
}

/** Weight of the compressed and the window branch together after `step`, as far as the gate has learned nothing. */
export function releasedShare({ train }: Pick<Config, 'train'>, step: number): number {
  const { gate_release_steps: steps, gate_release_share: share } = train;
  return steps === 0 ? 0 : share * Math.min(1, step / steps);
}

/** What the schedule has added to the logits of these branches after `step`, from `CLOSED_LOGIT` at step 0. */
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
