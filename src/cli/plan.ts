/** `trefoil plan`: predicts a training run on many GPUs. */
import { InvalidArgumentError } from 'commander';
import { FlagSettings } from '../config/flags.js';
import { loadConfig } from '../config/load.js';
import { createTokenizer } from '../data/tokenizer.js';
import { UsageError } from '../errors.js';
import { parameterCount } from '../model/memory.js';
import { modelShape, type StepPrecision, stepPrecision } from '../model/shape.js';
import { adviceFor, count, stopsOf } from '../plan/advice.js';
import { assumedSpeed, assumption, GPU_NAMES, GPUS } from '../plan/assumed.js';
import { readMeasured, SHIPPED, speedOf } from '../plan/measured.js';
import { LINK_LATENCY, NODE_LATENCY, START_LATENCY } from '../plan/network.js';
import { gpuCounts, type PlanRow, planRows } from '../plan/plan.js';
import type { Parallel, PlanCase } from '../plan/step.js';
import { plural, wrapText } from '../text.js';
import { type Io, printJson } from './shared/io.js';
import {
  choice,
  configured,
  flag,
  jsonOption,
  numberFrom,
  type OptionValues,
  parsed,
  wholeNumber,
} from './shared/options.js';
import { formatTable, right } from './shared/table.js';

const MIB = 2 ** 20;
const GIB = 2 ** 30;
const GIGA = 1e9;
const MICRO = 1e-6;
const MAX_GPUS = 4096;
/** Default tokens per step of one GPU: those of the shipped measurements. */
const MEASURED_TOKENS = 65_536;
const MEASURED_LENGTH = 2048;

const OPTIONS = {
  gpus: parsed('--gpus <n>', 'largest number of GPUs', wholeNumber(1), MAX_GPUS),
  perNode: parsed('--per-node <n>', 'GPUs per node', wholeNumber(1), 8),
  link: parsed('--link <GB/s>', 'bandwidth per GPU between nodes', above0, 50),
  gpu: choice('--gpu <name>', 'GPU; all but h200 are assumptions from data sheets', GPU_NAMES, 'h200'),
  nodeLink: parsed('--node-link <GB/s>', 'bandwidth per GPU inside a node (default: that of --gpu)', above0),
  latency: parsed(
    '--latency <us>',
    'latency of a hop between nodes',
    numberFrom(0),
    Number((LINK_LATENCY / MICRO).toFixed(1)),
  ),
  config: flag('--config <name|file>', 'config of the model and step (default: as measured, see below)'),
  set: flag('--set <key=value...>', 'set keys of the config, as for train'),
  seqLen: parsed('--seq-len <n>', 'train.seq_len', wholeNumber(1)),
  batchSize: parsed('--batch-size <n>', 'train.batch_size: sequences per GPU', wholeNumber(1)),
  accumBatches: parsed('--accum-batches <n>', 'train.accumulate_grad_batches', wholeNumber(1)),
  measured: flag('--measured <file>', 'use your own figures: the output of bench train --json'),
  wire: choice('--wire <type>', 'type of exchanged gradients', ['f32', 'bf16'], 'f32'),
  zero1: flag('--zero1', 'shard the optimizer state'),
  bucket: parsed('--bucket <MiB>', 'size of a gradient bucket', above0, 16),
  overlap: flag('--no-overlap', 'exchange gradients after the backward pass'),
  gpuMemory: parsed('--gpu-memory <GiB>', 'memory of one GPU (default: that of --gpu)', above0),
  criticalBatch: parsed(
    '--critical-batch <tokens>',
    'global batch size with diminishing returns',
    wholeNumber(1),
    2 ** 20,
  ),
  minEfficiency: parsed('--min-efficiency <share>', 'efficiency below which another GPU does not pay', above0, 0.85),
  json: jsonOption('{machine, device, config, params, attention, step, network, parallel, limits, rows, stops, next}'),
};
type Options = OptionValues<typeof OPTIONS> & Record<'nodeLink' | 'gpuMemory', number>;

