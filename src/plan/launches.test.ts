/** The numbers of launches that `plan` counts with, against a model whose launches are counted. */
import { expect, it } from 'vitest';
import { parseConfig } from '../config/parse.js';
import type { CudaCode } from '../device/cuda/runtime.js';
import type { Device, KernelModule, Kernels, Signatures } from '../device/device.js';
import { LanguageModel } from '../model/language-model.js';
import { headShapeOf, type ModelShape, modelShape, sparseShapeOf } from '../model/shape.js';
import { Sequences } from '../ops/common/sequences.js';
import { Tape } from '../tensor/tape.js';
import { Tensor } from '../tensor/tensor.js';
import { exportedBy, RecordingCuda } from '../testing/recording-cuda.js';
import { type Launches, launchesOf, launchesOfPass } from './launches.js';

/** Long enough for every kernel of the selected branch. */
const LENGTH = 9664;

/** Real launchers, which only count. */
class CountingCuda extends RecordingCuda {
  count = 0;
  readonly #constants: (name: string) => number;

  constructor(shape: ModelShape) {
    const constants = exportedBy({ heads: headShapeOf(shape), sparse: sparseShapeOf(shape) });
    super(constants);
    this.#constants = constants;
  }

  #add = (): void => {
    this.count += 1;
  };

  override compile(): CudaCode {
    return { constant: this.#constants, launch: this.#add };
  }
  override kernels<S extends Signatures>(module: KernelModule<S>): Kernels<S> {
    return module.cuda!(this) as Kernels<S>;
  }
  override matrixProduct = this.#add;
  override fillZero = this.#add;
  override fill = this.#add;
  override copy = this.#add;
}

/** Forward, and forward with backward, of a step in its steady state. */
function counted(attention: ModelShape['attention'], n_layers: number, checkpointing: boolean): [number, number] {
  return countedOf({ n_layers, attention }, checkpointing);
}

function countedOf(sizes: object, checkpointing: boolean): [number, number] {
  const shape = modelShape(parseConfig({ model: sizes }), 50_257);
  const device = new CountingCuda(shape);
  const model = new LanguageModel(device as Device, shape, 1, 'bf16');
  const lengths = new Sequences(device, [LENGTH]);
  const [ids, targets] = [0, 1].map(() => Tensor.zeros(device, [LENGTH], 'i32'));
  const pass = (): [number, number] => {
    for (const parameter of model.parameters) parameter.clearGradient();
    const tape = new Tape(device);
    device.count = 0;
    const loss = model.loss(tape, ids, targets, { lengths, kernels: {}, checkpointing });
    const forward = device.count;
    tape.backward(loss);
    tape.end();
    return [forward, device.count];
  };
  pass(); // the first one also rounds the weights
  return pass();
}

it.each(['nsa', 'dense'] as const)('%s attention launches as many kernels as are counted with', (attention) => {
  const launches = launchesOf(attention);
  const { ends, block, endsBackward, blockBackward, blockAgain }: Launches = launches;
  for (const layers of [1, 3]) {
    const [forward, all] = counted(attention, layers, false);
    expect(forward).toBe(ends + layers * block);
    expect(all - forward).toBe(endsBackward + layers * blockBackward);
    expect(all).toBe(launchesOfPass(attention, layers));
    expect(counted(attention, layers, true)).toEqual([forward, all + layers * blockAgain]);
  }
});

it('a window layer launches as many as a dense one', () => {
  const [nsa, window] = [launchesOf('nsa'), launchesOf('window')];
  const pattern = { n_layers: 4, layer_pattern: ['nsa', 'window'] };
  const [forward, all] = countedOf(pattern, false);
  expect(forward).toBe(nsa.ends + 2 * nsa.block + 2 * window.block);
  expect(all - forward).toBe(nsa.endsBackward + 2 * nsa.blockBackward + 2 * window.blockBackward);
  expect(countedOf(pattern, true)).toEqual([forward, all + 2 * nsa.blockAgain + 2 * window.blockAgain]);
});
