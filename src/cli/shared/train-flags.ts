/** The command line of `train`, which `start` and `launch` take too. */
import { Command, Option } from 'commander';
import { FlagSettings, trainFlagGroups, trainFlagRow } from '../../config/flags.js';
import type { Layer } from '../../config/layer.js';
import type { Config } from '../../config/schema.js';

export interface TrainCommandLine {
  /** The keys that flags set. */
  readonly layer: Layer;
  readonly config: string | null;
  readonly resume: string | null;
  readonly save: string | null;
  readonly printConfig: boolean;
  /** Whether to start the dashboard beside the training. */
  readonly dashboard: boolean;
  readonly json: boolean;
}

interface Given {
  config?: string;
  resume?: string;
  resumeFrom?: string;
  save?: string;
  printConfig?: boolean;
  dashboard?: boolean;
  json?: boolean;
}

/**
 * Declares the flags on a command, by the headings of its help. Returns what reads them after the words are parsed. The help
 * shows the defaults of the keys, or the values of `config`.
 */
export function addTrainFlags(command: Command, config: Config | null = null): () => TrainCommandLine {
  const settings = new FlagSettings();
  for (const [title, flags] of Object.entries(trainFlagGroups))
    for (const flag of flags) {
      const [text, meaning] = trainFlagRow(flag, config);
      command.addOption(new Option(text, meaning).helpGroup(`${title}:`));
      command.on(`option:${flag.name}`, (value: string | null) => void settings.add(flag.name, value));
    }
  command.addHelpOption(new Option('-h, --help', 'print this help').helpGroup('Output:'));
  return () => {
    const { config, resume, resumeFrom, save, printConfig, dashboard, json } = command.opts<Given>();
    return {
      layer: settings.layer,
      config: config ?? null,
      resume: resume ?? resumeFrom ?? null,
      save: save ?? null,
      printConfig: printConfig ?? false,
      dashboard: dashboard ?? false,
      json: json ?? false,
    };
  };
}

/** Reads the words after `train`. */
export function parseTrainFlags(words: readonly string[]): TrainCommandLine {
  const command = new Command('train').exitOverride().configureOutput({ writeOut: () => {}, outputError: () => {} });
  const read = addTrainFlags(command);
  command.parse(words, { from: 'user' });
  return read();
}
