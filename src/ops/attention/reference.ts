/** The whole attention core in float64: three branches, the selection and the gated sum, forward and backward. */

import { combineBackward, combineForward } from './combine/reference.js';
import { compressedBackward, compressedForward } from './compressed/reference.js';
import { selectBlocks } from './select/reference.js';
import { selectedBackward, selectedForward } from './selected/reference.js';
import type { HeadShape, SparseShape } from './shape.js';
import { windowBackward, windowForward } from './window/reference.js';

/**
 * `q` [T,H,dk] and all keys already rotated; `kCmp` [Tc,G,dk], `vCmp` [Tc,G,dv]; `kSel`, `kWin` [T,G,dk]; `gates`
 * [T,H,3].
 */
export interface NsaInputs {
  readonly q: Float64Array;
  /** Queries of the window branch; null or missing: `q`. */
  readonly qWin?: Float64Array | null;
  readonly kCmp: Float64Array;
  readonly vCmp: Float64Array;
  readonly kSel: Float64Array;
  readonly vSel: Float64Array;
  readonly kWin: Float64Array;
  readonly vWin: Float64Array;
  readonly gates: Float64Array;
}

/** cu_seqlens of the tokens and of the compressed blocks, and the sizes. */
export interface NsaLayout {
  readonly starts: ArrayLike<number>;
  readonly cmpStarts: ArrayLike<number>;
  readonly heads: HeadShape;
  readonly sparse: SparseShape;
}

export interface NsaOutputs {
  readonly out: Float64Array;
  readonly oCmp: Float64Array;
  readonly oSel: Float64Array;
  readonly oWin: Float64Array;
  readonly selected: Int32Array;
}

/** `selected` replaces the selection, to follow a kernel that ranked two equal scores the other way. */
export function nsaForward(inputs: NsaInputs, layout: NsaLayout, selected?: Int32Array): NsaOutputs {
  const { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = inputs;
  const { starts, cmpStarts, heads, sparse } = layout;
  const blocks = selected ?? selectBlocks(q, kCmp, starts, cmpStarts, heads, sparse);
  const oCmp = compressedForward(q, kCmp, vCmp, starts, cmpStarts, heads, sparse).out;
  const oSel = selectedForward(q, kSel, vSel, blocks, starts, heads, sparse).out;
  const oWin = windowForward(inputs.qWin ?? q, kWin, vWin, starts, heads, sparse.w).out;
  return { out: combineForward(gates, [oCmp, oSel, oWin]), oCmp, oSel, oWin, selected: blocks };
}

export interface NsaGradients {
  readonly dq: Float64Array;
  /** Null if the window branch has the queries of the others. */
  readonly dqWin: Float64Array | null;
  readonly dkCmp: Float64Array;
  readonly dvCmp: Float64Array;
  readonly dkSel: Float64Array;
  readonly dvSel: Float64Array;
  readonly dkWin: Float64Array;
  readonly dvWin: Float64Array;
  readonly dGates: Float64Array;
}

/** Gradients of `sum(out * dOut)`; none flows through the selection. */
export function nsaBackward(
  inputs: NsaInputs,
  layout: NsaLayout,
  outputs: NsaOutputs,
  dOut: Float64Array,
): NsaGradients {
  const { q, kCmp, vCmp, kSel, vSel, kWin, vWin, gates } = inputs;
  const { starts, cmpStarts, heads, sparse } = layout;
  const { oCmp, oSel, oWin, selected } = outputs;
  const { dGates, dBranches } = combineBackward(gates, [oCmp, oSel, oWin], dOut);
  const cmp = compressedBackward(q, kCmp, vCmp, starts, cmpStarts, heads, sparse, dBranches[0]);
  const sel = selectedBackward(q, kSel, vSel, selected, starts, heads, sparse, dBranches[1]);
  const win = windowBackward(inputs.qWin ?? q, kWin, vWin, starts, heads, sparse.w, dBranches[2]);
  const shared = inputs.qWin ? null : win.dq;
  return {
    dq: cmp.dq.map((value, i) => value + sel.dq[i] + (shared?.[i] ?? 0)),
    dqWin: shared ? null : win.dq,
    dkCmp: cmp.dk,
    dvCmp: cmp.dv,
    dkSel: sel.dk,
    dvSel: sel.dv,
    dkWin: win.dk,
    dvWin: win.dv,
    dGates,
  };
}
