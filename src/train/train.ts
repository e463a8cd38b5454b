/**
 * `train`: a training run from a config to its final files. Opens everything, resumes if asked, runs, closes everything.
 *
 * The way of a step through this folder: `Run` (run.ts) asks `Trainer` (trainer.ts) for the next step; that fetches the
 * batches, launches a `Stepper` (step.ts from the host, device-stepper.ts as a graph of the GPU), judges the result and
 * applies the update. Of the `TrainingStep` that comes back, `Run` makes the `StepRecord` that report.ts writes and prints.
 */
import { existsSync } from 'node:fs';
import { parseConfig } from '../config/parse.js';
import { toYaml } from '../config/print.js';
import type { Config } from '../config/schema.js';
import { AheadLoader } from '../data/pipeline/ahead-loader.js';
import type { Device } from '../device/device.js';
import { ExitCode, UsageError } from '../errors.js';
import { type LocatedModel, locateModel } from '../infer/load-model.js';
import { auditKernels } from '../model/kernels.js';
import { LanguageModel } from '../model/language-model.js';
import { estimateMemory } from '../model/memory.js';
import { computeDtype, type ModelShape, modelShape } from '../model/shape.js';
import { sparseStartOf } from '../model/sparse-start.js';
import { listCheckpoints } from '../run/checkpoint/read.js';
import { RunFolder } from '../run/folder.js';
import { refuseLiveOwner } from '../run/lock.js';
import { readCsv, TRAINING_CSV, VAL_CSV } from '../run/logs/csv.js';
import { LogThread } from '../run/logs/log-thread.js';
import { clearMarks, clearSections, runPaths } from '../run/paths.js';
import { loadWeights } from '../run/safetensors.js';
import { writeStackDump } from './anomalies.js';
import { findResumePoint, type ResumePoint, restoreTrainingState } from './checkpoint.js';
import { compileAhead } from './compile-ahead.js';
import { expectFp8 } from './device-stepper.js';
import type { TrainOptions, TrainResult, TrainStatus } from './options.js';
import { singleWorld, type World } from './ranks/world.js';
import { RankLogger, RunRecords } from './report.js';
import { isEvaluationDue, Run } from './run.js';
import { SignalWatch } from './signals.js';
import { Trainer } from './trainer.js';
import { openTrainingData, warmUp } from './training-data.js';

/** The exit code of `trefoil train` for each way a run ends. */
export const EXIT_CODES: Record<TrainStatus, number> = {
  done: ExitCode.done,
  halted: ExitCode.halted,
  signalled: ExitCode.signalled,
  'non-finite': ExitCode.nonFinite,
  'no-data': ExitCode.dataSource,
  'ranks-differ': ExitCode.failed,
};

/** Trains, writes the files of the run into `config.train.out_dir`, and returns how it ended. */
export async function train(options: TrainOptions): Promise<TrainResult> {
  const world = options.world ?? singleWorld();
  const cleanups: (() => void)[] = [];
  try {
    return await openAndRun(options, world, (cleanup) => cleanups.push(cleanup));
  } catch (error) {
    world.leave(); // otherwise the cleanup would wait for ranks that may never answer
    throw error;
  } finally {
    for (const cleanup of cleanups.reverse()) cleanup();
  }
}

