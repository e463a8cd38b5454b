/** Golden attention cases: made by an independent implementation, see /test/golden. */
import { fileURLToPath } from 'node:url';
import type { NsaInputs, NsaLayout } from '../ops/attention/reference.js';
import { compressedCount } from '../ops/common/sequences.js';
import { readSafetensors, toFloat64 } from '../run/safetensors.js';

export const GOLDEN_SMALL = fileURLToPath(new URL('../../test/golden/dev-small.safetensors', import.meta.url));

export interface GoldenCase {
  readonly inputs: NsaInputs;
  readonly layout: NsaLayout;
  readonly dOut: Float64Array;
  readonly outputs: Record<'out' | 'oCmp' | 'oSel' | 'oWin', Float64Array>;
  /** [S,G,nSel] as here: ascending with the padding at the end (the file has it first). */
  readonly selected: Int32Array;
  readonly gradients: Record<'dq' | 'dkCmp' | 'dvCmp' | 'dkSel' | 'dvSel' | 'dkWin' | 'dvWin' | 'dGates', Float64Array>;
}

export function readGolden(path: string = GOLDEN_SMALL): GoldenCase {
  const { metadata, tensors } = readSafetensors(path);
  const size = (name: string) => Number(metadata[name]);
  const get = (name: string) => toFloat64(tensors.get(name)!);
  const [l, d, nSel] = [size('l'), size('d'), size('n_sel')];
  return {
    inputs: {
      q: get('q'),
      kCmp: get('k_cmp'),
      vCmp: get('v_cmp'),
      kSel: get('k_sel'),
      vSel: get('v_sel'),
      kWin: get('k_win'),
      vWin: get('v_win'),
      gates: get('gates'),
    },
    layout: {
      starts: [0, size('S')],
      cmpStarts: [0, compressedCount(size('S'), l, d)],
      heads: { heads: size('H'), groups: size('G'), dk: size('d_k'), dv: size('d_v') },
      sparse: { l, d, lSel: size('l_sel'), nSel, w: size('w') },
    },
    dOut: get('d_out'),
    outputs: { out: get('out'), oCmp: get('o_cmp'), oSel: get('o_sel'), oWin: get('o_win') },
    selected: paddedLast(get('selected'), nSel),
    gradients: {
      dq: get('dq'),
      dkCmp: get('dk_cmp'),
      dvCmp: get('dv_cmp'),
      dkSel: get('dk_sel'),
      dvSel: get('dv_sel'),
      dkWin: get('dk_win'),
      dvWin: get('dv_win'),
      dGates: get('d_gates'),
    },
  };
}

function paddedLast(selected: Float64Array, width: number): Int32Array {
  const rows = new Int32Array(selected.length).fill(-1);
  for (let row = 0; row < selected.length; row += width)
    rows.set(
      selected.subarray(row, row + width).filter((block) => block >= 0),
      row,
    );
  return rows;
}
