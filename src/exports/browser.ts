/**
 * Trefoil in a page or a worker of it: the processor through WebAssembly, models, training, text. Imports nothing of Node.
 *
 * @packageDocumentation
 */

export {
  type BrowserGenerateOptions,
  type BrowserModel,
  createModel,
  createTokenizer,
  generate,
  generateAll,
  loadModel,
  type ModelFiles,
  parseConfig,
  saveModel,
} from '../browser/model.js';
export { BrowserTensors, loadTensors, type TensorContent } from '../browser/tensors.js';
export {
  type BrowserBatches,
  type BrowserStep,
  openBatches,
  Training,
  type TrainingOptions,
} from '../browser/training.js';
export {
  type BrowserDeviceOptions,
  hasThreads,
  openDevice,
} from '../device/wasm/browser.js';
export type { TensorNames } from '../run/tensor-source.js';
