/**
 * The same bits however the kernels are compiled. Compilers may fuse a product and a sum, and choose where by their
 * version, the processor they tune for and the loop around: left to them, one token would come out of a prefill and of a
 * decoding step with other last bits on some machines only. So a small model is trained and read with kernels compiled as
 * other machines would compile them.
 */
import { readFileSync } from 'node:fs';
import { setImmediate } from 'node:timers/promises';
import { beforeAll, describe, expect, it, type TestContext } from 'vitest';
import { defaultCompilerOptions, findCompiler } from '../src/device/cpu/compile.js';
import { CpuDevice } from '../src/device/cpu/cpu.js';
import { UsageError } from '../src/errors.js';
import { lastLogits, prefill, readTokens } from '../src/infer/decode.js';
import { tinyConfig, tinyModel } from '../src/infer/testing/tiny-model.js';
import { DecodeCache } from '../src/model/cache.js';
import type { LanguageModel } from '../src/model/language-model.js';
import { AdamW } from '../src/ops/adamw/op.js';
import { cpu } from '../src/testing/devices.js';
import { BatchUploader } from '../src/train/device-batch.js';
import { HostStepper, localContext } from '../src/train/step.js';

const options = defaultCompilerOptions(process.env);
const { version } = findCompiler(options.candidates);

/** -O2 is another optimizer than -O3, and compiles faster. */
const OTHER = ['-O2'];
/**
 * The behaviour of g++ for processors whose fused chains it believes to be slow (Zen): two instructions in some loops.
 */
const SPLIT_CHAINS = /clang/i.test(version) ? [] : ['--param=avoid-fma-max-bits=512'];

const config = tinyConfig({
  model: { dim: 32, d_k: 8, d_v: 8, mlp: 'swiglu' },
  nsa: { phi: 'conv', n_sel: 5, w: 12 },
});
const tokens = Array.from({ length: 60 }, (_, i) => (i * i * 7 + i * 91 + 1) % 256);

/** Losses, norms and all weights of a few steps on sequences of different lengths. */
function train(model: LanguageModel): { steps: number[][]; weights: Float32Array[] } {
  const { device, parameters } = model;
  const trained = parameters.map((parameter) => ({ parameter, weightDecay: 0.1 }));
  const optimizer = new AdamW(device, trained);
  const uploader = new BatchUploader(device, config.nsa);
  const stepper = new HostStepper(localContext({ model, config, optimizer, uploader }));
  const batch = {
    inputs: Int32Array.from(tokens),
    targets: Int32Array.from(tokens.map((token) => (token * 3) % 256)),
    targetCount: tokens.length,
    sampleIds: [0],
    epoch: 0,
    cuSeqlens: Int32Array.of(0, 13, 60),
  };
  const steps = Array.from({ length: 3 }, () => {
    stepper.launch({ batches: [batch], learningRate: 1e-3 });
    const { loss, norm, norms } = stepper.read();
    stepper.update();
    return [loss, norm, ...norms];
  });
  uploader.free();
  optimizer.free();
  return { steps, weights: parameters.map(({ value }) => value.read() as Float32Array) };
}

/** Logits after the tokens from `split` on: a prefill of those before it, then one token after the other. */
function decoded(model: LanguageModel, split: number): Float32Array[] {
  const cache = new DecodeCache(model.device, model.shape, model.dtype);
  const sequence = cache.sequence();
  const logits = prefill(model, [sequence], [tokens.slice(0, split)]);
  for (const token of tokens.slice(split)) logits.push(...readTokens(model, [sequence], [[token]]));
  sequence.free();
  return logits;
}

/** Everything that is compared, after the check that holds on every machine by itself. */
async function results(device: CpuDevice) {
  const model = tinyModel(config, 256, 5, { device });
  const whole = tokens.map((_, i) => lastLogits(model, tokens.slice(0, i + 1)));
  await setImmediate(); // compiling blocks; let the runner speak
  for (const split of [1, 2, 30]) {
    expect(decoded(model, split), `split ${split}`).toEqual(whole.slice(split - 1));
    await setImmediate();
  }
  const trained = train(model);
  model.free();
  return { whole, ...trained };
}

function skipped(context: TestContext, reason: string): never {
  console.warn(`skipped: ${reason}`);
  return context.skip(reason);
}

const compiledWith = (flags: string[], candidates = options.candidates) =>
  new CpuDevice({ compiler: { ...options, candidates, flags } });

describe('a small model', () => {
  let usual: Awaited<ReturnType<typeof results>>;
  beforeAll(async () => {
    usual = await results(cpu());
  });

  it('gives the same bits when the compiler optimizes otherwise', async () => {
    expect(await results(compiledWith([...OTHER, ...SPLIT_CHAINS]))).toEqual(usual);
  });

  it('gives the same bits with another compiler', async (context) => {
    if (!process.env['TREFOIL_LONG']) skipped(context, 'compiles all kernels again: TREFOIL_LONG=1');
    const other = /clang/i.test(version) ? 'g++' : 'clang++';
    try {
      findCompiler([other]);
    } catch (error) {
      if (!(error instanceof UsageError)) throw error;
      skipped(context, `${other} is not installed`);
    }
    expect(await results(compiledWith(OTHER, [other]))).toEqual(usual);
  });

  it('gives the same bits with narrower vectors, without a fused product its own', async (context) => {
    if (!process.env['TREFOIL_LONG']) skipped(context, 'compiles all kernels again: TREFOIL_LONG=1');
    if (process.arch !== 'x64') skipped(context, `${process.arch} has vectors of one width`);
    const { platform } = process;
    if (platform !== 'linux') skipped(context, `what this processor can is not known on ${platform}`);
    const flags = readFileSync('/proc/cpuinfo', 'utf8');
    const fused = /\bavx2\b/.test(flags) && /\bfma\b/.test(flags);
    const narrow = await results(
      compiledWith([...OTHER, ...SPLIT_CHAINS, fused ? '-march=x86-64-v3' : '-march=x86-64']),
    );
    if (fused) expect(narrow).toEqual(usual);
  });

  it('gives the same bits with sixteen threads', async () => {
    cpu().threads = 16;
    expect(await results(cpu())).toEqual(usual);
  });
});
