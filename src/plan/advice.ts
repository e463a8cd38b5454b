/**
 * Where data-parallel training stops paying, and what would help next, with figures from the same equations. Tensor,
 * sequence and pipeline parallelism are not implemented; their rows predict the gain.
 */
import { headShapeOf } from '../model/shape.js';
import type { Speed } from './measured.js';
import { allReduceSeconds } from './network.js';
import { memoryOn, type PlanLimits, type PlanRow, tokensOf } from './plan.js';
import { type Compute, computeOf, type Parallel, type PlanCase, type Step, stepOn } from './step.js';

export interface Advice {
  readonly what:
    | 'bf16 wire'
    | 'larger buckets'
    | 'smaller batch'
    | 'checkpointing'
    | 'zero1'
    | 'sequence'
    | 'tensor'
    | 'pipeline';
  /** Whether it is implemented. */
  readonly built: boolean;
  /** GPUs that share the work of one rank. */
  readonly degree: number;
  readonly gpus: number;
  readonly global_batch: number;
  readonly tokens_per_s: number;
  readonly memory_mib: number;
  readonly text: string;
}

export interface PlanContext {
  readonly planCase: PlanCase;
  readonly speed: Speed;
  readonly parallel: Parallel;
  readonly limits: PlanLimits;
}

const MIB = 2 ** 20;
const GIB = 2 ** 30;
const BF16 = 2;
const BUCKET_FACTORS = [2, 4, 8, 16, 32, 64];
/** Smaller gains are within the error of the equations. */
const WORTH_SAYING = 0.02;

/** The first number of GPUs that exceeds each limit; null if none does. */
export function stopsOf(rows: readonly PlanRow[]) {
  const first = (reason: PlanRow['stops'][number]) => rows.find(({ stops }) => stops.includes(reason))?.gpus ?? null;
  return { efficiency: first('efficiency'), batch: first('batch'), memory: first('memory') };
}

/** Proposes changes for the number of GPUs of the last row. */
export function adviceFor(context: PlanContext, rows: readonly PlanRow[]): Advice[] {
  const last = rows[rows.length - 1];
  const stops = stopsOf(rows);
  return [
    ...(stops.memory === null ? [] : memoryAdvice(context, last)),
    ...(stops.efficiency === null ? [] : [...wireAdvice(context, last), ...bucketAdvice(context, last)]),
    ...(stops.batch === null ? [] : smallerBatchAdvice(context, last)),
    ...(Object.values(stops).some((gpus) => gpus !== null) && last.gpus > 1 ? splitAdvice(context, last) : []),
  ];
}

function memoryAdvice({ planCase, speed, parallel, limits }: PlanContext, { gpus }: PlanRow): Advice[] {
  const { runtime, train } = planCase.config;
  const checkpointed = withConfig(planCase, { runtime: { ...runtime, gradient_checkpointing: true } });
  const choices = [
    ...(runtime.gradient_checkpointing
      ? []
      : [{ what: 'checkpointing' as const, planCase: checkpointed, zero1: parallel.zero1, name: 'checkpointing' }]),
    ...(parallel.zero1 || gpus === 1 || train.optimizer === 'muon' // which ZeRO-1 does not support
      ? []
      : [{ what: 'zero1' as const, planCase: checkpointed, zero1: true, name: 'ZeRO-1 and checkpointing' }]),
  ];
  return choices.map((choice) => {
    const step = stepOn(computeOf(choice.planCase, speed), gpus, { ...parallel, zero1: choice.zero1 });
    const bytes = memoryOn(choice.planCase, speed, gpus, choice);
    const verdict = bytes <= limits.gpuBytes ? 'fits' : 'still does not fit';
    const text = `${choice.name}: ${(bytes / GIB).toFixed(1)} GiB per GPU, ${verdict}`;
    return adviceOf(choice.what, { degree: 1, gpus, step, tokens: tokensOf(planCase), bytes }, true, text);
  });
}

function wireAdvice({ planCase, speed, parallel }: PlanContext, { gpus, efficiency, memory_mib }: PlanRow): Advice[] {
  if (parallel.wire === 'bf16') return [];
  const compute = computeOf(planCase, speed);
  const step = stepOn(compute, gpus, { ...parallel, wire: 'bf16' });
  const text = `bf16 on the wire: efficiency ${percent(efficiency)} -> ${percent(
    stepOn(compute, 1, parallel).total / step.total,
  )} on ${gpus} GPUs`;
  const bytes = memory_mib * MIB;
  return [adviceOf('bf16 wire', { degree: 1, gpus, step, tokens: tokensOf(planCase), bytes }, true, text)];
}

