/**
 * The state of a training in a checkpoint: weights, the optimizer's moments, and the position of everything else. Files and their
 * durability are the business of run/checkpoint/.
 *
 * With several ranks a checkpoint is one folder with one manifest, all or nothing. Rank 0 writes what all have in common;
 * with ZeRO each rank writes its part of the optimizer's state into the same folder. A run can be resumed with another
 * number of ranks, with ZeRO or without, because a reader takes what it needs from either form.
 */
import { createHash } from 'node:crypto';
import { dirname, join } from 'node:path';
import { changeLine, checkResume } from '../config/diff.js';
import { withPresentNamesIn } from '../config/legacy/keys.js';
import { type Config, configShape } from '../config/schema.js';
import type { Loader } from '../data/loader.js';
import { isBeginning, mergeStreamStates, type StreamState } from '../data/pipeline/position.js';
import { type TrefoilError, UsageError } from '../errors.js';
import { explainFileError, isFileSystemError, statOrUndefined } from '../files.js';
import {
  CHECKPOINT_FILES,
  type FileDigest,
  type FoundCheckpoint,
  findCheckpoint,
  openCheckpoint,
  optimizerFiles,
  shardName,
} from '../run/checkpoint/read.js';
import {
  type SavedCheckpoint,
  SaveFailed,
  type SaveOptions,
  saveCheckpoint,
  writeTensorFile,
} from '../run/checkpoint/save.js';
import { SaveThread } from '../run/checkpoint/save-thread.js';
import { runPaths } from '../run/paths.js';
import { openSafetensors, type SafetensorsFile } from '../run/safetensors.js';
import { loadWeights, modelTensors, namedTensors, type TensorToWrite } from '../run/tensor-source.js';
import type { Optimizer, Trainable } from '../tensor/optimizer.js';
import type { Parameter } from '../tensor/parameter.js';
import type { Tensor } from '../tensor/tensor.js';
import { shellQuote } from '../text.js';
import * as z from '../zod.js';
import { ParameterPart } from './data-parallel.js';
import type { GradientExchange } from './gradient-exchange.js';
import type { World } from './ranks/world.js';
import type { TrainableModel } from './step.js';
import type { Spikes } from './trainer.js';

/** Everything that changes during a training, and what is needed to save it. `Trainer` is one. */
export interface TrainingState {
  readonly config: Config;
  readonly world: World;
  readonly model: TrainableModel;
  readonly optimizer: Optimizer;
  readonly exchange: GradientExchange;
  readonly loader: Loader;
  readonly spikes: Spikes;
  readonly progress: TrainingProgress;
  /** Hash of the weights below adapters; null without adapters. */
  readonly base: string | null;
}

/** The weights in a checkpoint: all, or the adapters alone where there are some. */
function savedParameters({ parameters, adapters = [] }: TrainableModel): readonly Parameter[] {
  return adapters.length === 0 ? parameters : parameters.filter(({ isFrozen }) => !isFrozen);
}

/** The hash of the weights that adapters are trained for; null without adapters. */
export function baseHash({ parameters, adapters = [] }: TrainableModel): string | null {
  if (adapters.length === 0) return null;
  const hash = createHash('sha256');
  const frozen = parameters.filter(({ isFrozen }) => isFrozen);
  const memory = new Uint8Array(Math.max(0, ...frozen.map(({ value }) => value.bytes)));
  for (const { value } of frozen) {
    const bytes = memory.subarray(0, value.bytes);
    value.readInto(bytes);
    hash.update(bytes);
  }
  return hash.digest('hex');
}

/** Counters that survive a resume. */
export interface TrainingProgress {
  /** Optimizer steps done. */
  step: number;
  firstLoss: number | null;
  lastLoss: number | null;
  lastValLoss: number | null;
  tokensSeen: number;
  spikes: number;
  skippedUpdates: number;
}