/** `onEnd` registers cleanups, which run in reverse order. Cheap refusals come first: before data, model and log files. */
async function openAndRun(
  options: TrainOptions,
  world: World,
  onEnd: (cleanup: () => void) => void,
): Promise<TrainResult> {
  const { config, device, resume = null } = options;
  const { agreement, rank, isFirst } = world;
  const log = new RankLogger(options, world);
  checkSupported(config, device, world, log);
  if (resume === null && isFirst) refuseUsedFolder(config.train.out_dir);
  const folder = await agreement.firstThenOthers(() => new RunFolder(config.train.out_dir, rank));
  onEnd(() => folder.close());
  const point = resume === null ? null : findResumePoint(folder.path, resume, config, world);
  for (const { path, reason } of point?.found.skipped ?? []) log.warn(`checkpoint ${path} is skipped: ${reason}`);

  const initial = point === null ? locateInitial(config.train.init_from) : null;
  onEnd(() => initial?.weights.close());
  for (const line of world.describe()) log.say(line);
  const open = () =>
    openTrainingData(config, log.say, log.warnOwn, {
      rank: { rank, world: world.size },
      terminal: isFirst ? (options.terminal ?? null) : null,
    });
  // One rank per machine tokenises; the others find the result in the cache.
  const opened = await agreement.firstThenOthers(open, world.isFirstOfHost);
  // With a GPU the host has time to prepare the next batches while the device computes.
  const loader = device.kind === 'cuda' ? new AheadLoader(opened) : opened;
  onEnd(() => loader.close());

  device.pool.resetPeak(); // the run reports its own memory
  const shape = modelShape(config, loader.vocabSize);
  await agreement.firstThenOthers(() => compileAhead(device, config, shape), world.isFirstOfHost);
  const model = new LanguageModel(device, shape, config.train.seed, computeDtype(config.runtime, device.kind));
  onEnd(() => model.free());
  if (initial !== null) {
    expectShape(initial, shape);
    loadWeights(initial.weights, model);
    log.say(`weights: from ${initial.path}`);
  }
  if (point === null) sparseStartOf(model, config)?.expectClosedGates(config.train.init_from);
  announce(model, config, log);
  if (isFirst) {
    clearMarks(folder.path);
    clearSections(folder.path);
  }
  agreement.wait(); // before the other ranks create their section files
  const logThread = await LogThread.start({ onProblem: log.warnOwn });
  onEnd(() => logThread.close());
  const step = point?.found.step ?? 0;
  const records = new RunRecords(folder.paths, config, world, step, logThread);
  onEnd(() => records.close());
  world.monitor.watch({ paths: folder.paths, waiting: (isWaiting) => records.wait(isWaiting) });
  onEnd(() => world.monitor.watch(null));
  const trainer = new Trainer({
    model,
    data: loader,
    config,
    world,
    onSection: records.enter.bind(records),
  });
  onEnd(() => trainer.free());
  if (point) restore(point, trainer, log);
  else if (resume !== null) log.say('no checkpoint yet: starting from step 0');
  if (isFirst) writeDescription(folder, config, device, world);

  const dump = (): void => {
    const path = folder.paths.stackdump(`${new Date().toISOString().replace(/[:.]/g, '-')}_rank${rank}`);
    writeStackDump(path, records.position);
    log.warnOwn(`SIGUSR1: wrote ${path}`);
  };
  const signals = new SignalWatch(options.signals ?? null, dump);
  onEnd(() => signals.end());
  records.enter('boot', step);
  records.writeEvent({ step, msg: 'boot', detail: point ? `resumed from ${point.found.path}` : 'new run' });
  await warmUp(loader, config, log.warnOwn);
  records.writeEvent({ step, msg: 'loader_ready', data: loader.source ?? config.data.source });
  if (config.runtime.sdpa_audit) log.say(auditKernels(config, device, config.train.seq_len));
  const run = new Run({ folder, model, trainer, records, log, signals, options });
  return await run.execute(isEvaluationMissing(point, folder, config, world));
}

function restore(point: ResumePoint, trainer: Trainer, log: RankLogger): void {
  restoreTrainingState(point, trainer);
  const { path, step } = point.found;
  log.say(`resumed from ${path} at step ${step}`);
  for (const change of point.changes) log.say(`changed since: ${change}`);
  const { steps } = trainer.config.train;
  if (steps < step)
    log.warn(
      `train.steps is ${steps}, but the checkpoint is already at step ${step}: nothing is trained; ` +
        `use --steps with more than ${step}`,
    );
  else if (steps === step) log.say(`all ${steps} steps are done; --steps with more than ${steps} continues`);
}

/** config.yaml and env.json. */
function writeDescription(folder: RunFolder, config: Config, { kind, name }: Device, { facts }: World): void {
  folder.writeConfig(toYaml(config));
  folder.writeEnvironment({ device: { kind, name }, ...facts });
}

/** A run that was killed between a checkpoint and the evaluation that follows it has to do that evaluation first. */
function isEvaluationMissing(point: ResumePoint | null, folder: RunFolder, config: Config, world: World): boolean {
  const isMissing =
    world.isFirst &&
    point !== null &&
    isEvaluationDue(point.found.step, config) &&
    !readCsv(folder.paths.val, VAL_CSV).rows.some(({ step }) => step === point.found.step);
  // Rank 0 reads the file; the others follow it.
  return world.agreement.max([Number(isMissing)])[0] > 0;
}