/** Larger buckets pay the latency of many nodes less often. */
function bucketAdvice({ planCase, speed, parallel }: PlanContext, { gpus, efficiency, memory_mib }: PlanRow): Advice[] {
  const compute = computeOf(planCase, speed);
  const tried = BUCKET_FACTORS.map((factor) => {
    const bucketBytes = factor * parallel.bucketBytes;
    return { bucketBytes, step: stepOn(compute, gpus, { ...parallel, bucketBytes }) };
  });
  const { bucketBytes, step } = tried.reduce((best, one) => (one.step.total < best.step.total ? one : best));
  const better = stepOn(compute, 1, parallel).total / step.total;
  if (better < efficiency + WORTH_SAYING) return [];
  const text = `buckets of ${(bucketBytes / MIB).toFixed(0)} MiB: efficiency ${percent(efficiency)} -> ${percent(better)} on ${gpus} GPUs`;
  const bytes = memory_mib * MIB;
  return [adviceOf('larger buckets', { degree: 1, gpus, step, tokens: tokensOf(planCase), bytes }, true, text)];
}

/** One sequence per GPU: as many GPUs as the critical batch allows. */
function smallerBatchAdvice({ planCase, speed, parallel, limits }: PlanContext, last: PlanRow): Advice[] {
  const { train } = planCase.config;
  if (train.batch_size * train.accumulate_grad_batches === 1) return [];
  const small = withConfig(planCase, { train: { ...train, batch_size: 1, accumulate_grad_batches: 1 } });
  const gpus = Math.max(1, Math.min(last.gpus, 2 ** Math.floor(Math.log2(limits.criticalBatch / train.seq_len))));
  const compute = computeOf(small, speed);
  const step = stepOn(compute, gpus, parallel);
  const bytes = memoryOn(small, speed, gpus, parallel);
  const efficiency = stepOn(compute, 1, parallel).total / step.total;
  const text =
    `one sequence per GPU instead of ${train.batch_size * train.accumulate_grad_batches}: ${gpus} GPUs at a batch of ` +
    `${count(gpus * train.seq_len)} tokens, efficiency ${percent(efficiency)}`;
  return [adviceOf('smaller batch', { degree: 1, gpus, step, tokens: train.seq_len, bytes }, true, text)];
}

/** Several GPUs share the work of one rank, so that the global batch grows less. */
function splitAdvice(context: PlanContext, last: PlanRow): Advice[] {
  const { planCase, speed, parallel, limits } = context;
  const tokens = tokensOf(planCase);
  const within = Math.min(parallel.network.perNode, last.gpus);
  let degree = 2;
  while (degree * 2 <= within && (last.gpus / degree) * tokens > limits.criticalBatch) degree *= 2;
  if (degree > within) return [];
  const compute = computeOf(planCase, speed);
  const bytes = memoryOn(planCase, speed, last.gpus, parallel);
  return [
    sequenceSplit(context, compute, last.gpus, degree, bytes),
    ...tensorSplit(context, compute, last.gpus, degree, bytes),
    ...pipelineSplit(context, compute, last.gpus, degree, bytes),
  ];
}

/** Each GPU has a part of every sequence and gathers all keys and values, since any block may be selected. */
function sequenceSplit(context: PlanContext, compute: Compute, gpus: number, degree: number, bytes: number): Advice {
  const { planCase, parallel } = context;
  const { shape, config } = planCase;
  const { groups, dk, dv } = headShapeOf(shape);
  const { seq_len, batch_size } = config.train;
  const { d, w } = shape.nsa;
  const seen = shape.attention === 'dense' ? seq_len : seq_len + seq_len / d + Math.min(w, seq_len);
  const moved = BF16 * batch_size * seen * groups * (dk + dv);
  const gather = (((degree - 1) / degree) * moved) / parallel.network.nodeBandwidth;
  const split = scaled(compute, {
    time: 1 / degree,
    launching: 1,
    parameters: 1,
    forward: shape.nLayers * gather,
    block: gather,
  });
  const step = stepOn(split, gpus, parallel);
  const share = (2 * shape.nLayers * gather) / step.total;
  const text = `${(moved / MIB).toFixed(1)} MiB of keys and values per layer and micro-batch, ${percent(share)} of the step`;
  const state = stateBytes(context, gpus);
  return splitOf('sequence', context, { gpus, degree, step, bytes: state + (bytes - state) / degree, text });
}

/** Heads and feed-forward are split; their outputs are summed by two all-reduces per layer and direction. */
function tensorSplit(
  context: PlanContext,
  compute: Compute,
  gpus: number,
  wanted: number,
  bytes: number,
): readonly Advice[] {
  const { planCase, parallel } = context;
  const { shape, config } = planCase;
  const { groups } = headShapeOf(shape);
  const degree = Math.min(wanted, 2 ** Math.floor(Math.log2(groups))); // a group's keys stay with its heads
  if (degree < 2) return [];
  const moved = BF16 * config.train.batch_size * config.train.seq_len * shape.dim;
  const sums = 2 * allReduceSeconds(parallel.network, degree, moved);
  const split = scaled(compute, {
    time: 1 / degree,
    launching: 1,
    parameters: 1 / degree,
    forward: shape.nLayers * sums,
    block: sums,
  });
  const step = stepOn(split, gpus / degree, between(parallel, degree));
  const share = (2 * shape.nLayers * sums) / step.total;
  const text = `at most ${groups}, the groups of heads; 4 sums of ${(moved / MIB).toFixed(0)} MiB per layer, ${percent(share)} of the step`;
  return [splitOf('tensor', context, { gpus, degree, step, bytes: bytes / degree, text })];
}

