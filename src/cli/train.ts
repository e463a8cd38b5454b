/** `trefoil train`: trains a model from a config. */
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import type { Command } from 'commander';
import { measureDevicePeak } from '../bench/peak/device.js';
import { readTimeoutMinutes, TRAINING_IGNORES, unreadVariables } from '../config/legacy/environment.js';
import { loadConfig, pickConfigByGpuMemory, type ResolvedConfig } from '../config/load.js';
import { type ConfigRow, configRows } from '../config/print.js';
import type { Config } from '../config/schema.js';
import { cudaAbsence, gpuMemoryBytes } from '../device/cuda/cuda.js';
import { chooseGpu } from '../device/cuda/gpu-choice.js';
import { NcclError } from '../device/cuda/nccl-library.js';
import type { Environment } from '../environment.js';
import { ExitCode, TrefoilError, UsageError } from '../errors.js';
import { modelLayer, resumedLayer } from '../infer/model-layer.js';
import { readRun } from '../run/reader.js';
import { shellQuote, wrapText } from '../text.js';
import { EXIT_CODES, type TrainResult } from '../train/options.js';
import { describeIdentity, type RankIdentity, resolveRank } from '../train/ranks/identity.js';
import { openWorld, threadsOfRank, type World } from '../train/ranks/world.js';
import type { SignalSource } from '../train/signals.js';
import { train } from '../train/train.js';
import { adviceFor } from '../watch/advice.js';
import { wallAges } from '../watch/ages.js';
import { runState, stateText } from '../watch/state.js';
import { withDashboard } from './shared/dashboard-process.js';
import { compileColdKernels, type DeviceOptions, explainAuto, openDevice } from './shared/device.js';
import { pullInitialModel } from './shared/hub-models.js';
import { type Io, isPipe } from './shared/io.js';
import { fitFields, formatTable, wrapped } from './shared/table.js';
import { addTrainFlags, type TrainCommandLine } from './shared/train-flags.js';

const DESCRIPTION = `Trains a model and writes logs, checkpoints and the final model into --out-dir.
Without --config, the variable CONFIG names it; without both, the memory of the
GPU decides, and without a GPU it is quickstart.
Flags override the environment, which overrides the config; --print-config shows
the result.`;

const HELP = `
Defaults apply where the config does not set the key; shipped configs set many.
Ctrl-C, SIGTERM, a closed terminal or a file .HALT in the run folder stop the
run after its step and a checkpoint; --resume auto continues it. Where neither
stdout nor stderr is a terminal (nohup), SIGHUP is ignored.

Examples:
  trefoil train --config text_cpu --local-path texts --out-dir artifacts/mine
  trefoil train --config 125m_80g --tokenizer gpt2 --lr 3e-4 --steps 2000
  trefoil train --config artifacts/mine/config.yaml --resume auto --steps 5000
  trefoil train --config base --set model.n_layers=6 --print-config
  trefoil train --config lora --from model/ --local-path chats.jsonl

Exit codes: 0 done, 1 failed, 2 bad usage or config, 3 halted by .HALT,
4 stopped by a signal after a checkpoint, 5 non-finite loss, 6 no data.
More: docs/reference/training.md`;

export function configure(command: Command, io: Io): void {
  const read = addTrainFlags(command.description(DESCRIPTION).addHelpText('after', HELP));
  command.action(async () => {
    io.exitCode = await run(read(), io);
  });
}

