/** Comparing results of a device with the float64 reference. */
import { type NsaInputs, type NsaLayout, nsaBackward, nsaForward } from '../ops/attention/reference.js';
import { importance, isSelection } from '../ops/attention/select/reference.js';
import { type CaseShapes, gradientName, INPUT_NAMES, type InputName, layoutOf } from './cases.js';
import { type Finding, Worst } from './check.js';
import { type CoreResult, OUTPUT_NAMES } from './core.js';
import { relativeError } from './numbers.js';

/** One result, or several of different kernels, against one reference. */
export function compareCore(
  results: Readonly<Record<string, CoreResult>>,
  inputs: NsaInputs,
  shapes: CaseShapes,
  dOut: Float64Array,
  nearTie?: number,
): Finding {
  const worst = new Worst();
  const layout = layoutOf(shapes);
  let known: { selected: Int32Array; reference: ReturnType<typeof coreReference> } | null = null;
  for (const [kernel, result] of Object.entries(results)) {
    if (!known || !same(known.selected, result.selected)) {
      const wrong = wrongSelection(result.selected, inputs, layout, nearTie);
      if (wrong) {
        worst.add(1, `${kernel}: ${wrong}`);
        continue;
      }
      // Where two scores are nearly equal the reference uses the device's selection; usually only one is valid.
      known = { selected: result.selected, reference: coreReference(inputs, layout, result.selected, dOut) };
    }
    const { outputs, gradients } = known.reference;
    for (const name of OUTPUT_NAMES)
      worst.add(relativeError(result.outputs[name], outputs[name]), `${kernel}: ${name} is off`);
    if (!result.gradients) continue;
    for (const name of INPUT_NAMES)
      worst.add(relativeError(result.gradients[name], gradients[name]), `${kernel}: ${gradientName(name)} is off`);
  }
  return worst.finding;
}

export function coreReference(inputs: NsaInputs, layout: NsaLayout, selected: Int32Array | null, dOut: Float64Array) {
  const outputs = nsaForward(inputs, layout, selected ?? undefined);
  const g = nsaBackward(inputs, layout, outputs, dOut);
  const gradients: Record<InputName, Float64Array> = {
    q: g.dq,
    kCmp: g.dkCmp,
    vCmp: g.dvCmp,
    kSel: g.dkSel,
    vSel: g.dvSel,
    kWin: g.dkWin,
    vWin: g.dvWin,
    gates: g.dGates,
  };
  return { outputs, gradients };
}

/** Describes the first row that is not a valid selection for its scores; null if all are valid. */
export function wrongSelection(
  selected: Int32Array,
  { q, kCmp }: Pick<NsaInputs, 'q' | 'kCmp'>,
  { starts, cmpStarts, heads, sparse }: NsaLayout,
  nearTie = 1e-6,
): string | null {
  const scores = importance(q, kCmp, starts, cmpStarts, heads, sparse);
  const tokens = starts[starts.length - 1];
  for (let token = 0; token < tokens; token++)
    for (let group = 0; group < heads.groups; group++) {
      const at = (token * heads.groups + group) * sparse.nSel;
      const row = selected.subarray(at, at + sparse.nSel);
      if (!isSelection(scores(token, group), row, nearTie, sparse))
        return `token ${token}, group ${group} selects [${row.join(', ')}], which are not its best blocks`;
    }
  return null;
}

function same(a: Int32Array, b: Int32Array): boolean {
  return a.every((value, i) => value === b[i]);
}