/** The optimizer of checkpoints that name none. */
const DEFAULT_OPTIMIZER = 'adamw';

const spikeState = z.strictObject({ count: z.number(), mean: z.number(), variance: z.number() });
const savedState = z.strictObject({
  step: z.int().min(0),
  /** `Optimizer.name`; absent for adamw. */
  optimizer: z.string().optional(),
  optimizer_steps: z.int().min(0),
  loader: z.unknown(),
  spikes: z.strictObject({ loss: spikeState, gradient: spikeState }),
  first_loss: z.number().nullable(),
  last_loss: z.number().nullable(),
  last_val_loss: z.number().nullable(),
  tokens_seen: z.number(),
  spike_count: z.int(),
  skipped_updates: z.int(),
  /** The rules between keys were checked when the run began; keys that are newer than the checkpoint have their defaults. */
  config: z.preprocess(withPresentNamesIn, configShape),
  /** Hash of the weights that adapters were trained for, which the checkpoint does not hold; absent without adapters. */
  base: z.string().optional(),
  /** Number of ranks; absent for one. */
  ranks: z.int().min(2).optional(),
});

/**
 * A checkpoint that was copied and is being written.
 *
 * @opaque
 */
export interface PendingSave {
  readonly step: number;
  /** Whether it is written, or was refused, as far as this rank knows: `settle` then does not wait. */
  readonly isDone: boolean;
  /** Waits until it is written. Every rank calls it, at the same place; all get it, or all throw the same SaveFailed. */
  settle(): Promise<SavedCheckpoint>;
  /** Waits for what this rank writes, and for no other rank: at the end of a run that failed. */
  finish(): Promise<void>;
}

/**
 * Begins to save in the thread of rank 0 and returns when the state is copied. Every rank calls it. Null if it must be saved
 * by `saveTrainingState`: with ZeRO-1 every rank writes a part, and without memory there is no copy.
 */
export function beginSaving(
  outDir: string,
  state: TrainingState,
  { keepLast }: SaveOptions,
  thread: SaveThread | null,
): PendingSave | null {
  const { world, model, optimizer, exchange, progress } = state;
  const { agreement } = world;
  if (exchange.isSharded) return null;
  const parameters = savedParameters(model);
  const tensors = {
    model: parameters.map(({ name, value }) => [name, value] as const),
    optimizer: [...optimizer.state],
  };
  const lacksRoom = world.isFirst && (thread === null || !thread.hasRoom(SaveThread.bytesOf(tensors)));
  if (agreement.max([Number(lacksRoom)])[0] > 0) return null;
  const { step } = progress;
  const saved = stateOf(state);
  const written = thread?.save(outDir, step, { ...tensors, state: saved }, keepLast) ?? null;
  return {
    step,
    get isDone() {
      return written?.isDone ?? false;
    },
    finish: async () => void (await written?.result.catch(() => {})),
    settle: async () => {
      if (written === null) return settle(JSON.parse(agreement.share('')));
      const outcome: Outcome<SavedCheckpoint> = await written.result.then((value) => ({ value }), problemOf);
      return settle(JSON.parse(agreement.share(JSON.stringify(outcome))));
    },
  };
}

/** Everything but tensors, with the data position of all ranks. */
function stateOf(state: TrainingState): z.infer<typeof savedState> {
  const { config, world, optimizer, loader, spikes, progress } = state;
  return {
    step: progress.step,
    ...(optimizer.name !== DEFAULT_OPTIMIZER && { optimizer: optimizer.name }),
    optimizer_steps: optimizer.steps,
    loader: joinedPosition(loader, world),
    spikes,
    first_loss: progress.firstLoss,
    last_loss: progress.lastLoss,
    last_val_loss: progress.lastValLoss,
    tokens_seen: progress.tokensSeen,
    spike_count: progress.spikes,
    skipped_updates: progress.skippedUpdates,
    config,
    ...(state.base !== null && { base: state.base }),
    ...(world.size > 1 && { ranks: world.size }),
  };
}

