/** Rows of `trefoil plan`: time, memory and tokens per day of a training step on 1, 2, 4 … GPUs. */
import { estimateMemory } from '../model/memory.js';
import type { Speed } from './measured.js';
import { nodesOf } from './network.js';
import { computeOf, type Parallel, type PlanCase, type Step, stepOn } from './step.js';

export interface PlanLimits {
  /** Minimum efficiency, relative to the tokens per second of one GPU. */
  readonly minEfficiency: number;
  /** Critical batch size: tokens of a global batch beyond which returns diminish. */
  readonly criticalBatch: number;
  /** Memory of one GPU, in bytes. */
  readonly gpuBytes: number;
}

export interface PlanRow {
  readonly gpus: number;
  readonly nodes: number;
  readonly step_ms: number;
  readonly compute_ms: number;
  readonly communication_ms: number;
  readonly exposed_ms: number;
  readonly buckets: number;
  readonly efficiency: number;
  readonly memory_mib: number;
  readonly fits: boolean;
  readonly global_batch: number;
  readonly tokens_per_s: number;
  readonly tokens_per_day: number;
  /** Tokens of small batches with the same effect. */
  readonly useful_tokens_per_day: number;
  /** The limits that are exceeded. */
  readonly stops: readonly ('efficiency' | 'batch' | 'memory')[];
}

const MIB = 2 ** 20;
const DAY = 86_400;
/** Bytes of the two Adam moments of a parameter, which ZeRO-1 shards. */
const MOMENT_BYTES = 8;

/** Powers of two below `most`, and `most`. */
export function gpuCounts(most: number): number[] {
  const counts: number[] = [];
  for (let count = 1; count < most; count *= 2) counts.push(count);
  return [...counts, most];
}

export function planRows(
  planCase: PlanCase,
  speed: Speed,
  parallel: Parallel,
  limits: PlanLimits,
  counts: readonly number[],
): PlanRow[] {
  const compute = computeOf(planCase, speed);
  const alone = stepOn(compute, 1, parallel);
  return counts.map((gpus) => {
    const step = stepOn(compute, gpus, parallel);
    const bytes = memoryOn(planCase, speed, gpus, parallel);
    return rowOf(gpus, { step, alone, bytes, tokens: tokensOf(planCase) }, parallel, limits);
  });
}

/** Tokens per rank and step. */
export function tokensOf({ config: { train } }: PlanCase): number {
  return train.seq_len * train.batch_size * train.accumulate_grad_batches;
}

/** Memory of one rank, in bytes. */
export function memoryOn(
  { shape, config }: PlanCase,
  speed: Pick<Speed, 'device'>,
  ranks: number,
  { zero1 }: Pick<Parallel, 'zero1'>,
): number {
  const { total, weights } = estimateMemory(shape, config, speed.device);
  const moments = MOMENT_BYTES * (weights / 4);
  return total - (zero1 ? moments * (1 - 1 / ranks) : 0);
}

interface Figures {
  readonly step: Step;
  readonly alone: Step;
  readonly bytes: number;
  readonly tokens: number;
}

function rowOf(gpus: number, { step, alone, bytes, tokens }: Figures, parallel: Parallel, limits: PlanLimits): PlanRow {
  const efficiency = alone.total / step.total;
  const batch = gpus * tokens;
  const perSecond = batch / step.total;
  const fits = bytes <= limits.gpuBytes;
  return {
    gpus,
    nodes: nodesOf(parallel.network, gpus),
    step_ms: 1e3 * step.total,
    compute_ms: 1e3 * step.compute,
    communication_ms: 1e3 * step.communication,
    exposed_ms: 1e3 * step.exposed,
    buckets: step.buckets,
    efficiency,
    memory_mib: bytes / MIB,
    fits,
    global_batch: batch,
    tokens_per_s: perSecond,
    tokens_per_day: DAY * perSecond,
    useful_tokens_per_day: (DAY * perSecond) / (1 + batch / limits.criticalBatch),
    stops: [
      ...(fits ? [] : (['memory'] as const)),
      ...(efficiency < limits.minEfficiency ? (['efficiency'] as const) : []),
      ...(batch > limits.criticalBatch ? (['batch'] as const) : []),
    ],
  };
}
