/**
 * `train`: a training run from a config to its final files. Opens everything, resumes if asked, runs, closes everything.
 *
 * The way of a step through this folder: `Run` (run.ts) asks `Trainer` (trainer.ts) for the next step; that fetches the
 * batches, launches a `Stepper` (step.ts from the host, device-stepper.ts as a graph of the GPU), judges the result and
 * applies the update. `Run` adds its own metrics to the `TrainingStep` that comes back; report.ts writes and prints it.
 */
import { existsSync } from 'node:fs';
import { resolve } from 'node:path';
import { parseConfig } from '../config/parse.js';
import { toYaml } from '../config/print.js';
import type { Config } from '../config/schema.js';
import type { Loader } from '../data/loader.js';
import { AheadLoader } from '../data/pipeline/ahead-loader.js';
import { type Device, isHostDevice, type KernelSource } from '../device/device.js';
import { TrefoilError, UsageError } from '../errors.js';
import { namesFile } from '../files.js';
import { type LocatedModel, locateModel } from '../infer/load.js';
import { auditKernels, describeKernels } from '../model/kernels.js';
import { LanguageModel } from '../model/language-model.js';
import { estimateMemory } from '../model/memory.js';
import { computeDtype, type ModelShape, modelShape, shapeDifferences } from '../model/shape.js';
import { sparseStartOf } from '../model/sparse-start.js';
import { trainedParameters } from '../model/trainable.js';
import { RunFolder, refuseUsedFolder } from '../run/folder.js';
import { refuseLiveOwner } from '../run/lock.js';
import { readCsv, VAL_CSV } from '../run/logs/csv.js';
import { openLines } from '../run/logs/log.js';
import { LogThread } from '../run/logs/log-thread.js';
import { clearMarks, clearSections, runPaths } from '../run/paths.js';
import { loadWeights } from '../run/tensor-source.js';
import { findResumePoint, type ResumePoint, restoreTrainingState } from './checkpoint.js';
import { compileAhead } from './compile-ahead.js';
import { expectFp8 } from './device-stepper.js';
import { RunEnds } from './ends.js';
import { pinHubModels } from './hub-models.js';
import type { TrainOptions, TrainResult } from './options.js';
import { singleWorld, type World } from './ranks/world.js';
import { RankLogger, RunRecords } from './report.js';
import { isEvaluationDue, Run } from './run.js';
import { SignalWatch } from './signals.js';
import { StackDumps } from './stack-dump.js';
import { Trainer } from './trainer.js';
import { openTrainingData, warmUp } from './training-data.js';

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
  const { device, resume = null } = options;
  const { agreement, rank, isFirst } = world;
  const log = new RankLogger(options, world);
  checkSupported(options.config, device, world, log);
  refuseOtherFormat(options.save ?? null, options.config);
  const outDir = resolve(options.config.train.out_dir);
  if (isFirst && resume === null) refuseUsedFolder(outDir);
  if (isFirst && resume !== null) refuseLiveOwner(runPaths(outDir).lock);
  // Before the lock is taken: that of a killed run, by which its end is known, must outlast a refusal.
  const point = resume === null ? null : findResumePoint(outDir, resume, options.config, world);
  const config = await pinHubModels(options.config, point?.saved.config ?? null, world, log);
  const folder = await agreement.firstThenOthers(() => new RunFolder(outDir, rank));
  onEnd(() => folder.close());
  for (const { path, reason } of point?.found.skipped ?? []) log.warn(`checkpoint ${path} is skipped: ${reason}`);

  const step = point?.found.step ?? 0;
  const ends = new RunEnds(folder, world, step, toYaml(config));
  try {
    if (isFirst) {
      clearMarks(folder.path);
      clearSections(folder.path);
    }
    agreement.wait(); // before the other ranks create their section files

    // A checkpoint of adapters does not hold the weights that they adapt.
    const { init_from: from, lora } = config.train;
    const initial = point === null || lora !== null ? locateInitial(from) : null;
    onEnd(() => initial?.weights.close());
    for (const line of world.describe()) log.say(line);
    const open = () =>
      openTrainingData(config, log.say, log.warnOwn, {
        rank: { rank, world: world.size },
        terminal: isFirst ? (options.terminal ?? null) : null,
      });
    // One rank per machine tokenises; the others find the result in the cache.
    const opened = await agreement.firstThenOthers(open, world.isFirstOfHost);
    // The sources of ranks do not fail together, but what replaces them is the same for all.
    const isReplaced = opened.fallBack !== undefined && opened.source === 'synthetic';
    if (agreement.max([Number(isReplaced)])[0] > 0)
      opened.fallBack?.(new TrefoilError('the data source of another rank gave up'));
    // With a GPU the host has time to prepare the next batches while the device computes.
    const loader = device.kind === 'cuda' ? new AheadLoader(opened) : opened;
    onEnd(() => loader.close());

    const shape = modelShape(config, loader.vocabSize);
    if (initial !== null) expectShape(initial, shape);
    const logThread = await LogThread.start({ onProblem: log.warnOwn });
    onEnd(() => logThread.close());
    if (isFirst) onEnd(log.keep(openLines(folder.paths.log, { logThread })));
    const records = new RunRecords(folder.paths, config, world, step, logThread);
    onEnd(() => records.close());
    ends.records = records;
    records.enter('boot', step);
    records.writeEvent({ step, msg: 'boot', detail: point ? `resumed from ${point.found.path}` : 'new run' });
    if (isFirst) writeDescription(folder, config, device, world);
    device.pool.resetPeak(); // the run reports its own memory
    await agreement.firstThenOthers(() => compileAhead(device, config, shape), world.isFirstOfHost);
    const model = new LanguageModel(device, shape, config.train.seed, computeDtype(config.runtime, device.kind));
    onEnd(() => model.free());
    if (initial !== null) {
      loadWeights(initial.weights, model);
      log.say(`weights: from ${initial.path}`);
    }
    if (lora !== null) model.adapt(lora);
    if (point === null) sparseStartOf(model, config)?.expectClosedGates(config.train.init_from);
    announce(model, config, log);
    // From here on a rank that is busy for long is lost; a compiler may take its time.
    world.monitor.watch({ paths: folder.paths, waiting: (isWaiting) => records.wait(isWaiting) });
    onEnd(() => world.monitor.watch(null));
    const dumps = new StackDumps({ rank, device, position: () => records.position });
    const signals = new SignalWatch(options.signals ?? null, () => {
      const path = folder.paths.stackdump(`${new Date().toISOString().replace(/[:.]/g, '-')}_rank${rank}`);
      dumps.write(path, log.warnOwn);
    });
    onEnd(() => signals.end());
    const isInterrupted = () =>
      signals.pending.stop !== null || options.signal?.aborted === true || existsSync(folder.paths.halt);
    const onSection = records.enter.bind(records);
    const trainer = new Trainer({ model, data: loader, config, world, onSection, isInterrupted });
    onEnd(() => trainer.free());
    if (point) restore(point, trainer, log);
    else if (resume !== null) log.say('no checkpoint yet: starting from step 0');
    warnOfEnd(loader, config, trainer.progress.step, world.size, log);

    const run = new Run({ folder, model, trainer, records, ends, log, signals, options });
    ends.facts = run.facts;
    await warmUp(loader, config, log.warnOwn);
    records.writeEvent({ step, msg: 'loader_ready', data: loader.source ?? config.data.source });
    log.say(describeKernels(config, device, config.train.seq_len));
    if (config.runtime.print_kernels) log.say(auditKernels(config, device, config.train.seq_len));
    const result = await run.execute(isEvaluationMissing(point, folder, config, world));
    await dumps.finished;
    return result;
  } catch (error) {
    log.live?.clear();
    ends.writeFailure(error, log.warnOwn);
    throw error;
  }
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