/** Every rank calls it; all save, or all throw the same SaveFailed. */
export function saveTrainingState(outDir: string, state: TrainingState, options: SaveOptions): SavedCheckpoint {
  const { world, model, optimizer, exchange, progress } = state;
  const saved = stateOf(state);
  const { agreement } = world;
  if (!world.isFirst) {
    const folder = exchange.isSharded ? agreement.share('') : '';
    if (folder !== '') agreement.gather(JSON.stringify(writeShard(folder, world.rank, state)));
    return settle(JSON.parse(agreement.share('')));
  }
  let haveShards = false;
  const writeShards = (folder: string) => {
    haveShards = true;
    agreement.share(folder);
    const texts = agreement.gather(JSON.stringify(writeShard(folder, world.rank, state)));
    return collect(texts.map((text) => JSON.parse(text)));
  };
  const parts = {
    model: modelTensors({ parameters: savedParameters(model) }),
    optimizer: exchange.isSharded ? writeShards : namedTensors(optimizer.state),
  };
  const outcome = attempt(() => saveCheckpoint(outDir, progress.step, parts, saved, options));
  // The disk refused before the other ranks' turn: an empty folder name tells them not to write.
  if (exchange.isSharded && !haveShards) agreement.share('');
  return settle(JSON.parse(agreement.share(JSON.stringify(outcome))));
}

/** The data position of all ranks, from which any number of ranks can continue. */
function joinedPosition(loader: Loader, { agreement }: World): object {
  const states = agreement.gather(JSON.stringify(loader.state())).map((text) => JSON.parse(text));
  const begin = states.find(isBeginning);
  if (begin) return begin;
  return states[0].kind === 'stream' ? mergeStreamStates(states as StreamState[]) : states[0];
}

/** A checkpoint that was found, verified and checked against the config. */
export interface ResumePoint {
  readonly found: FoundCheckpoint;
  readonly saved: z.infer<typeof savedState>;
  /** Changes of the config since then, as lines to print. */
  readonly changes: readonly string[];
}

/**
 * Finds the checkpoint to resume from and refuses one that does not fit the config; null if none exists yet. Cheap: no
 * data is opened and no model is built. Rank 0 verifies the files; the others open the same checkpoint.
 */
export function findResumePoint(outDir: string, which: string, config: Config, world: World): ResumePoint | null {
  const own = world.isFirst ? findCheckpoint(outDir, which) : undefined;
  const path = world.agreement.share(own?.path ?? '');
  if (path === '') return null;
  const found = own ?? openCheckpoint(path, true);
  const parsed = savedState.safeParse(found.state);
  if (!parsed.success) {
    const [{ path: key, message }] = parsed.error.issues;
    const place = join(found.path, CHECKPOINT_FILES.state);
    throw new UsageError(`${place}: is not the state of a training run: ${[...key, message].join(': ')}`);
  }
  const saved = parsed.data;
  const { config: file } = runPaths(dirname(dirname(found.path)));
  const remedy = statOrUndefined(file) && `the config of that run: --config ${shellQuote(file)}`;
  const changes = checkResume(saved.config, config, remedy).map(changeLine);
  return { found, saved, changes: [...changes, ...rankChanges(saved.config, saved.ranks ?? 1, config, world.size)] };
}

