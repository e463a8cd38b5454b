/** The value of `--kernel`. */
import { InvalidArgumentError } from 'commander';
import { SELECTION_KERNELS, type SelectionKernel } from '../../ops/attention/selected/op.js';

export function selectionKernels(text: string): SelectionKernel[] {
  return text.split(',').map((name) => {
    const known = SELECTION_KERNELS.find((kernel) => kernel === name.trim());
    if (!known) throw new InvalidArgumentError(`${name} is not one of ${SELECTION_KERNELS.join(', ')}.`);
    return known;
  });
}
