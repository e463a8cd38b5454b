/**
 * Decode and prefill of a whole model on the CPU. Branch times are those of the branch's own kernels, all layers together;
 * `cmp` includes the selection, which uses its scores.
 */
import { CpuDevice } from '../device/cpu/cpu.js';
import type { Device } from '../device/device.js';
import { prefill, readTokens } from '../infer/decode.js';
import { RecordedSteps } from '../infer/recorded-steps.js';
import { type CachedSequence, DecodeCache } from '../model/cache.js';
import { LanguageModel } from '../model/language-model.js';
import type { StoredParameters } from '../model/parameters.js';
import type { ModelShape } from '../model/shape.js';
import { PackedMatrix } from '../ops/linear/packed.js';
import { fillNormal } from '../tensor/random/op.js';
import { type Shape, Tensor } from '../tensor/tensor.js';
import {
  type Branch,
  benchPrompts,
  fillCache,
  type ModelBench,
  type PrefillTimes,
  type StepTimes,
} from './decode-setup.js';
import { median } from './timing.js';
import { TimedDevice } from './train-profile.js';

const DECODE_KERNELS: Record<Branch, readonly string[]> = {
  cmp: ['paged_compressed'],
  sel: ['paged_selected'],
  win: ['paged_window'],
};
const PREFILL_KERNELS: Record<Branch, readonly string[]> = {
  cmp: ['compressed_forward', 'select_forward'],
  sel: ['selected_forward'],
  win: ['window_forward'],
};

const WARM_UPS = 2;

export function measureSteps(device: Device, { shape, lengths, batch, runs }: ModelBench): StepTimes[] {
  return withModel(device, shape, (model, timed) =>
    lengths.map((S) => {
      const cache = new DecodeCache(timed, shape);
      const sequences = Array.from({ length: batch }, () => cache.sequence());
      try {
        if (S > 1) fillCache(cache, sequences, S - 1);
        let reads = 0;
        const observer = {
          reads: (_: number, counts: Record<Branch, Tensor>) => {
            reads = counts.cmp.item(0) + counts.sel.item(0) + counts.win.item(0);
          },
        };
        const step = () =>
          withForks(sequences, (forks) => readTokens(model, forks, forks.map(nextToken), { observer }));
        const times = timeRuns(timed, step, runs, DECODE_KERNELS);
        return {
          ...times,
          ms: device instanceof CpuDevice ? repeated(model, device, sequences, runs) : times.ms,
          reads,
        };
      } finally {
        for (const sequence of sequences) sequence.free();
        timed.pool.trim();
      }
    }),
  );
}

/** Milliseconds of a step as generation makes it: its launches are recorded and repeated, and no kernel is timed. */
function repeated(model: LanguageModel, device: CpuDevice, sequences: readonly CachedSequence[], runs: number): number {
  const steps = new RecordedSteps(model, device);
  const tokens = sequences.flatMap(nextToken);
  const times: number[] = [];
  for (let i = 0; i < WARM_UPS + runs; i++) {
    const started = performance.now();
    withForks(sequences, (forks) => {
      if (!steps.read(forks, tokens)) readTokens(model, forks, forks.map(nextToken));
    });
    times.push(performance.now() - started);
  }
  steps.free();
  return median(times.slice(WARM_UPS));
}

export function measurePrefills(
  device: Device,
  { shape, lengths, batch, runs, kernels, tile = null }: ModelBench,
): PrefillTimes[] {
  return withModel(device, shape, (model, timed) =>
    lengths.map((S) => {
      const cache = new DecodeCache(timed, shape);
      const prompts = benchPrompts(shape, batch, S);
      const read = () => {
        const sequences = prompts.map(() => cache.sequence());
        prefill(model, sequences, prompts, tile, kernels && { kernels });
        for (const sequence of sequences) sequence.free();
      };
      const times = timeRuns(timed, read, runs, PREFILL_KERNELS);
      timed.pool.trim();
      return times;
    }),
  );
}

function withModel<T>(device: Device, shape: ModelShape, body: (model: LanguageModel, timed: TimedDevice) => T): T {
  const timed = new TimedDevice(device, () => 0);
  const model = new LanguageModel(timed, shape, new RandomWeights(timed));
  try {
    return body(model, timed);
  } finally {
    model.free();
  }
}

/** Random values, packed as those of a model that is loaded (`loadModel`). */
class RandomWeights implements StoredParameters {
  readonly #device: Device;
  #stream = 0;

  constructor(device: Device) {
    this.#device = device;
  }

  read(_: string, shape: Shape): Tensor {
    const value = Tensor.empty(this.#device, shape);
    this.#stream += 1;
    fillNormal(value, { seed: 1, stream: this.#stream }, 0.02);
    if (shape.length !== 2) return value;
    const matrix = PackedMatrix.of(value);
    value.free();
    return matrix;
  }

  free(): void {}
}

/** Every run starts at the same length: it decodes in forks of the sequences, which are freed afterwards. */
function withForks(sequences: readonly CachedSequence[], body: (forks: CachedSequence[]) => void): void {
  const forks = sequences.map((sequence) => sequence.fork());
  try {
    body(forks);
  } finally {
    for (const fork of forks) fork.free();
  }
}

function nextToken(_: unknown, row: number): number[] {
  return [row % 7];
}

function timeRuns(
  timed: TimedDevice,
  run: () => void,
  runs: number,
  kernels: Record<Branch, readonly string[]>,
): PrefillTimes {
  for (let i = 0; i < WARM_UPS; i++) run();
  const times: (Record<Branch, number> & { total: number })[] = [];
  for (let i = 0; i < runs; i++) {
    timed.restart();
    const started = performance.now();
    run();
    const total = performance.now() - started;
    const rows = timed.rows(1);
    const branch = (name: Branch) => {
      const own = rows.filter((row) => kernels[name].includes(row.name));
      return own.length === 0 ? Number.NaN : own.reduce((sum, row) => sum + row.ms, 0);
    };
    times.push({ total, cmp: branch('cmp'), sel: branch('sel'), win: branch('win') });
  }
  const middle = (name: Branch | 'total') => median(times.map((time) => time[name]));
  return { ms: middle('total'), branches: { ms_cmp: middle('cmp'), ms_sel: middle('sel'), ms_win: middle('win') } };
}
