/** `trefoil train`: train from a config. Parses, calls, prints. */
import { measureDevicePeak } from '../bench/peak/device.js';
import { parseTrainFlags, trainFlagHelp } from '../config/flags.js';
import { loadConfig } from '../config/load.js';
import { pickConfigByGpuMemory } from '../config/pick.js';
import { configRows, configTable } from '../config/print.js';
import type { Config } from '../config/schema.js';
import { EXIT_CODES, type TrainResult, train } from '../train/train.js';
import { type DeviceOptions, explainAuto, openDevice } from './device.js';
import type { Io } from './io.js';

/** Takes the words after `train`; returns the exit code. */
export async function run(argv: readonly string[], io: Io): Promise<number> {
  const line = parseTrainFlags(argv);
  if (line.help) {
    io.out(trainFlagHelp());
    return 0;
  }
  const resolved = loadConfig({
    env: io.env,
    flags: line.layer,
    config: line.config,
    otherwise: pickConfigByGpuMemory(null),
  });
  for (const warning of resolved.warnings) io.err(`warning: ${warning}`);
  if (line.printConfig) {
    io.out(line.json ? JSON.stringify(configRows(resolved)) : configTable(resolved));
    return 0;
  }
  const say = line.json ? io.err : io.out;
  say(`config: ${resolved.file ?? 'defaults'}`);
  const result = await runTraining(resolved.config, { resume: line.resume, save: line.save, say }, io);
  if (line.json) io.out(JSON.stringify(result));
  return EXIT_CODES[result.status];
}

export interface RunRequest {
  readonly resume: string | null;
  readonly save: string | null;
  readonly say: (line: string) => void;
}

/** Opens the device, measures its peak and trains; shared with `start`. */
export async function runTraining(config: Config, { resume, save, say }: RunRequest, io: Io): Promise<TrainResult> {
  const device = openDevice(deviceOptions(config));
  if (config.runtime.device === 'auto') say(explainAuto(device));
  const peakFlops = measureDevicePeak(device);
  say(`device: ${device.name}, peak ${(peakFlops / 1e9).toFixed(0)} GFLOP/s measured (mfu refers to it)`);
  const result = await train({
    ...{ config, device, resume, save, say, peakFlops },
    warn: (text) => io.err(`warning: ${text}`),
    terminal: io.stderr,
  });
  if (result.status === 'done') say(`done: ${result.outDir}`);
  else say(`go on with: trefoil train --config ${result.outDir}/config.yaml --resume auto`);
  return result;
}

export function deviceOptions({ runtime }: Config): DeviceOptions {
  const { device, threads, deterministic } = runtime;
  return { device, deterministic, ...(threads !== null && { threads }) };
}