/** Restores everything from a checkpoint. */
export function restoreTrainingState({ found, saved }: ResumePoint, state: TrainingState): void {
  const { model, optimizer, exchange } = state;
  if ((saved.base ?? null) !== state.base)
    throw new UsageError(
      `train.init_from: the weights of ${state.config.train.init_from} are not those that this run began with; ` +
        'restore them, or start a new run',
    );
  expectOptimizer(found.path, saved.optimizer ?? DEFAULT_OPTIMIZER, optimizer.name);
  const weights = openSafetensors(join(found.path, CHECKPOINT_FILES.model));
  try {
    loadWeights(weights, { parameters: savedParameters(model) });
  } finally {
    weights.close();
  }
  loadOptimizer(found.path, optimizerFiles(found.manifest), optimizer, exchange.trained, model.parameters);
  optimizer.steps = saved.optimizer_steps;
  if (!isBeginning(saved.loader)) state.loader.restore(saved.loader);
  Object.assign(state.spikes.loss, saved.spikes.loss);
  Object.assign(state.spikes.gradient, saved.spikes.gradient);
  Object.assign(state.progress, {
    step: saved.step,
    firstLoss: saved.first_loss,
    lastLoss: saved.last_loss,
    lastValLoss: saved.last_val_loss,
    tokensSeen: saved.tokens_seen,
    spikes: saved.spike_count,
    skippedUpdates: saved.skipped_updates,
  });
}

/** The moments of one optimizer mean nothing to another. */
function expectOptimizer(path: string, before: string, now: string): void {
  if (before === now) return;
  const remedy = `set train.optimizer ${before}, or start a new run from its weights with train.init_from`;
  throw new UsageError(`${path}: was saved with the optimizer ${before}, this training uses ${now}; ${remedy}`);
}

/** The effect of another number of ranks: the batch of a step is what all ranks take together. */
function rankChanges(before: Config, ranksBefore: number, config: Config, ranks: number): string[] {
  const batch = ({ train }: Config, count: number) => train.batch_size * train.accumulate_grad_batches * count;
  const [old, now] = [batch(before, ranksBefore), batch(config, ranks)];
  if (ranks === ranksBefore) return [];
  const same = old === now ? `${now} sequences a step as before` : `${old} -> ${now} sequences a step`;
  return [`ranks: ${ranksBefore} -> ${ranks} (${same}; the order of samples stays)`];
}

/** The report of a rank about its file, or rank 0 about the whole checkpoint. */
type Outcome<Value> = { readonly value: Value } | { readonly problem: string };

function writeShard(
  folder: string,
  rank: number,
  { progress, optimizer, exchange }: TrainingState,
): Outcome<FileDigest> {
  return attempt(() => {
    try {
      return writeTensorFile(folder, shardName(rank), progress.step, shardTensors(optimizer, exchange.trained));
    } catch (error) {
      if (!isFileSystemError(error)) throw error;
      const hint = 'all ranks write into one folder: train.out_dir must lie on a disk that they share';
      throw new SaveFailed(`rank ${rank}: ${explainFileError(error)}; ${hint}`, undefined, { cause: error });
    }
  });
}

function collect(outcomes: readonly Outcome<FileDigest>[]): Record<string, FileDigest> {
  return Object.fromEntries(outcomes.map((outcome, rank) => [shardName(rank), settle(outcome)]));
}

function attempt<Value>(action: () => Value): Outcome<Value> {
  try {
    return { value: action() };
  } catch (error) {
    return problemOf(error);
  }
}

function problemOf(error: unknown): { readonly problem: string } {
  if (!(error instanceof SaveFailed)) throw error;
  return { problem: (error as TrefoilError).message };
}

function settle<Value>(outcome: Outcome<Value>): Value {
  if ('problem' in outcome) throw new SaveFailed(outcome.problem);
  return outcome.value;
}

const F32_BYTES = 4;
/** `<parameter>.<moment>.at<first element>`: a part, as a flat tensor. */
const PART_NAME = /^(.+)\.at(\d+)$/;

/** The parts of this rank; their names contain the index of their first element. */
function* shardTensors(optimizer: Optimizer, held: readonly Trainable[]): Generator<TensorToWrite> {
  for (const { name, tensor, from } of heldTensors(optimizer, held))
    yield { name: `${name}.at${from}`, dtype: 'F32', shape: [tensor.size], data: () => tensor.readBytes() };
}