const HELP = `
Predicts data-parallel training from the measured step of one device: gradients
are exchanged in buckets by ring or tree all-reduce, overlapped with the
backward pass. Without --config: the 125m shape with the GPT-2 vocabulary in
bf16, ${MEASURED_TOKENS} tokens per GPU and step, as measured on one H200.
Nothing here was run on more than two ranks; docs/explain/scaling.md lists what
was checked. exp. ms = communication not hidden by the backward pass.
useful/day = tokens/day / (1 + global batch / critical batch): tokens of small
batches that would teach as much.
--gpu a100, h100 or b200 scales the figures of the H200 by data sheets; measure
yours with trefoil bench train --json, and give it as --measured.
--json adds nodes, tokens per second and further columns.
`;

export const configure = configured(OPTIONS, plan, HELP);

function above0(text: string): number {
  const value = numberFrom(0)(text);
  if (value === 0) throw new InvalidArgumentError('It must be greater than 0.');
  return value;
}

function plan(given: OptionValues<typeof OPTIONS>, io: Io): void {
  const { gpu } = given;
  if (given.measured !== undefined && gpu !== 'h200')
    throw new UsageError('--gpu: scales the figures of the H200; leave it out with --measured');
  const options: Options = {
    ...given,
    nodeLink: given.nodeLink ?? GPUS[gpu].nodeLink,
    gpuMemory: given.gpuMemory ?? GPUS[gpu].memory,
  };
  const speed = assumedSpeed(speedOf(readMeasured(options.measured ?? SHIPPED)), gpu);
  const { planCase, name } = caseOf(options, io);
  const precision = stepPrecision(planCase.config.runtime, speed.device);
  if (options.zero1 && planCase.config.train.optimizer === 'muon')
    throw new UsageError('--zero1: not possible with train.optimizer muon, which needs whole matrices; leave it out');
  const parallel = parallelOf(options);
  const limits = {
    minEfficiency: options.minEfficiency,
    criticalBatch: options.criticalBatch,
    gpuBytes: options.gpuMemory * GIB,
  };
  const rows = planRows(planCase, speed, parallel, limits, gpuCounts(options.gpus));
  const stops = stopsOf(rows);
  const next = adviceFor({ planCase, speed, parallel, limits }, rows);
  if (options.json) {
    const machine = { machine: speed.machine, device: speed.device };
    printJson(io, { ...machine, config: name, ...settings(planCase, precision, parallel, options), rows, stops, next });
    return;
  }
  const paragraph = (text: string, indent = '') =>
    io.out(indent + wrapText(text, io.width - 2 * indent.length).join(`\n${indent}${indent}`));
  const origin = gpu === 'h200' ? `measured on ${speed.machine}` : assumption(gpu);
  paragraph(`${title(planCase, name)}, ${precision}; ${origin}`);
  paragraph(
    `${options.perNode} GPUs per node, ${options.nodeLink} GB/s inside, ${options.link} GB/s per GPU between nodes; ${how(options)}`,
  );
  io.out(`\n${table(rows, io.width)}`);
  for (const line of stopLines(stops, options)) paragraph(line);
  if (next.length > 0) io.out('\nWhat would help next:');
  for (const { text } of next) paragraph(text, '  ');
}

/** The inputs of the prediction, for JSON. */
function settings(
  { shape, config }: PlanCase,
  precision: StepPrecision,
  { wire, zero1, bucketBytes, overlap }: Parallel,
  options: Options,
) {
  const { seq_len, batch_size, accumulate_grad_batches } = config.train;
  const { gradient_checkpointing } = config.runtime;
  const { perNode: per_node, nodeLink: node_link_gbs, link: link_gbs, latency: latency_us } = options;
  return {
    params: parameterCount(shape),
    attention: shape.attention,
    step: { seq_len, batch_size, accumulate_grad_batches, gradient_checkpointing, precision },
    network: { per_node, node_link_gbs, link_gbs, latency_us },
    parallel: { wire, zero1, bucket_bytes: bucketBytes, overlap },
    limits: {
      critical_batch: options.criticalBatch,
      min_efficiency: options.minEfficiency,
      gpu_memory_gib: options.gpuMemory,
    },
  };
}

