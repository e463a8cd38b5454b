/**
 * A gate that lets only the selected branch through, and its gradual opening. A model that is converted from dense to
 * sparse attention starts with it, because the selected branch alone can equal dense attention.
 */

/** Added to the logits of the closed branches: their weight, exp(-20) = 2e-9, is lost in the rounding of fp32. */
export const CLOSED_LOGIT = -20;

/** Logits (cmp, sel, win) of every head, in the order of the gate's bias [3 * heads]. */
export function closedGateBias(heads: number): Float32Array {
  return Float32Array.from({ length: 3 * heads }, (_, i) => (i % 3 === 1 ? 0 : CLOSED_LOGIT));
}
