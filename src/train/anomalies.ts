/**
 * Conditions that stop a training, and their reports: non-finite numbers, a failed source, weights that differ, stack
 * dumps.
 */
import { createHash } from 'node:crypto';
import { join } from 'node:path';
import type { Batch } from '../data/batch.js';
import { ExitCode, TrefoilError } from '../errors.js';
import { writeFileAtomic } from '../files.js';
import { toJson } from '../run/json.js';
import { writeAnomaly, writeHalt } from '../run/paths.js';
import type { Parameter } from '../tensor/parameter.js';
import type { World } from './ranks/world.js';
import type { StepGradients, StepResult } from './step.js';

/** A step with a loss or gradient that is not finite. Nothing was changed. */
export class NonFiniteStep extends TrefoilError {
  readonly step: number;
  readonly result: StepResult;
  readonly batches: readonly Batch[];

  constructor(step: number, result: StepResult, batches: readonly Batch[]) {
    super(
      `step ${step}: loss ${result.loss}, gradient norm ${result.norm}; the update was not applied`,
      ExitCode.nonFinite,
    );
    this.step = step;
    this.result = result;
    this.batches = batches;
  }
}

/** The data source failed. The position is that before the step, so a checkpoint can still be saved. */
export class SourceFailed extends TrefoilError {}

/** A stop was asked for while the next step waited for data. The position is that before the step. */
export class FetchInterrupted extends TrefoilError {}

/** Writes the dump of a non-finite step, and on rank 0 .anomaly_type and .HALT; returns one line for a person. */
export function reportNonFinite(
  outDir: string,
  step: number,
  { loss, norm, norms }: StepGradients,
  batches: readonly Batch[],
  parameters: readonly { readonly name: string }[],
  rank: number,
): string {
  const type = Number.isFinite(loss) ? 'nonfinite_gradient' : 'nonfinite_loss';
  const dump = join(outDir, `anomaly_step${step}${rank === 0 ? '' : `_rank${rank}`}.json`);
  const layers = parameters.map(({ name }, i) => ({ name, gradient_norm: norms[i] }));
  const samples = batches.map(({ sampleIds, epoch }) => ({ epoch, sample_ids: sampleIds }));
  writeFileAtomic(
    dump,
    `${toJson({ type, step, loss, gradient_norm: norm, batches: samples, parameters: layers }, 2)}\n`,
  );
  const reason = `${type} at step ${step}: loss ${loss}, gradient norm ${norm}`;
  if (rank === 0) {
    writeAnomaly(outDir, type);
    writeHalt(outDir, reason);
  }
  return `${reason}; the update was not applied, batch ids and gradient norms are in ${dump}`;
}

/**
 * Compares the weights of all ranks. If they differ, writes .anomaly_type and .HALT on rank 0 and returns one line for a
 * person; null if they are equal.
 */
export function reportDifferingWeights(
  outDir: string,
  step: number,
  parameters: readonly Parameter[],
  world: World,
): string | null {
  const ranks = differingRanks(parameters, world);
  if (ranks.length === 0) return null;
  const line =
    `the weights differ between ranks: ${ranks.join(', ')} not as the others, ` +
    `after step ${step}; the last checkpoint is from before`;
  if (world.isFirst) {
    writeAnomaly(outDir, 'ranks_differ');
    writeHalt(outDir, line);
  }
  return line;
}

/** The ranks whose weights, by a hash of all bits, are not those of most ranks. */
function differingRanks(parameters: readonly Parameter[], world: World): string[] {
  if (world.size === 1) return [];
  const hash = createHash('sha1');
  for (const { value } of parameters) hash.update(value.readBytes());
  const hashes = world.agreement.gather(hash.digest('hex'));
  const count = (value: string) => hashes.filter((one) => one === value).length;
  const usual = hashes.reduce((best, value) => (count(value) > count(best) ? value : best));
  return hashes.flatMap((one, rank) => (one === usual ? [] : [`rank ${rank} on ${world.members[rank].host}`]));
}