/** The config given, or the shape and step of the shipped measurements. */
function caseOf(options: Options, io: Io): { planCase: PlanCase; name: string } {
  const named = options.config ?? (io.env['CONFIG']?.trim() || undefined);
  const length = options.seqLen ?? (named === undefined ? MEASURED_LENGTH : undefined);
  const flags = new FlagSettings();
  const pass = (flag: string, value: string | number | undefined) =>
    value !== undefined && flags.add(flag, String(value));
  if (named === undefined) {
    pass('tokenizer', 'gpt2');
    pass('precision', 'bf16');
    pass('device', 'cuda');
  }
  flags.set(...(options.set ?? []));
  pass('seq-len', length);
  const isFull = named === undefined && options.batchSize === undefined;
  pass('batch-size', isFull ? Math.max(1, Math.floor(MEASURED_TOKENS / length!)) : options.batchSize);
  pass('accum-batches', options.accumBatches);
  const { config } = loadConfig({ env: io.env, flags: flags.layer, config: named ?? 'base' });
  const synthetic = config.data.source === 'synthetic' ? config.data.vocab_size : null;
  const vocabulary = config.model.vocab_size ?? synthetic ?? createTokenizer(config.data.tokenizer).vocabSize;
  return {
    planCase: { shape: modelShape(config, vocabulary), config },
    name: named ?? (options.set ? 'base, changed' : '125m'),
  };
}

function parallelOf(options: Options): Parallel {
  return {
    network: {
      perNode: options.perNode,
      nodeBandwidth: options.nodeLink * GIGA,
      linkBandwidth: options.link * GIGA,
      nodeLatency: NODE_LATENCY,
      linkLatency: options.latency * MICRO,
      startLatency: START_LATENCY,
    },
    wire: options.wire,
    zero1: options.zero1 ?? false,
    bucketBytes: options.bucket * MIB,
    overlap: options.overlap,
  };
}

function title({ shape, config }: PlanCase, name: string): string {
  const { train, runtime } = config;
  const accumulated = train.accumulate_grad_batches > 1 ? ` x ${train.accumulate_grad_batches} micro-batches` : '';
  const checkpointed = runtime.gradient_checkpointing ? ', checkpointing' : '';
  return (
    `${name}: ${shape.dim} wide, ${shape.nLayers} layers, ${count(parameterCount(shape))} parameters, ` +
    `${shape.attention}; S ${train.seq_len} x ${train.batch_size}${accumulated} per GPU${checkpointed}`
  );
}

function how({ wire, zero1, bucket, overlap }: Options): string {
  const optimizer = zero1 ? 'ZeRO-1' : 'optimizer state on every GPU';
  return `gradients as ${wire} in buckets of ${bucket} MiB, ${overlap ? 'overlapped' : 'not overlapped'}, ${optimizer}`;
}

const STOP_LETTERS = { memory: 'M', efficiency: 'C', batch: 'B' } as const;

function table(rows: readonly PlanRow[], width: number): string {
  return formatTable(
    [...right('GPUs', 'step ms', 'comm ms', 'exp. ms', 'eff.', 'GiB', 'batch', 'tok/day', 'useful/day'), 'stop'],
    rows.map((row) => [
      ...[String(row.gpus), row.step_ms.toFixed(1), row.communication_ms.toFixed(1), row.exposed_ms.toFixed(1)],
      ...[`${(100 * row.efficiency).toFixed(1)}%`, (row.memory_mib / 1024).toFixed(1), count(row.global_batch)],
      ...[count(row.tokens_per_day), count(row.useful_tokens_per_day)],
      row.stops.map((stop) => STOP_LETTERS[stop]).join(''),
    ]),
    width,
  );
}

/** Where more GPUs stop paying; the letters refer to the last column of the table. */
function stopLines(stops: ReturnType<typeof stopsOf>, options: Options): string[] {
  const share = `${(100 * options.minEfficiency).toFixed(0)} %`;
  return [
    stops.memory === null
      ? 'memory: fits'
      : `M  memory: more than ${options.gpuMemory} GiB on each of ${plural(stops.memory, 'GPU')}`,
    stops.efficiency === null
      ? `communication: efficiency stays above ${share}`
      : `C  communication: efficiency is below ${share} from ${plural(stops.efficiency, 'GPU')} on`,
    stops.batch === null
      ? `batch: stays within ${count(options.criticalBatch)} tokens`
      : `B  batch: beyond ${count(options.criticalBatch)} tokens from ${plural(stops.batch, 'GPU')} on`,
  ];
}