function announce(model: LanguageModel, config: Config, log: RankLogger): void {
  const { shape, parameterCount } = model;
  const memory = estimateMemory(shape, config, model.device.kind);
  log.say(
    `model: ${(parameterCount / 1e6).toFixed(1)}M parameters, ${shape.nLayers} layers, ${shape.dim} wide, ` +
      `${shape.attention} attention; about ${(memory.total / 2 ** 20).toFixed(0)} MiB ` +
      `(${(memory.state / 2 ** 20).toFixed(0)} for weights, gradients and moments, ${(memory.activations / 2 ** 20).toFixed(0)} for activations)`,
  );
}

/** A folder that holds a run is only ever continued, never overwritten. */
function refuseUsedFolder(outDir: string): void {
  const paths = runPaths(outDir);
  const isUsed =
    listCheckpoints(paths.checkpoints).length > 0 ||
    existsSync(paths.model) ||
    readCsv(paths.training, TRAINING_CSV).rows.length > 0;
  if (!isUsed) return;
  refuseLiveOwner(paths.lock); // which can be neither resumed nor replaced
  throw new UsageError(
    `${outDir} holds a run already: go on with --resume auto or choose another --out-dir ` +
      "(in TypeScript: resume: 'auto' or train.out_dir)",
  );
}

/** Refuses settings that a training cannot have, and warns about those without effect. */
function checkSupported(
  { runtime, data, train: settings }: Config,
  device: Device,
  { size }: World,
  { warn }: RankLogger,
): void {
  if (!runtime.prefill_batched || runtime.prefill_tile !== 0)
    throw new UsageError(
      'runtime.prefill_batched and runtime.prefill_tile belong to decoding (trefoil generate); leave them out of a training',
    );
  if (size > 1) {
    if (data.synthetic_on_fail)
      throw new UsageError(
        'data.synthetic_on_fail: not with several ranks, whose sources do not fail together; leave it out',
      );
  } else {
    if (settings.ddp === 1)
      throw new UsageError('train.ddp: 1 asks for several ranks; start them with trefoil launch, mpirun or torchrun');
    for (const key of rankSettings(settings)) warn(`train.${key}: no effect on a single rank`);
  }
  expectFp8(runtime, device);
  if (device.kind !== 'cpu') return;
  if (runtime.precision === 'bf16') warn('runtime.precision: bf16 is for CUDA; the CPU computes in fp32');
  for (const key of kernelSettings(runtime))
    warn(`runtime.${key}: no effect on the CPU, which has one kernel for each branch`);
}

/** Keys that only matter with several ranks and that differ from their defaults. */
function rankSettings(settings: Config['train']): string[] {
  const defaults = parseConfig({}).train;
  const keys = ['ddp_safe', 'bucket_mb', 'wire', 'zero', 'hash_every'] as const;
  return keys.filter((key) => settings[key] !== defaults[key]);
}

/** Settings that select the branch kernels instead of the fused attention kernels. */
function kernelSettings(runtime: Config['runtime']): string[] {
  const switches = (['use_fa2', 'use_fa2_win', 'use_fa2_cmp'] as const).filter((key) => runtime[key] === false);
  const lengths = (['fa2_min_len_win', 'fa2_min_len_cmp'] as const).filter((key) => runtime[key] !== 0);
  return [...switches, ...lengths];
}

/** The model of `train.init_from`: its files are checked before data is read. */
function locateInitial(path: string | null): LocatedModel | null {
  if (path === null) return null;
  try {
    return locateModel(path);
  } catch (error) {
    throw error instanceof UsageError ? new UsageError(`train.init_from: ${error.message}`) : error;
  }
}

/** Throws if the model of `train.init_from` has another shape than the config's. */
function expectShape(initial: LocatedModel, shape: ModelShape): void {
  const names = Object.keys(shape) as (keyof ModelShape)[];
  // No weight depends on the number of selected blocks, and none of a dense model on section nsa.
  const nsa = shape.attention === 'dense' ? shape.nsa : { ...initial.shape.nsa, nSel: shape.nsa.nSel };
  const own = { ...initial.shape, nsa };
  const differing = names.filter((name) => JSON.stringify(own[name]) !== JSON.stringify(shape[name]));
  if (differing.length === 0) return;
  const all = differing.map(
    (name) => `${name} ${JSON.stringify(initial.shape[name])}, not ${JSON.stringify(shape[name])}`,
  );
  throw new UsageError(
    `train.init_from: ${initial.path} has ${all.join('; ')}; change the config's model section to match`,
  );
}