/** Fills the optimizer from the files of a checkpoint; refuses files that do not fit `parameters`, the whole model. */
function loadOptimizer(
  folder: string,
  names: readonly string[],
  optimizer: Optimizer,
  held: readonly Trainable[],
  parameters: readonly Parameter[],
): void {
  const files = names.map((name) => ({ path: join(folder, name), file: openSafetensors(join(folder, name)) }));
  try {
    const pieces = collectPieces(files, momentsOf(optimizer, parameters));
    for (const { name, tensor, from } of heldTensors(optimizer, held)) {
      const bytes = new Uint8Array(tensor.bytes);
      const missing = fill(bytes, from, from + tensor.size, pieces.get(name) ?? []);
      if (missing > 0)
        throw new UsageError(
          `${folder}: lacks ${missing} elements of ${name}, which this model needs; check the config`,
        );
      tensor.writeBytes(bytes);
    }
  } finally {
    for (const { file } of files) file.close();
  }
}

/** Elements `from` to `to` of a tensor, in a file. */
interface TensorSlice {
  readonly from: number;
  readonly to: number;
  read(): Uint8Array;
}

function* heldTensors(
  optimizer: Optimizer,
  held: readonly Trainable[],
): Generator<{ name: string; tensor: Tensor; from: number }> {
  const parts = new Map(held.map((one) => [one.name, one]));
  for (const [name, tensor] of optimizer.state) {
    const one = parts.get(splitMoment(name).parameter);
    yield { name, tensor, from: one instanceof ParameterPart ? one.from : 0 };
  }
}

/** Every moment that a file may hold, of parameters that other ranks keep too, with its parameter. */
function momentsOf({ state }: Optimizer, parameters: readonly Parameter[]): Map<string, Parameter> {
  const moments = new Set(Array.from(state.keys(), (name) => splitMoment(name).moment));
  return new Map(parameters.flatMap((one) => [...moments].map((moment) => [`${one.name}.${moment}`, one] as const)));
}

function splitMoment(name: string): { parameter: string; moment: string } {
  const dot = name.lastIndexOf('.');
  return { parameter: name.slice(0, dot), moment: name.slice(dot + 1) };
}

function collectPieces(
  files: readonly { path: string; file: SafetensorsFile }[],
  expected: ReadonlyMap<string, Parameter>,
): Map<string, TensorSlice[]> {
  const pieces = new Map<string, TensorSlice[]>();
  for (const { path, file } of files)
    for (const [entryName, { dtype, shape }] of file.entries) {
      const part = PART_NAME.exec(entryName);
      const [name, from] = part ? [part[1], Number(part[2])] : [entryName, 0];
      const value = expected.get(name)?.value;
      if (!value) throw new UsageError(`${path}: holds ${entryName}, which this model does not have; check the config`);
      const size = shape.reduce((product, length) => product * length, 1);
      const fits = part ? shape.length === 1 && from + size <= value.size : shape.join() === value.shape.join();
      if (dtype !== 'F32' || !fits)
        throw new UsageError(
          `${path}: ${entryName} is ${dtype} [${shape.join(', ')}], this model needs F32 [${value.shape.join(', ')}]`,
        );
      const list = pieces.get(name) ?? [];
      pieces.set(name, list);
      list.push({ from, to: from + size, read: () => file.read(entryName).data });
    }
  return pieces;
}

/** Copies the elements `from` to `to` out of the pieces; returns how many are missing. */
function fill(into: Uint8Array, from: number, to: number, pieces: readonly TensorSlice[]): number {
  let missing = to - from;
  for (const piece of pieces) {
    const [first, last] = [Math.max(from, piece.from), Math.min(to, piece.to)];
    if (last <= first) continue;
    const bytes = piece.read().subarray((first - piece.from) * F32_BYTES, (last - piece.from) * F32_BYTES);
    into.set(bytes, (first - from) * F32_BYTES);
    missing -= last - first;
  }
  return missing;
}