/** Layers are split into stages; stages idle while the pipeline fills and drains. */
function pipelineSplit(
  context: PlanContext,
  compute: Compute,
  gpus: number,
  wanted: number,
  bytes: number,
): readonly Advice[] {
  const { planCase, parallel } = context;
  const { nLayers } = planCase.shape;
  const degree = Math.min(wanted, 2 ** Math.floor(Math.log2(nLayers)));
  const { batch_size, accumulate_grad_batches } = planCase.config.train;
  const sequences = batch_size * accumulate_grad_batches;
  const stretch = 1 + (degree - 1) / sequences;
  if (degree < 2) return [];
  const split = scaled(compute, {
    // Every sequence is launched by itself.
    time: stretch / degree,
    launching: (stretch * batch_size) / degree,
    parameters: 1 / degree,
    forward: 0,
    block: 0,
  });
  const step = stepOn(split, gpus / degree, between(parallel, degree));
  const idle = (degree - 1) / (sequences + degree - 1);
  const text = `${sequences} sequences through ${degree} stages, which idle ${percent(idle)} of the time`;
  return [splitOf('pipeline', context, { gpus, degree, step, bytes: bytes / degree, text })];
}

/** The network between ranks of several GPUs each, where every GPU exchanges its own part. */
function between(parallel: Parallel, degree: number): Parallel {
  const { network } = parallel;
  return { ...parallel, network: { ...network, perNode: Math.max(1, Math.floor(network.perNode / degree)) } };
}

function stateBytes({ planCase, speed, parallel }: PlanContext, gpus: number): number {
  const empty = withConfig(planCase, { train: { ...planCase.config.train, seq_len: 1, batch_size: 1 } });
  return memoryOn(empty, speed, gpus, parallel);
}

interface Scale {
  readonly time: number;
  /** Same, for the launch time. */
  readonly launching: number;
  readonly parameters: number;
  /** Additional seconds of the forward pass, and of the backward pass of every block. */
  readonly forward: number;
  readonly block: number;
}

function scaled(compute: Compute, { time, launching, parameters, forward, block }: Scale): Compute {
  const shrunk = (seconds: number, launches: number) => (seconds - launches) * time + launches * launching;
  return {
    ...compute,
    forward: shrunk(compute.forward, compute.forwardLaunching) + forward,
    forwardLaunching: compute.forwardLaunching * launching,
    backward: compute.backward.map((part) => ({
      ...part,
      seconds: shrunk(part.seconds, part.launching) + (part.name.startsWith('block') ? block : 0),
      launching: part.launching * launching,
      tensors: part.tensors.map((size) => size * parameters),
    })),
    update: compute.update * parameters,
    parameters: compute.parameters * parameters,
  };
}

interface Figures {
  readonly degree: number;
  readonly gpus: number;
  readonly step: Step;
  readonly tokens: number;
  readonly bytes: number;
}

function adviceOf(what: Advice['what'], figures: Figures, built: boolean, text: string): Advice {
  const { degree, gpus, step, tokens, bytes } = figures;
  const global_batch = (gpus / degree) * tokens;
  const tokens_per_s = global_batch / step.total;
  return { what, built, degree, gpus, global_batch, tokens_per_s, memory_mib: bytes / MIB, text };
}

interface Split {
  readonly gpus: number;
  readonly degree: number;
  readonly step: Step;
  readonly bytes: number;
  readonly text: string;
}

function splitOf(what: 'sequence' | 'tensor' | 'pipeline', { planCase }: PlanContext, split: Split): Advice {
  const figures = { ...split, tokens: tokensOf(planCase) };
  const { global_batch, tokens_per_s } = adviceOf(what, figures, false, '');
  const text =
    `${what} parallel over ${split.degree} (not built): ${count(tokens_per_s)} tokens/s on ${split.gpus} GPUs at a batch ` +
    `of ${count(global_batch)} tokens, ${(split.bytes / GIB).toFixed(1)} GiB per GPU; ${split.text}`;
  return adviceOf(what, figures, false, text);
}

function withConfig(planCase: PlanCase, changes: Partial<PlanCase['config']>): PlanCase {
  return { ...planCase, config: { ...planCase.config, ...changes } };
}

const percent = (share: number): string => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** 1.05M, 268k */
export function count(value: number): string {
  for (const [size, letter] of [
    [1e12, 'T'],
    [1e9, 'G'],
    [1e6, 'M'],
    [1e3, 'k'],
  ] as const)
    if (value >= size) return `${(value / size).toPrecision(3)}${letter}`;
  return value.toFixed(0);
}