/** A mixture whose source ends before the run: better said now than when it happens. */
function warnOfEnd(loader: Loader, { train }: Config, step: number, ranks: number, log: RankLogger): void {
  const perStep = train.batch_size * train.accumulate_grad_batches * ranks;
  const end = loader.firstEnd?.((train.steps - step) * perStep);
  if (!end) return;
  const last = step + Math.floor(end.after / perStep);
  log.warn(
    `data.sources: ${end.name} ends after step ${last} of ${train.steps}, and the run with it; raise its epochs, lower its ` +
      'weight, or train fewer steps (trefoil data inspect shows all sources)',
  );
}

/** config.yaml and env.json. */
function writeDescription(folder: RunFolder, config: Config, device: Device, { facts }: World): void {
  folder.writeConfig(toYaml(config));
  const kernels = describeKernels(config, device, config.train.seq_len).replace(/^attention: /, '');
  folder.writeEnvironment({
    device: { kind: device.kind, name: device.name },
    kernels,
    ...(isHostDevice(device) && { kernel_source: describeSource(device.kernelSource) }),
    ...facts,
  });
}

/** Where the kernels of the processor come from, and whether products are fused: that decides the last bits of results. */
function describeSource({ kind, name, isFused, hash }: KernelSource): Record<string, string | boolean> {
  return { kind, name, fused: isFused, hash };
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
  const trained = trainedParameters(model.parameters, config).reduce((sum, { value }) => sum + value.size, 0);
  if (trained < parameterCount) {
    const share = ((100 * trained) / parameterCount).toPrecision(3);
    log.say(
      `trained: ${trained.toLocaleString('en')} of ${parameterCount.toLocaleString('en')} parameters (${share} %)`,
    );
  }
  log.say(
    `model: ${(parameterCount / 1e6).toFixed(1)}M parameters, ${shape.nLayers} layers, ${shape.dim} wide, ` +
      `${shape.attention} attention; about ${(memory.total / 2 ** 20).toFixed(0)} MiB ` +
      `(${(memory.state / 2 ** 20).toFixed(0)} for weights, gradients and moments, ${(memory.activations / 2 ** 20).toFixed(0)} for activations)`,
  );
}

