/** A training run from a config to its final files: opens everything, resumes if asked, runs the loop, closes everything. */
import { existsSync } from 'node:fs';
import { parseConfig } from '../config/parse.js';
import { toYaml } from '../config/print.js';
import type { Config } from '../config/schema.js';
import { AheadLoader } from '../data/ahead-loader.js';
import type { Loader } from '../data/loader.js';
import { createTokenizer } from '../data/tokenizer.js';
import type { Device, DeviceKind } from '../device/device.js';
import { ExitCode, UsageError } from '../errors.js';
import { generate } from '../infer/generate.js';
import { auditKernels } from '../model/kernels.js';
import { LanguageModel } from '../model/language-model.js';
import { estimateMemory } from '../model/memory.js';
import { type ModelShape, modelShape } from '../model/shape.js';
import { AdamW } from '../ops/adamw/op.js';
import { RankLost } from '../ranks/monitor.js';
import type { World } from '../ranks/world.js';
import { type FoundCheckpoint, findCheckpoint, openCheckpoint } from '../run/checkpoint-find.js';
import { listCheckpoints } from '../run/checkpoint-folder.js';
import type { SaveOptions } from '../run/checkpoint-save.js';
import { readCsv, TRAINING_CSV, VAL_CSV } from '../run/csv.js';
import { LogThread } from '../run/logs/log-thread.js';
import { clearMarks, clearSections, RunFolder, runPaths, writeAnomaly } from '../run/run-folder.js';
import type { SectionName } from '../run/section.js';
import { BatchUploader } from './batches.js';
import { restoreTrainingState, type TrainingState } from './checkpoints.js';
import { writeFinalFiles } from './final-files.js';
import { TrainingLoop, type TrainStatus } from './loop.js';
import { LiveLine, type Terminal } from './progress.js';
import { joinRanks } from './ranks.js';
import { type CheckpointRecord, type EvaluationRecord, RunRecords, type StepRecord } from './records.js';
import { type SignalSource, watchSignals } from './signals.js';
import { SpikeDetector } from './spikes.js';
import { writeStackDump } from './stackdump.js';
import { createStepper } from './stepper.js';
import { openTrainingData, warmUp } from './training-data.js';

export interface TrainOptions {
  readonly config: Config;
  readonly device: Device;
  /** The ranks this process is one of (`openWorld`); null, the default, for a single process. */
  readonly world?: World | null;
  /** `auto` (the newest sound checkpoint of the folder), a checkpoint, or null for a new run, the default. */
  readonly resume?: string | null;
  /** Also write the final model to this file. */
  readonly save?: string | null;
  /** Called after each optimizer step was recorded. */
  readonly onStep?: (record: StepRecord) => void;
  /** Called after each evaluation was recorded. */
  readonly onEvaluation?: (record: EvaluationRecord) => void;
  /** Called after each checkpoint was saved, or could not be saved. */
  readonly onCheckpoint?: (record: CheckpointRecord) => void;
  /** Lines for a person: progress (nobody listens by default) and warnings (stderr by default). */
  readonly say?: (line: string) => void;
  readonly warn?: (line: string) => void;
  /** Where the live line goes; without it there is none. */
  readonly terminal?: Terminal | null;
  /** Peak of the device in FLOP/s, for MFU (`measurePeak`); without it MFU is not given. */
  readonly peakFlops?: number | null;
  /** Whose SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 the run obeys: the process's by default. */
  readonly signals?: SignalSource;
  /** An AbortSignal: once aborted, the run ends after the step with a checkpoint, as by SIGTERM. */
  readonly signal?: { readonly aborted: boolean };
  readonly saveOptions?: SaveOptions;
}

/** The options with what stands in for those left out. */
type Settled = TrainOptions & Required<Pick<TrainOptions, 'world' | 'resume' | 'save' | 'say' | 'warn' | 'terminal'>>;

export interface TrainResult {
  readonly status: TrainStatus;
  readonly step: number;
  readonly outDir: string;
  readonly firstLoss: number | null;
  readonly lastLoss: number | null;
  readonly valLoss: number | null;
}

export const EXIT_CODES: Record<TrainStatus, number> = {
  done: ExitCode.done,
  halted: ExitCode.halted,
  signalled: ExitCode.signalled,
  'non-finite': ExitCode.nonFinite,
  'no-data': ExitCode.dataSource,
  'ranks-differ': ExitCode.failed,
};

