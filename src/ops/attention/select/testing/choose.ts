/** The CPU kernels' ranking of blocks by itself. */
import { defineKernels } from '../../../../device/device.js';

export const ranking = defineKernels(import.meta.url, {
  choose_blocks: ['ptr', 'ptr', 'i64', 'i64', 'i64', 'i64', 'i64'],
});
