/**
 * Invariant 3 on the decode cache: a prefill followed by single tokens gives the logits of one prefill of all tokens.
 */
import type { Device } from '../device/device.js';
import { lastLogits, prefill, readTokens } from '../infer/decode.js';
import { DeviceDecoder, deviceDecoderRefusal } from '../infer/device-decoder.js';
import { DecodeCache } from '../model/cache.js';
import { LanguageModel } from '../model/language-model.js';
import type { ComputeDtype, ModelShape } from '../model/shape.js';
import { check, type Finding, TOLERANCE, type VerifyCheck, Worst } from './check.js';
import { tinyShape } from './module.js';
import { relativeError } from './numbers.js';

/** Across the edges of blocks, windows and pages. */
const LENGTH = 70;
const GRAPH_LENGTH = 150;
/** Looser than for the core: logits pass through two layers and the head. */
const LAYERS = 5;
const BF16_LIMIT = 3e-2;
/** Small models: compiling the fused kernels for a prefill would dominate the run time. */
const PLAIN = { fusedFrom: Number.POSITIVE_INFINITY };

const MODELS: Readonly<Record<string, ModelShape>> = {
  'phi avg': tinyShape({}),
  'phi conv, rope before': tinyShape({ phi: 'conv', cmpRope: 'before' }),
  'phi mlp, gate sigmoid': tinyShape({ phi: 'mlp', gate: 'sigmoid' }),
  'positions in the window alone': tinyShape({ rope: 'window', cmpRope: 'none' }),
  dense: tinyShape({}, { attention: 'dense' }),
};

/** Shapes of the fused step. Every block is selected: in bf16 a near tie may go either way. */
const HEADS: Partial<ModelShape> = { dim: 64, nHeads: 12, nKvGroups: 2, dK: 32, dV: 32 };
const GRAPHS: Readonly<Record<string, ModelShape>> = {
  'phi avg': tinyShape({ lSel: 32, nSel: 8 }, HEADS),
  'phi conv, rope before': tinyShape({ lSel: 32, nSel: 8, phi: 'conv', cmpRope: 'before' }, HEADS),
  dense: tinyShape({}, { ...HEADS, attention: 'dense' }),
};

export function decodeChecks(device: Device): VerifyCheck[] {
  const isCpu = device.kind === 'cpu';
  const cached = Object.entries(MODELS).map(([name, shape]) =>
    check(
      '3 prefix',
      `decode after a prefill of t tokens equals a prefill, each t: ${name}`,
      isCpu ? 0 : LAYERS * TOLERANCE,
      () => withModel(device, shape, 'f32', everySplit),
    ),
  );
  if (isCpu) return cached;
  const graphs = Object.entries(GRAPHS).map(([name, shape]) =>
    check('3 prefix', `decode by a graph equals a prefill, bf16: ${name}`, BF16_LIMIT, () =>
      withModel(device, shape, 'bf16', byGraph),
    ),
  );
  return [...cached, ...graphs];
}

function withModel(
  device: Device,
  shape: ModelShape,
  dtype: ComputeDtype,
  check: (model: LanguageModel) => Finding,
): Finding {
  const model = new LanguageModel(device, shape, 51, dtype);
  try {
    for (const { name, value } of model.parameters)
      if (!name.includes('norm')) value.write(value.read().map((weight) => 5 * weight));
    return check(model);
  } finally {
    model.free();
  }
}

function tokensOf({ shape }: LanguageModel, length: number): number[] {
  return Array.from({ length }, (_, i) => (i * i * 7 + i * 31 + 5) % shape.vocabSize);
}

function everySplit(model: LanguageModel): Finding {
  const tokens = tokensOf(model, LENGTH);
  const whole = tokens.map((_, i) => lastLogits(model, tokens.slice(0, i + 1), PLAIN));
  const worst = new Worst();
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  for (let split = 1; split < LENGTH; split++) {
    const sequence = cache.sequence();
    const add = ([logits]: Float32Array[], count: number) =>
      worst.add(relativeError(logits, whole[count - 1]), `split ${split}: other logits after ${count} tokens`);
    add(prefill(model, [sequence], [tokens.slice(0, split)], null, { kernels: PLAIN }), split);
    // A few single tokens, then the rest in tiles: both continue from the same cache.
    const steps = Math.min(LENGTH, split + 4);
    for (let at = split; at < steps; at++)
      add(readTokens(model, [sequence], [[tokens[at]]], { kernels: PLAIN }), at + 1);
    if (steps < LENGTH) add(prefill(model, [sequence], [tokens.slice(steps)], 9, { kernels: PLAIN }), LENGTH);
    sequence.free();
  }
  return worst.finding;
}

function byGraph(model: LanguageModel): Finding {
  const refusal = deviceDecoderRefusal(model);
  if (refusal) return { skipped: refusal };
  const tokens = tokensOf(model, GRAPH_LENGTH);
  const worst = new Worst();
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  for (const split of [1, 31, 64, 100]) {
    const sequence = cache.sequence();
    const decoder = new DeviceDecoder(model, cache);
    prefill(model, [sequence], [tokens.slice(0, split)], null, { kernels: PLAIN });
    for (let at = split; at < GRAPH_LENGTH; at++) {
      decoder.launch([sequence], [tokens[at]]);
      if (at > split + 2 && at % 13 !== 0 && at !== GRAPH_LENGTH - 1) continue;
      const expected = lastLogits(model, tokens.slice(0, at + 1), PLAIN);
      worst.add(relativeError(decoder.logits()[0], expected), `split ${split}: other logits after ${at + 1} tokens`);
    }
    decoder.free();
    sequence.free();
  }
  return worst.finding;
}
