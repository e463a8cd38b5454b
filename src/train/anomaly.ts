/** A loss or gradient that is not finite: what is written so that a person can find the cause, and the halt. */
import { join } from 'node:path';
import type { Batch } from '../data/batch.js';
import { writeFileAtomic } from '../run/atomic.js';
import { toJson } from '../run/json.js';
import { writeAnomaly, writeHalt } from '../run/run-paths.js';
import type { Parameter } from '../tensor/parameter.js';
import type { StepGradients } from './optimizer-step.js';

/** Writes the dump, and as the first rank .anomaly_type and .HALT; returns the line for a person. */
export function reportNonFinite(
  outDir: string,
  step: number,
  { loss, norm, norms }: StepGradients,
  batches: readonly Batch[],
  parameters: readonly Parameter[],
  rank = 0,
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
