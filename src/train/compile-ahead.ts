/**
 * Compiles the CUDA kernels of a training at the same time, before its first step. Without this they are compiled one by
 * one as the first step asks for them, which took three times as long on 16 cores.
 */
import type { Config } from '../config/schema.js';
import type { KernelRequest } from '../device/cuda/compile.js';
import { CudaDevice } from '../device/cuda/cuda.js';
import { ListingCuda } from '../device/cuda/listing.js';
import type { Device } from '../device/device.js';
import { LanguageModel } from '../model/language-model.js';
import { computeDtype, type ModelShape } from '../model/shape.js';
import { AttentionCounters } from '../ops/attention/counters.js';
import { GradientNorms } from '../ops/gradnorm/op.js';
import { STEP_SCALARS } from '../tensor/optimizer.js';
import { Tensor } from '../tensor/tensor.js';
import { BatchUploader } from './device-batch.js';
import { launchStep, needsHost } from './device-stepper.js';
import { evaluate } from './evaluation.js';
import { LocalGradients } from './gradient-exchange.js';
import { createOptimizer, localContext } from './step.js';

/**
 * Fills the kernel cache with what a training of this model needs. Does nothing on a CPU, and where the host checks every
 * step, because that reads results, which a device without a GPU does not have.
 */
export async function compileAhead(device: Device, config: Config, shape: ModelShape): Promise<void> {
  if (device instanceof CudaDevice && !needsHost(config))
    await device.compiler.compileAll(trainingKernels(config, shape, new ListingCuda(device)));
}

/** The kernels of a training: one step and one evaluation of a model with a layer of each kind. */
export function trainingKernels(config: Config, shape: ModelShape, device: ListingCuda): readonly KernelRequest[] {
  const few = { ...shape, nLayers: Math.min(shape.nLayers, shape.layerPattern.length) };
  const model = new LanguageModel(device, few, config.train.seed, computeDtype(config.runtime, device.kind));
  if (config.train.lora !== null) model.adapt(config.train.lora);
  const trained = config.train.lora === null ? model.parameters : model.parameters.filter(({ isFrozen }) => !isFrozen);
  const optimizer = createOptimizer(model, new LocalGradients(trained), config);
  const uploader = new BatchUploader(device, shape.nsa);
  const context = localContext({ model, config, optimizer, uploader, loss: undefined });
  const batch = emptyBatch(config.train.batch_size, config.train.seq_len);
  const tools = {
    norms: new GradientNorms(device),
    counters: new AttentionCounters(device),
    scalars: Tensor.empty(device, [STEP_SCALARS]),
  };
  launchStep(context, [uploader.upload(batch)], [1], tools);
  evaluate(model, uploader, [batch], config);
  return device.requests;
}

function emptyBatch(rows: number, length: number) {
  return {
    inputs: new Int32Array(rows * length),
    targets: new Int32Array(rows * length),
    targetCount: rows * length,
    cuSeqlens: Int32Array.from({ length: rows + 1 }, (_, row) => row * length),
    sampleIds: [],
    epoch: 0,
  };
}
