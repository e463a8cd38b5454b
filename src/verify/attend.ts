/** Runs the attention case of a file on a device, or through the float64 reference. */
import type { Device } from '../device/device.js';
import { nsaForward } from '../ops/attention/reference.js';
import type { SelectionKernel } from '../ops/attention/selected/op.js';
import type { CaseFile, CaseResult } from './case-file.js';
import { layoutOf } from './cases.js';
import { coreReference } from './compare.js';
import { runCore } from './core.js';

/** `reference` computes all three branches in float64, and needs no device. */
export function attend(
  { shapes, inputs, dOut }: CaseFile,
  kernel: Exclude<SelectionKernel, 'reference'>,
  device: Device,
): CaseResult {
  return runCore(device, inputs, shapes, dOut, { kernel });
}

/** Computes an attention case in float64. */
export function attendReference({ shapes, inputs, dOut }: CaseFile): CaseResult {
  const layout = layoutOf(shapes);
  if (!dOut) {
    const outputs = nsaForward(inputs, layout);
    return { outputs, selected: outputs.selected, gradients: null };
  }
  const { outputs, gradients } = coreReference(inputs, layout, null, dOut);
  return { outputs, selected: outputs.selected, gradients };
}
