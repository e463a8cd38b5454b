/**
 * Golden cases: attention by an independent implementation, models and tokenizers in the layout of Hugging Face
 * (test/golden/README.md). A checkout may have more of them beside it, in `../shared/golden`.
 */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { NsaInputs, NsaLayout } from '../ops/attention/reference.js';
import { compressedCount } from '../ops/common/sequences.js';
import { readSafetensors } from '../run/safetensors.js';
import { toFloat64 } from '../run/safetensors-format.js';

const root = fileURLToPath(new URL('../../', import.meta.url));
export const GOLDEN_SMALL = join(root, 'test/golden/dev-small.safetensors');

/** Computes golden models with numpy and compares a folder with them. */
export const GOLDEN_REFERENCE = join(root, 'test/golden/hf/reference.py');

/** The golden cases that are not part of the repository. */
export const SHARED_GOLDEN = join(root, '../shared/golden');

/** Why a golden case beside the checkout cannot be tested; null if it can. */
export function sharedGoldenAbsence(name: string): string | null {
  const path = join(SHARED_GOLDEN, name);
  return existsSync(path) ? null : `${path} does not exist: it is not part of the repository`;
}

/** Golden folders that have `file` with a matching text, as [name, folder]: of the repository, and beside the checkout. */
export function goldenFolders(file: string, pattern = /(?:)/): [name: string, folder: string][] {
  return [join(root, 'test/golden/hf'), join(SHARED_GOLDEN, 'hf')]
    .filter((parent) => existsSync(parent))
    .flatMap((parent) => readdirSync(parent).map((name) => join(parent, name)))
    .filter((folder) => existsSync(join(folder, file)) && pattern.test(readFileSync(join(folder, file), 'utf8')))
    .map((folder) => [relative(root, folder), folder]);
}

/** Golden models with dense attention. */
export function denseGoldenModels(): [name: string, folder: string][] {
  return goldenFolders('config.json', /"(Llama|Qwen2|Qwen3|Mistral)ForCausalLM"/);
}

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

/** Golden cases pad a row of the selection in front, where -1 sorts; Trefoil pads it at its end. */
export function paddedLast(selected: Float64Array, width: number): Int32Array {
  const rows = new Int32Array(selected.length).fill(-1);
  for (let row = 0; row < selected.length; row += width)
    rows.set(
      selected.subarray(row, row + width).filter((block) => block >= 0),
      row,
    );
  return rows;
}