/** Trains, writes the files of the run into `config.train.out_dir`, and says how it ended. */
export async function train(given: TrainOptions): Promise<TrainResult> {
  const { config, resume = null, save = null, terminal = null, world = null } = given;
  const { say, warn } = voices(given, world);
  const isFirst = !world || world.isFirst;
  const options: Settled = { ...given, world, resume, save, say, warn, terminal: isFirst ? terminal : null };
  refuseUnsupported(config, options.device.kind, world, isFirst ? warn : () => {});
  if (options.resume === null && isFirst) refuseUsedFolder(config.train.out_dir);
  if (world) say(world.describe());
  const rank = world ? { rank: { rank: world.rank, world: world.size } } : {};
  const open = () => openTrainingData(config, say, warn, rank);
  // One rank of a machine tokenises; the others find the result in the cache.
  const { loader: opened, data } = world
    ? await world.together.firstThenOthers(open, world.isFirstOfHost)
    : await open();
  // A GPU computes while the host has nothing to do but to pack what comes next.
  const loader = options.device.kind === 'cuda' ? new AheadLoader(opened) : opened;
  try {
    const shape = modelShape(config, loader.vocabSize);
    const enter = () => enterFolder(config.train.out_dir, world?.rank ?? 0);
    const folder = world ? await world.together.firstThenOthers(enter) : enter();
    try {
      return await runIn(folder, options, loader, data, shape);
    } finally {
      folder.close();
    }
  } finally {
    loader.close();
  }
}