/** A file of weights is a safetensors file; any other path is a folder. */
function refuseOtherFormat(save: string | null, { train: { lora } }: Config): void {
  if (save?.endsWith('.safetensors') && lora !== null)
    throw new UsageError(`--save ${save}: adapters are written as two files; give a folder`);
  if (save === null || save.endsWith('.safetensors') || !namesFile(save)) return;
  throw new UsageError(`--save ${save}: weights are saved as safetensors; name it FILE.safetensors, or give a folder`);
}

/** Refuses settings that a training cannot have, and warns about those without effect. */
function checkSupported(
  { runtime, train: settings }: Config,
  device: Device,
  { size }: World,
  { warn }: RankLogger,
): void {
  if (size === 1) {
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
  return [...(runtime.fused ? [] : ['fused']), ...(runtime.fused_min_len === 0 ? [] : ['fused_min_len'])];
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

/** Throws if the model of `train.init_from` has another shape than the config's; names the first key that differs. */
function expectShape(initial: LocatedModel, shape: ModelShape): void {
  // No weight depends on the number of selected blocks, and none of a dense model on section nsa.
  const nsa = shape.attention === 'dense' ? shape.nsa : { ...initial.shape.nsa, nSel: shape.nsa.nSel };
  const differing = shapeDifferences({ ...initial.shape, nsa }, shape);
  if (differing.length === 0) return;
  const all = differing.map(({ key, a, b }) => `${key} is ${JSON.stringify(b)}, but ${JSON.stringify(a)} there`);
  throw new UsageError(
    `train.init_from: ${initial.path} is of another shape: ${all.join('; ')}; take the shape from the model with --from`,
  );
}