async function run(line: TrainCommandLine, io: Io): Promise<number> {
  if (line.resume === null) await pullInitialModel(line.layer, io);
  const resolved = loadConfig({
    env: io.env,
    flags: line.layer,
    config: line.config,
    otherwise: pickConfigByGpuMemory(gpuMemoryGib(line.layer.get('runtime.device')?.value)),
    modelLayer: line.resume === null ? modelLayer : resumedLayer,
  });
  const isAlone = resolved.config.train.ddp === 0;
  if (isAlone && !line.printConfig) expectOneProcess(io);
  const identity = isAlone || line.printConfig ? null : several(resolveRank(io.env));
  const isFirst = identity === null || identity.rank === 0;
  if (isFirst) for (const warning of resolved.warnings) io.warn(warning);
  if (line.printConfig) {
    printConfig(resolved, line.json, io);
    return 0;
  }
  const say = isFirst ? (line.json ? io.err : io.out) : () => {};
  say(`config: ${resolved.file ?? 'defaults'}`);
  for (const guess of resolved.guesses) say(guess);
  // No warning: runbooks export such variables for every command, and look for warnings in the log.
  for (const line of unreadVariables(io.env, 'a training', TRAINING_IGNORES)) say(line);
  const request = { resume: line.resume, save: line.save, say, identity };
  const { out_dir: outDir } = resolved.config.train;
  const result = await withDashboard(line.dashboard && isFirst, outDir, say, io, () =>
    runTraining(resolved.config, request, io, (done) => {
      if (line.json && isFirst) io.out(JSON.stringify(resultJson(done)));
    }),
  );
  if (result.status === 'done' && writesText(resolved.config)) {
    const command = resolved.config.data.source === 'chat' ? 'chat' : 'generate';
    const { lora, init_from: base } = resolved.config.train;
    const model = lora !== null && base !== null ? `${shellQuote(base)} --adapter ` : '';
    say(`use it: npx trefoil ${command} --model ${model}${shellQuote(result.outDir)}`);
  }
  return EXIT_CODES[result.status];
}

/** Models of synthetic tokens and needles have no text to write. */
function writesText({ data }: Config): boolean {
  return data.source !== 'synthetic' && data.source !== 'needle';
}

/** Every value of a config and its origin (`--print-config`). */
export function printConfig(resolved: ResolvedConfig, json: boolean, io: Io): void {
  const rows = configRows(resolved);
  io.out(json ? JSON.stringify(rows) : configTable(rows, io.width));
}

function configTable(rows: readonly ConfigRow[], width: number): string {
  return formatTable(
    ['key', wrapped('value'), wrapped('origin')],
    rows.map(({ key, value, origin }) => [key, typeof value === 'string' ? value : JSON.stringify(value), origin]),
    width,
  ).trimEnd();
}

function resultJson({ status, step, outDir, firstLoss, lastLoss, valLoss }: TrainResult) {
  return { status, step, out_dir: outDir, first_loss: firstLoss, last_loss: lastLoss, val_loss: valLoss };
}

/** Memory of the GPU that a run would use, in GiB; null if it would not use one. */
export function gpuMemoryGib(device: unknown): number | null {
  return device === 'cpu' || cudaAbsence() !== null ? null : gpuMemoryBytes() / 2 ** 30;
}

/** `--ddp 0` as one of several ranks would start as many trainings in one folder. Incomplete variables are ignored. */
function expectOneProcess({ env }: Io): void {
  const identity = tryRank(env);
  if (identity === null || identity.world === 1 || (identity.world === null && identity.rank === 0)) return;
  throw new UsageError(
    `train.ddp: 0 trains on one rank, but this is one of several (${describeIdentity(identity)}); leave out one of the two`,
  );
}

function tryRank(env: Environment): RankIdentity | null {
  try {
    return resolveRank(env);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return null;
  }
}

/** Null if there is only one rank. */
function several(identity: RankIdentity): RankIdentity | null {
  return identity.launcher === 'single' || identity.world === 1 ? null : identity;
}

export interface RunRequest {
  readonly resume: string | null;
  readonly save: string | null;
  readonly say: (line: string) => void;
  /** Identity among several ranks; null (default) for one process. */
  readonly identity?: RankIdentity | null;
}

/**
 * Opens the device, joins the other ranks, measures the peak and trains; shared with `start`. Calls `report` before the ranks
 * separate, because a launcher may kill this process afterwards.
 */
