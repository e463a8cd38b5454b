/** The CPU kernels' ranking of blocks by itself. */
import { defineKernels } from '../../../../device/device.js';
import { SELECTION_SIGNATURE } from '../op.js';

export const ranking = defineKernels(import.meta.url, {
  choose_blocks: ['ptr', 'ptr', 'i64', ...SELECTION_SIGNATURE],
});