async function runIn(
  folder: RunFolder,
  options: Settled,
  loader: Loader,
  data: () => string,
  shape: ModelShape,
): Promise<TrainResult> {
  const { config, device, world, say, warn } = options;
  const outDir = folder.path;
  const [rank, isFirst] = [world?.rank ?? 0, !world || world.isFirst];
  device.pool.resetPeak(); // a run tells of its own memory
  const found = options.resume === null ? undefined : findTogether(outDir, options.resume, world);
  for (const { path, reason } of found?.skipped ?? []) warn(`checkpoint ${path} is skipped: ${reason}`);
  const model = new LanguageModel(device, shape, config.train.seed, computeDtype(config, device));
  announce(model, config, say);
  const ranks = world && joinRanks(world, device, model.parameters, config);
  const held = ranks?.parallel.trained ?? model.parameters;
  const matrices = new Set(model.parameters.filter(({ value }) => value.shape.length >= 2).map(({ name }) => name));
  const trained = held.map((parameter) => ({
    parameter,
    weightDecay: matrices.has(parameter.name) ? config.train.weight_decay : 0,
  }));
  const state: TrainingState = {
    model,
    optimizer: new AdamW(device, trained, { betas: config.train.betas, epsilon: config.train.eps }),
    held,
    loader,
    spikes: { loss: new SpikeDetector(), gradient: new SpikeDetector() },
    progress: {
      step: 0,
      firstLoss: null,
      lastLoss: null,
      lastValLoss: null,
      tokensSeen: 0,
      spikes: 0,
      skippedUpdates: 0,
    },
  };
  if (found) {
    const changes = restoreTrainingState(found, state, config, world?.size ?? 1);
    say(`resumed from ${found.path} at step ${found.step}`);
    for (const change of changes) say(`changed since: ${change}`);
    if (config.train.steps < found.step)
      warn(
        `train.steps is ${config.train.steps}, but the checkpoint is already at step ${found.step}: nothing is trained; ` +
          `use --steps with more than ${found.step}`,
      );
  } else if (options.resume !== null) {
    say('no checkpoint yet: starting from step 0');
  }
  if (isFirst) {
    folder.writeConfig(toYaml(config));
    const ranks = world && {
      ranks: { world: world.size, launcher: world.identity.launcher, members: world.members },
    };
    folder.writeEnvironment({ device: { kind: device.kind, name: device.name }, ...ranks });
  }
  const logThread = await LogThread.start({ onProblem: warn });
  const members = { rank, world: world?.size ?? 1 };
  const records = new RunRecords(folder.paths, config, members, state.progress.step, logThread);
  const position: { step: number; section: SectionName } = { step: state.progress.step, section: 'boot' };
  world?.monitor.watch({
    paths: folder.paths,
    waiting: (isWaiting) => records.enter(isWaiting ? 'wait' : position.section, position.step),
  });
  const dump = () => {
    const path = folder.paths.stackdump(`${new Date().toISOString().replace(/[:.]/g, '-')}_rank${rank}`);
    writeStackDump(path, position);
    warn(`SIGUSR1: wrote ${path}`);
  };
  const signals = watchSignals(dump, options.signals);
  const uploader = new BatchUploader(device, config.nsa);
  const parallel = ranks ? { parallel: ranks.parallel, together: ranks.world.together } : {};
  const stepper = createStepper({ model, optimizer: state.optimizer, uploader, config, ...parallel });
  const started = performance.now();
  try {
    records.enter('boot', state.progress.step);
    records.event({ step: state.progress.step, msg: 'boot', detail: found ? `resumed from ${found.path}` : 'new run' });
    await warmUp(loader, config, warn);
    records.event({ step: state.progress.step, msg: 'loader_ready', data: data() });
    const loop = new TrainingLoop(
      {
        ...{ outDir, config, data, state, uploader, stepper, ranks, records, say, warn, position },
        sample: () => sampleText(model, config),
        requests: signals.requests,
        isAborted: () => options.signal?.aborted ?? false,
        peakFlops: options.peakFlops ?? null,
        live: new LiveLine(options.terminal),
        ...(options.onStep && { onStep: options.onStep }),
        ...(options.onEvaluation && { onEvaluation: options.onEvaluation }),
        ...(options.onCheckpoint && { onCheckpoint: options.onCheckpoint }),
        ...(options.saveOptions && { saveOptions: options.saveOptions }),
      },
      found?.step ?? null,
    );
    if (config.runtime.sdpa_audit) say(auditKernels(config, device, config.train.seq_len));
    // A run killed between its checkpoint and the evaluation that follows it owes that evaluation.
    const owes = found && loop.evaluationDue(found.step) && !hasEvaluation(folder.paths.val, found.step);
    // The first rank owns the file; the others go by its word.
    if (world ? world.together.max([Number(isFirst && owes)])[0] > 0 : owes) await loop.evaluateNow();
    const status = loop.weightsAgree(true) ? await loop.run() : 'ranks-differ';
    const { step, firstLoss, lastLoss, lastValLoss: valLoss } = state.progress;
    if (status === 'done') records.event({ step, msg: 'stop', detail: 'done' });
    const seconds = (performance.now() - started) / 1000;
    records.flush();
    if (records.lost > 0)
      warn(`${records.lost} log records were dropped: the file system of ${outDir} did not take them`);
    const facts = { state, config, status, seconds, drops: records.lost, ranks: world?.size ?? 1, save: options.save };
    if (isFirst) writeFinalFiles(folder, facts);
    // A launcher may end all ranks as soon as one of them has ended: nobody goes before the files are there.
    world?.together.wait();
    return { status, step, outDir, firstLoss, lastLoss, valLoss };
  } catch (error) {
    if (error instanceof RankLost) {
      records.event({ step: state.progress.step, msg: 'halt', detail: error.message });
      writeAnomaly(outDir, error.anomaly);
    }
    world?.collectives.leave(); // what is freed below would wait for ranks that may never come
    throw error;
  } finally {
    world?.monitor.watch(null);
    signals.end();
    records.close();
    stepper.free();
    uploader.free();
    state.optimizer.free();
    ranks?.parallel.free();
    model.free();
  }
}

/** The first rank takes the lock and removes what a former run left; the others come after it. */
function enterFolder(outDir: string, rank: number): RunFolder {
  const folder = new RunFolder(outDir, rank);
  if (rank === 0) {
    clearMarks(folder.path);
    clearSections(folder.path);
  }
  return folder;
}

/** Lines for a person come from the first rank; the others only warn, by their number. */
function voices(
  { say = () => {}, warn = (line) => console.warn(`warning: ${line}`) }: TrainOptions,
  world: World | null,
) {
  if (!world || world.isFirst) return { say, warn };
  return { say: () => {}, warn: (line: string) => warn(`rank ${world.rank}: ${line}`) };
}

