/**
 * Decode and prefill of a whole model on a GPU, in bf16. A decode step is timed as greedy generation runs it: the host
 * launches the next step, then reads the tokens of the one before. The branches are timed alone on the device's clock, all layers together: `cmp` the compressed branch
 * and the selection by its scores, `sel` and `win` attention with that branch only.
 */
import type { CudaDevice } from '../device/cuda/cuda.js';
import { UsageError } from '../errors.js';
import { prefill } from '../infer/decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from '../infer/device-decoder.js';
import { DecodeCache } from '../model/cache.js';
import type { DecodeStep } from '../model/decode-step.js';
import { LanguageModel } from '../model/language-model.js';
import { STEP_PARTS } from '../ops/attention/decode/step/step.js';
import {
  type Branch,
  benchPrompts,
  fillCache,
  type ModelBench,
  type PrefillTimes,
  type StepTimes,
} from './decode-setup.js';
import { median, medianTime } from './timing.js';

const WARM_UPS = 3;

export interface AttentionTime {
  readonly S: number;
  readonly batch: number;
  /** The attention of one layer, from the projection to the sum of the branches; median. */
  readonly ms: number;
}

/** Attention alone, for comparison with other libraries' decode kernels. */
export function benchDecodeAttention(
  device: CudaDevice,
  lengths: readonly number[],
  bench: Omit<ModelBench, 'lengths'>,
): AttentionTime[] {
  const { shape, batch, runs } = bench;
  return withSteps(device, { ...bench, lengths }, (_step, S, { prepare }) => {
    const step = prepare();
    const ms = timeGraph(device, () => step.launchAttention(), runs) / shape.nLayers;
    return { S, batch, ms };
  });
}

export function measureSteps(device: CudaDevice, bench: ModelBench): StepTimes[] {
  return withSteps(device, bench, (step, _S, { next, prepare }) => {
    const { shape, runs } = bench;
    const [cmp, sel, win] = step.reads.read();
    for (let i = 0; i < WARM_UPS; i++) next();
    const ms = medianTime(next, runs);
    const prepared = prepare();
    const part = (parts: number) =>
      shape.attention === 'dense'
        ? Number.NaN
        : timeGraph(device, () => prepared.launchAttention(parts), Math.max(runs, 5));
    const { compressed, selection, selected, window } = STEP_PARTS;
    const branches = { ms_cmp: part(compressed | selection), ms_sel: part(selected), ms_win: part(window) };
    return { ms, branches, reads: cmp + sel + win };
  });
}

interface Steps {
  /** Launches a step, one more token of each sequence, and waits for the tokens of the step before. */
  next(): void;
  /** Room for the token after that: launches of attention alone write there. */
  prepare(): DecodeStep;
}

/** Runs `body` for sequences of each length whose last token has just been read. */
function withSteps<T>(
  device: CudaDevice,
  { shape, lengths, batch }: Omit<ModelBench, 'runs'>,
  body: (step: DecodeStep, S: number, steps: Steps) => T,
): T[] {
  const model = new LanguageModel(device, shape, 1, 'bf16');
  try {
    const refusal = deviceDecoderRefusal(model);
    if (refusal) throw new UsageError(`this model is not decoded by the fused step: ${refusal}`);
    return lengths.map((S) => {
      const cache = new DecodeCache(device, shape, 'bf16');
      const sequences = Array.from({ length: batch }, () => cache.sequence());
      const decoder = new DeviceDecoder(model, cache);
      try {
        if (S > 1) fillCache(cache, sequences, S - 1);
        let tokens: (() => Int32Array) | null = null;
        const next = () => {
          decoder.launch(sequences);
          const following = decoder.nextLater();
          tokens?.();
          tokens = following;
        };
        decoder.launch(
          sequences,
          sequences.map((_, row) => row % 7),
        );
        if (!decoder.step) throw new Error('a step was launched and is not there');
        return body(decoder.step, S, { next, prepare: () => decoder.prepare(sequences) });
      } finally {
        decoder.free();
        for (const sequence of sequences) sequence.free();
        device.pool.trim();
      }
    });
  } finally {
    model.free();
  }
}

/** Milliseconds of what `work` launches, recorded and replayed. */
function timeGraph(device: CudaDevice, work: () => void, runs: number): number {
  work(); // compiles
  const graph = device.record(work);
  try {
    for (let i = 0; i < WARM_UPS; i++) graph.replay();
    return median(device.time(() => graph.replay(), runs));
  } finally {
    graph.free();
  }
}

/** Kernels of a prefill by the branch they belong to. */
function branchOf(kernel: string): Branch | null {
  if (kernel.startsWith('selected_')) return 'sel';
  if (kernel.startsWith('compressed_') || kernel.startsWith('select_')) return 'cmp';
  return kernel.startsWith('window_') ? 'win' : null;
}

export function measurePrefills(
  device: CudaDevice,
  { shape, lengths, batch, runs, kernels, tile = null }: ModelBench,
): PrefillTimes[] {
  const model = new LanguageModel(device, shape, 1, 'bf16');
  try {
    return lengths.map((S) => {
      const cache = new DecodeCache(device, shape, 'bf16');
      const prompts = benchPrompts(shape, batch, S);
      const read = () => {
        const sequences = prompts.map(() => cache.sequence());
        prefill(model, sequences, prompts, tile, kernels && { kernels });
        for (const sequence of sequences) sequence.free();
      };
      read();
      const ms = medianTime(read, runs);
      const total: Record<Branch, number> = { cmp: 0, sel: 0, win: 0 };
      for (const [name, { ms }] of device.profile(read)) {
        const branch = branchOf(name);
        if (branch) total[branch] += ms;
      }
      device.pool.trim();
      return { ms, branches: { ms_cmp: total.cmp, ms_sel: total.sel, ms_win: total.win } };
    });
  } finally {
    model.free();
  }
}