export async function runTraining(
  config: Config,
  { resume, save, say: print, identity = null }: RunRequest,
  io: Io,
  report: (result: TrainResult) => void = () => {},
): Promise<TrainResult> {
  io.isLog = true;
  // Log files get the whole step line, which scripts parse; a terminal gets what fits.
  const say = (line: string) => print(io.stdout.isTTY ? fitLine(line, io.width) : line);
  // Several ranks compile as they go: each waits for the others only when they exchange something.
  if (identity === null) await compileColdKernels(config, io.env);
  const device = openDevice({ ...ownShare(identity, io), ...deviceOptions(config) });
  const timeoutSeconds = 60 * readTimeoutMinutes(io.env);
  const world = identity && (await openWorld(identity, device, { timeoutSeconds }));
  const work = async () => {
    if (config.runtime.device === 'auto') say(explainAuto(device));
    const peakFlops = measureDevicePeak(device);
    say(`device: ${device.name}, peak ${(peakFlops / 1e9).toFixed(0)} GFLOP/s measured (mfu refers to it)`);
    if (resume !== null && !(identity && identity.rank > 0)) sayFormerEnd(config.train.out_dir, say);
    const result = await train({
      config,
      device,
      world,
      resume,
      save,
      say,
      peakFlops,
      warn: io.warn,
      ...(!(print === io.out && isPipe(io.stdout)) && { terminal: io.stderr }),
      signals: io.stdout.isTTY || io.stderr.isTTY ? process : withoutHangup(io),
    });
    if (result.status === 'done') say(`done: ${result.outDir}`);
    else if (result.status === 'non-finite') print(adviceFor({ name: 'halted' }, readRun(result.outDir)));
    else {
      const launch = world ? `launch -n ${world.size} -- ` : '';
      print(
        `continue with: npx trefoil ${launch}train --config ${shellQuote(join(result.outDir, 'config.yaml'))} --resume auto`,
      );
    }
    report(result);
    return result;
  };
  return world ? await asRank(world, io, work) : await work();
}

/** Before a run is resumed: how it ended, unless that was as planned. */
function sayFormerEnd(outDir: string, say: (line: string) => void): void {
  if (!existsSync(outDir)) return;
  const state = runState(readRun(outDir), wallAges());
  if (state.kind === 'gone' || (state.kind === 'ended' && state.name !== 'done')) say(`before: ${stateText(state)}`);
}

/** A line that fits a terminal: a step line loses fields, others are wrapped between words. */
function fitLine(line: string, width: number): string {
  const fitted = fitFields(line, width);
  if (fitted.length <= width || fitted.includes('\n')) return fitted;
  return wrapText(fitted, width - 2).join('\n  ');
}

/**
 * Signals of a run whose output is not on a terminal. Node resets the ignored SIGHUP of nohup at its start, so a run
 * that has nothing to do with the terminal must ignore the end of it here.
 */
function withoutHangup(io: Io): SignalSource {
  const hangup = () => io.warn('SIGHUP: ignored, because the output is not a terminal; stop the run with trefoil halt');
  return {
    on: (name, handler) => process.on(name, name === 'SIGHUP' ? hangup : handler),
    off: (name, handler) => process.off(name, name === 'SIGHUP' ? hangup : handler),
  };
}

/** Ends all ranks on an error of one: the others would wait forever. */
async function asRank<Result>(world: World, io: Io, work: () => Promise<Result>): Promise<Result> {
  try {
    const result = await work();
    world.close();
    return result;
  } catch (error) {
    const isExpected = error instanceof TrefoilError;
    const lost = error instanceof NcclError ? await world.describeLost() : '';
    const told = isExpected ? error.message : `internal error: ${(error as Error).stack}`;
    io.err(`trefoil: rank ${world.rank}: ${lost && `${lost}: `}${told}`);
    world.abort(isExpected ? error.exitCode : ExitCode.failed);
    throw error;
  }
}

/** The share of cores and GPUs of this rank; runtime.threads of the config overrides it. */
function ownShare(identity: RankIdentity | null, { env }: Io): Pick<DeviceOptions, 'threads' | 'gpu'> {
  if (!identity) return {};
  return { threads: threadsOfRank(identity), gpu: (count) => chooseGpu(identity.localRank, count, env) };
}

export function deviceOptions({ runtime }: Config): DeviceOptions {
  const { device, threads, deterministic } = runtime;
  return { device, deterministic, ...(threads !== null && { threads }) };
}
