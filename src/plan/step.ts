/**
 * Predicted training step of a data-parallel rank: computation from measured rates, communication from the equations of the
 * network, and the part of it that the backward pass hides. The equations are in docs/explain/scaling.md.
 */
import type { Config } from '../config/schema.js';
import { muonFlops, recomputedFlops, trainingFlops } from '../model/flops.js';
import { blockTensors, parameterCount } from '../model/memory.js';
import { layerShapes, type ModelShape, stepPrecision } from '../model/shape.js';
import { launchesOf } from './launches.js';
import type { Speed } from './measured.js';
import { allReduceSeconds, type Network, shardSeconds } from './network.js';
import { exchange, type ModelPart } from './timeline.js';

export interface PlanCase {
  readonly shape: ModelShape;
  readonly config: Pick<Config, 'train' | 'runtime'>;
}

/** How gradients are exchanged. */
export interface Parallel {
  readonly network: Network;
  readonly wire: 'f32' | 'bf16';
  /** Shards the optimizer state: reduce-scatter, update of a part, all-gather. */
  readonly zero1: boolean;
  readonly bucketBytes: number;
  /** False sends gradients only after the backward pass. */
  readonly overlap: boolean;
}

/** A part of the model, in backward order. */
export interface ComputePart {
  readonly name: string;
  readonly seconds: number;
  /** Part of the seconds that is launch time. */
  readonly launching: number;
  /** Elements of each parameter, in backward order. */
  readonly tensors: readonly number[];
}

/** Computation of one rank in a step. */
export interface Compute {
  /** Seconds of the forward pass of one micro-batch. */
  readonly forward: number;
  /** Part of it that is launch time. */
  readonly forwardLaunching: number;
  /** Backward pass of one micro-batch. */
  readonly backward: readonly ComputePart[];
  readonly microBatches: number;
  /** Seconds of gradient norm and optimizer over all parameters. Muon's products run at the rate of the passes. */
  readonly update: number;
  readonly parameters: number;
}

export interface Step {
  /** Seconds of the whole step. */
  readonly total: number;
  readonly compute: number;
  readonly communication: number;
  readonly exposed: number;
  readonly buckets: number;
}

const WIRE_BYTES = { f32: 4, bf16: 2 } as const;
/** Loss, norm and flags that ranks exchange to agree. */
const CONTROL_BYTES = 32;

/**
 * Two thirds of the operations are the backward pass; checkpointing adds to it what it computes again. Launch time is added
 * to the time of the operations: small kernels do not fill the GPU.
 */
export function computeOf({ shape, config }: PlanCase, speed: Speed): Compute {
  const { train, runtime } = config;
  const lengths = new Array<number>(train.batch_size).fill(train.seq_len);
  const tokens = train.batch_size * train.seq_len;
  const { used } = trainingFlops(shape, lengths);
  const parameters = parameterCount(shape);
  const precision = stepPrecision(runtime, speed.device);
  const model = { attention: shape.attention, precision, params: parameters, layers: shape.nLayers };
  const perSecond = speed.rate(model, train.seq_len, tokens);
  const table = shape.vocabSize * shape.dim;
  const head = (6 * table * tokens) / perSecond;
  const block = (used / perSecond - head) / shape.nLayers;
  const again = runtime.gradient_checkpointing ? 1 : 0;
  const recomputed = again * (recomputedFlops(shape, lengths, precision !== 'fp32') / perSecond / shape.nLayers);
  const layers = layerShapes(shape);
  const part = (name: string, work: number, count: number, sizes: readonly number[]): ComputePart => {
    const launching = count * speed.perLaunch;
    return { name, seconds: work + launching, launching, tensors: sizes };
  };
  const blocks = layers.map((layer, i) => {
    const { blockBackward, blockAgain } = launchesOf(layer.attention);
    const tensors = blockTensors(layer).reverse();
    return part(`block ${i}`, (2 * block) / 3 + recomputed, blockBackward + again * blockAgain, tensors);
  });
  const launches = launchesOf(shape.attention);
  const forward = layers.reduce((sum, layer) => sum + launchesOf(layer.attention).block, launches.ends);
  const forwardLaunching = forward * speed.perLaunch;
  return {
    forward: used / perSecond / 3 + forwardLaunching,
    forwardLaunching,
    backward: [
      // The gradient of a tied table is complete only after the embedding.
      part('head', (2 * head) / 3, launches.endsBackward, [...(shape.tieEmbeddings ? [] : [table]), shape.dim]),
      ...blocks.reverse(),
      part('embedding', 0, 0, [table]),
    ],
    microBatches: train.accumulate_grad_batches,
    update: parameters * speed.updatePerParameter + (train.optimizer === 'muon' ? muonFlops(shape) / perSecond : 0),
    parameters,
  };
}

export function stepOn(compute: Compute, ranks: number, parallel: Parallel): Step {
  const { network, zero1, overlap, bucketBytes } = parallel;
  const bytes = WIRE_BYTES[parallel.wire];
  const parts: ModelPart[] = compute.backward.map(({ name, seconds, tensors }) => ({
    name,
    seconds: overlap ? seconds : 0,
    gradients: tensors.map((size) => bytes * size),
  }));
  const send = zero1 ? shardSeconds : allReduceSeconds;
  const sent = exchange(parts, bucketBytes, (size) => send(network, ranks, size));
  const gather = zero1 ? shardSeconds(network, ranks, WIRE_BYTES.f32 * compute.parameters) : 0;
  const waits = gather + allReduceSeconds(network, ranks, CONTROL_BYTES);
  const backward = compute.backward.reduce((sum, { seconds }) => sum + seconds, 0);
  const update = zero1 ? compute.update / ranks : compute.update;
  const computed = compute.microBatches * (compute.forward + backward) + update;
  const exposed = sent.exposed + waits;
  return {
    total: computed + exposed,
    compute: computed,
    communication: sent.communication + waits,
    exposed,
    buckets: sent.buckets,
  };
}