/** The first rank looks for the checkpoint and verifies it; the others open the same. */
function findTogether(outDir: string, which: string, world: World | null): FoundCheckpoint | undefined {
  if (!world) return findCheckpoint(outDir, which);
  const found = world.isFirst ? findCheckpoint(outDir, which) : undefined;
  const path = world.together.share(found?.path ?? '');
  return world.isFirst || path === '' ? found : openCheckpoint(path, true);
}

function announce(model: LanguageModel, config: Config, say: (line: string) => void): void {
  const { shape, parameterCount } = model;
  const memory = estimateMemory(shape, config, model.device.kind);
  say(
    `model: ${(parameterCount / 1e6).toFixed(1)}M parameters, ${shape.nLayers} layers, ${shape.dim} wide, ` +
      `${shape.attention} attention; about ${(memory.total / 2 ** 20).toFixed(0)} MiB ` +
      `(${(memory.state / 2 ** 20).toFixed(0)} weights, gradients and moments, ${(memory.activations / 2 ** 20).toFixed(0)} activations)`,
  );
}

/** A folder with a run in it is only ever continued, never written over. */
function refuseUsedFolder(outDir: string): void {
  const paths = runPaths(outDir);
  const used =
    listCheckpoints(paths.checkpoints).length > 0 ||
    existsSync(paths.model) ||
    readCsv(paths.training, TRAINING_CSV).rows.length > 0;
  if (used)
    throw new UsageError(
      `${outDir} holds a run already: go on with --resume auto, or choose another folder with --out-dir`,
    );
}

const SAMPLE_TOKENS = 64;

async function sampleText(model: LanguageModel, config: Config): Promise<string> {
  const loaded = { model, config, tokenizer: createTokenizer(config.data.tokenizer) };
  let text = '';
  for await (const piece of generate(loaded, '', {
    maxNewTokens: SAMPLE_TOKENS,
    sampling: { temperature: 0.8, seed: config.train.seed },
  }))
    text += piece;
  return text;
}

function refuseUnsupported(
  { runtime, data, train: settings }: Config,
  device: DeviceKind,
  world: World | null,
  warn: (line: string) => void,
): void {
  if (!runtime.prefill_batched || runtime.prefill_tile !== 0)
    throw new UsageError(
      'runtime.prefill_batched and runtime.prefill_tile belong to decoding (trefoil generate); leave them out of a training',
    );
  if (settings.ddp === 1 && !world)
    throw new UsageError('train.ddp: 1 asks for several ranks; start them with trefoil launch, mpirun or torchrun');
  if (world && data.synthetic_on_fail)
    throw new UsageError(
      'data.synthetic_on_fail: not with several ranks, whose sources do not fail together; leave it out',
    );
  if (!world) for (const key of rankChoices(settings)) warn(`train.${key}: no effect on a single rank`);
  if (device !== 'cpu') return;
  if (runtime.precision === 'bf16') warn('runtime.precision: bf16 is for CUDA; the CPU computes in fp32');
  for (const key of portableChoices(runtime))
    warn(`runtime.${key}: no effect on the CPU, which has one kernel for each branch`);
}

/** Keys that only several ranks look at, and that somebody has set. */
function rankChoices(settings: Config['train']): string[] {
  const usual = parseConfig({}).train;
  const keys = ['ddp_safe', 'bucket_mb', 'wire', 'zero', 'hash_every'] as const;
  return keys.filter((key) => settings[key] !== usual[key]);
}

/** Switches between fused and portable attention kernels that ask for the portable ones. */
function portableChoices(runtime: Config['runtime']): string[] {
  const switches = (['use_fa2', 'use_fa2_win', 'use_fa2_cmp'] as const).filter((key) => runtime[key] === false);
  const lengths = (['fa2_min_len_win', 'fa2_min_len_cmp'] as const).filter((key) => runtime[key] !== 0);
  return [...switches, ...lengths];
}

function computeDtype({ runtime }: Config, device: Device): 'f32' | 'bf16' {
  return runtime.precision === 'bf16' && device.kind === 'cuda' ? 'bf16' : 'f32';
}

function hasEvaluation(path: string, step: number): boolean {
  return readCsv(path, VAL_CSV).rows.some((row) => row.step === step);
}
