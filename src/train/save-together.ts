/**
 * A checkpoint of several ranks: one folder, one manifest, all or nothing. The first rank writes what all have in common;
 * with ZeRO every rank writes the part of the optimizer it keeps into the same folder, which they must therefore share.
 */
import type { TrefoilError } from '../errors.js';
import type { AdamW } from '../ops/adamw/op.js';
import { explainFileError, isFileSystemError } from '../run/atomic.js';
import type { FileDigest } from '../run/checkpoint-manifest.js';
import {
  type CheckpointParts,
  type CheckpointState,
  type SavedCheckpoint,
  SaveFailed,
  type SaveOptions,
  saveCheckpoint,
  shardName,
  writeTensorFile,
} from '../run/checkpoint-save.js';
import { type Held, shardTensors } from './optimizer-files.js';
import type { Ranks } from './ranks.js';

export interface SharedSave {
  readonly outDir: string;
  readonly step: number;
  readonly parts: CheckpointParts;
  readonly saved: CheckpointState;
  readonly options: SaveOptions;
  readonly optimizer: AdamW;
  readonly held: readonly Held[];
}

/** What a rank tells of its file, or the first one of the whole. */
type Outcome<Value> = { readonly value: Value } | { readonly problem: string };

/** Every rank calls it and every rank gets the same answer, or the same SaveFailed. */
export function saveTogether({ world, parallel }: Ranks, save: SharedSave): SavedCheckpoint {
  const { together } = world;
  if (!world.isFirst) {
    const folder = parallel.isSharded ? together.share('') : '';
    if (folder !== '') together.gather(JSON.stringify(writeShard(folder, world.rank, save)));
    return settle(JSON.parse(together.share('')));
  }
  let isAsked = false;
  const optimizer = (folder: string) => {
    isAsked = true;
    together.share(folder);
    const texts = together.gather(JSON.stringify(writeShard(folder, world.rank, save)));
    return collect(texts.map((text) => JSON.parse(text)));
  };
  const parts = parallel.isSharded ? { ...save.parts, optimizer } : save.parts;
  const outcome = attempt(() => saveCheckpoint(save.outDir, save.step, parts, save.saved, save.options));
  // The disk refused before it was the other ranks' turn: they need not write.
  if (parallel.isSharded && !isAsked) together.share('');
  return settle(JSON.parse(together.share(JSON.stringify(outcome))));
}

function writeShard(folder: string, rank: number, { step, optimizer, held }: SharedSave): Outcome<FileDigest> {
  return attempt(() => {
    try {
      return writeTensorFile(folder, shardName(rank), step, shardTensors(optimizer, held));
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
    if (!(error instanceof SaveFailed)) throw error;
    return { problem: (error as TrefoilError).message };
  }
}

function settle<Value>(outcome: Outcome<Value>): Value {
  if ('problem' in outcome) throw new SaveFailed(outcome.problem);
  return outcome.value;
}
