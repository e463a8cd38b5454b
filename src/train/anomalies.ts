/** What can go wrong in a step, and what is written about it: spikes, non-finite numbers, weights that differ, stack dumps. */
import { createHash } from 'node:crypto';
import { join } from 'node:path';
import type { Batch } from '../data/batch.js';
import { writeFileAtomic } from '../files.js';
import { toJson } from '../run/json.js';
import { writeAnomaly, writeHalt } from '../run/paths.js';
import type { Parameter } from '../tensor/parameter.js';
import type { World } from './ranks/world.js';
import type { StepGradients } from './step.js';

export interface SpikeState {
  readonly count: number;
  readonly mean: number;
  readonly variance: number;
}

/** Values needed before a z-score is meaningful. */
const WARMUP = 20;
/** Weight of the past in the running statistics. */
const MEMORY = 0.98;

/** Running mean and variance with exponential decay. Checkpoints hold the state, so a resumed run detects the same spikes. */
export class SpikeDetector {
  #count = 0;
  #mean = 0;
  #variance = 0;

  /** The z-score of a value against the values before it; 0 until there are enough of them. */
  score(value: number): number {
    if (this.#count < WARMUP || this.#variance === 0) return 0;
    return (value - this.#mean) / Math.sqrt(this.#variance);
  }

  /** Adds a value to the statistics. Spikes are added too; otherwise a new level would stay a spike for ever. */
  add(value: number): void {
    this.#count += 1;
    const weight = Math.max(1 - MEMORY, 1 / this.#count);
    const difference = value - this.#mean;
    this.#mean += weight * difference;
    this.#variance = (1 - weight) * (this.#variance + weight * difference * difference);
  }

  get state(): SpikeState {
    return { count: this.#count, mean: this.#mean, variance: this.#variance };
  }

  restore(state: SpikeState): void {
    this.#count = state.count;
    this.#mean = state.mean;
    this.#variance = state.variance;
  }
}

/** A spike of the loss or of the gradient norm. */
export interface Spike {
  /** z-scores of the loss and of the gradient norm. */
  readonly loss: number;
  readonly gradient: number;
}

/** Detects spikes of the loss and of the gradient norm. */
export class Spikes {
  readonly loss = new SpikeDetector();
  readonly gradient = new SpikeDetector();

  /** Adds a step; returns its z-scores if one of them is at least `threshold`. */
  add({ loss, norm }: StepGradients, threshold: number): Spike | null {
    const scores = { loss: this.loss.score(loss), gradient: this.gradient.score(norm) };
    this.loss.add(loss);
    this.gradient.add(norm);
    return Math.max(scores.loss, scores.gradient) < threshold ? null : scores;
  }
}

/** Writes the dump of a non-finite step, and on rank 0 .anomaly_type and .HALT; returns one line for a person. */
export function reportNonFinite(
  outDir: string,
  step: number,
  { loss, norm, norms }: StepGradients,
  batches: readonly Batch[],
  parameters: readonly Parameter[],
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

/** Compares the weights of all ranks by a hash of all bits. Null if they are equal, else a line that names the ranks. */
export function differingWeights(world: World, parameters: readonly Parameter[]): string | null {
  if (world.size === 1) return null;
  const hash = createHash('sha1');
  for (const { value } of parameters) hash.update(value.readBytes());
  const hashes = world.agreement.gather(hash.digest('hex'));
  const count = (value: string) => hashes.filter((one) => one === value).length;
  const usual = hashes.reduce((best, value) => (count(value) > count(best) ? value : best));
  const others = hashes.flatMap((one, rank) => (one === usual ? [] : [`${rank} on ${world.members[rank].host}`]));
  return others.length === 0
    ? null
    : `the weights differ between ranks: rank ${others.join(', rank ')} not as the others`;
}

/** SIGUSR1: writes where the run is, as Node's report without its environment section, which may hold credentials. */
export function writeStackDump(path: string, position: { readonly step: number; readonly section: string }): void {
  const report = process.report.getReport() as unknown as Record<string, unknown>;
  const { javascriptStack, nativeStack, javascriptHeap, resourceUsage } = report;
  const facts = { pid: process.pid, iso: new Date().toISOString(), ...position };
  writeFileAtomic(path, `${toJson({ ...facts, javascriptStack, nativeStack, javascriptHeap, resourceUsage }, 2)}\n`);
}
