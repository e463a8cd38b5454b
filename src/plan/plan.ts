/** Rows of `trefoil plan`: one training step on 1, 2, 4 … GPUs, what it moves, holds and gets done in a day. */
import { estimateMemory } from '../model/memory.js';
import type { Speed } from './measured.js';
import { nodesOf } from './network.js';
import { computeOf, type Parallel, type PlanCase, type Step, stepOn } from './step.js';

export interface PlanLimits {
  /** Share of the one GPU's tokens per second below which another GPU does not pay. */
  readonly minEfficiency: number;
  /** Tokens of a global batch beyond which more of them teach little more. */
  readonly criticalBatch: number;
  /** Bytes of one GPU. */
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
  /** Tokens of small batches that would teach as much. */
  readonly useful_tokens_per_day: number;
  /** Why more GPUs of this kind do not pay here. */
  readonly stops: readonly ('efficiency' | 'batch' | 'memory')[];
}

const MIB = 2 ** 20;
const DAY = 86_400;
/** Bytes of both moments of a parameter: what ZeRO-1 shards. */
const MOMENT_BYTES = 8;

/** 1, 2, 4 … and the number itself. */
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

/** Tokens of one rank in a step. */
export function tokensOf({ config: { train } }: PlanCase): number {
  return train.seq_len * train.batch_size * train.accumulate_grad_batches;
}

/** Bytes of one rank. */
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
