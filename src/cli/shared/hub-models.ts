/** Downloads the models of the hub that a command line names, before the command runs. */
import type { Command } from 'commander';
import type { Layer } from '../../config/layer.js';
import { isHubName } from '../../hub/name.js';
import type { PulledModel } from '../../hub/pull.js';
import { plural } from '../../text.js';
import { endLine } from './blocking.js';
import { byteProgress } from './byte-progress.js';
import type { Io } from './io.js';
import { ModelArgument, ModelFlag } from './options.js';

/** Replaces each `hf:owner/name` of a command by the name with the commit, which is in the cache then. */
export async function pullNamedModels(command: Command, io: Io): Promise<void> {
  const pin = async (value: unknown): Promise<unknown> => {
    if (Array.isArray(value)) return await inTurn(value, pin);
    return typeof value === 'string' && isHubName(value) ? (await pullShown(value, io)).name : value;
  };
  for (const option of command.options) {
    if (!(option instanceof ModelFlag)) continue;
    const name = option.attributeName();
    const source = command.getOptionValueSource(name);
    if (source !== undefined) command.setOptionValueWithSource(name, await pin(command.getOptionValue(name)), source);
  }
  for (const [i, argument] of command.registeredArguments.entries())
    if (argument instanceof ModelArgument) command.processedArgs[i] = await pin(command.processedArgs[i]);
}

/** Downloads the model that flags of `train` start from: the config takes its shape from it. */
export async function pullInitialModel(flags: Layer, io: Io): Promise<void> {
  const name = flags.get('train.init_from')?.value;
  if (typeof name === 'string' && isHubName(name)) await pullShown(name, io);
}

async function inTurn<Value, Result>(values: readonly Value[], act: (value: Value) => Promise<Result>) {
  const results: Result[] = [];
  for (const value of values) results.push(await act(value));
  return results;
}

/** `pullModel` with a line of progress, and one that names the commit. Ctrl-C ends it and keeps what has arrived. */
export async function pullShown(name: string, io: Io, timeout?: number): Promise<PulledModel> {
  const { pullModel } = await import('../../hub/pull.js'); // most commands download nothing
  const progress = byteProgress(io);
  const stopped = () => {
    process.stderr.write(endLine('interrupted; what has arrived is kept, and the same command continues'));
  };
  const ends = (['SIGINT', 'SIGTERM'] as const).map((signal) => {
    const end = () => {
      stopped();
      process.removeAllListeners(signal);
      process.kill(process.pid, signal);
    };
    process.on(signal, end);
    return () => process.off(signal, end);
  });
  try {
    const pulled = await pullModel(name, {
      environment: io.env,
      onProgress: progress.show,
      onWarning: io.warn,
      ...(timeout !== undefined && { timeout }),
    });
    const seconds = progress.end();
    io.err(`${pulled.name}: ${describePull(pulled, seconds)}`);
    return pulled;
  } finally {
    progress.end();
    for (const off of ends) off();
  }
}

function describePull({ downloaded, files }: PulledModel, seconds: number): string {
  if (downloaded === 0) return 'in the cache';
  return `${(downloaded / 1e6).toFixed(1)} MB downloaded in ${seconds.toFixed(1)} s (${plural(files, 'file')} in all)`;
}
