/** `trefoil pull`: downloads a model of the hub. */
import type { Command } from 'commander';
import { pullShown } from './shared/hub-models.js';
import { type Io, printJson } from './shared/io.js';
import { addOptions, jsonOption, numberFrom, type OptionValues, parsed } from './shared/options.js';

const OPTIONS = {
  timeout: parsed('--timeout <s>', 'seconds without a byte after which the hub is given up', numberFrom(1), 60),
  json: jsonOption('{name, commit, folder, files, downloaded_bytes}'),
};
type Options = OptionValues<typeof OPTIONS>;

export function configure(command: Command, io: Io): void {
  addOptions(command.argument('<name>', 'hf:owner/name or hf:owner/name@revision'), OPTIONS)
    .addHelpText('after', HELP)
    .action((name: string, options: Options) => run(name, options, io));
}

const HELP = `
Downloads the config, the weights in safetensors and the tokenizer into the
hub's own cache ($HF_HUB_CACHE, else $HF_HOME/hub, else
~/.cache/huggingface/hub), which Python programs use too. What is there already
is not downloaded again; an interrupted download continues. Every --model takes
such a name directly and downloads what is missing.

HF_ENDPOINT names another hub, HF_TOKEN is sent to that host only, and with
HF_HUB_OFFLINE=1 nothing is asked or downloaded.

Example:
  trefoil pull hf:HuggingFaceTB/SmolLM2-135M-Instruct
  trefoil chat --model hf:HuggingFaceTB/SmolLM2-135M-Instruct
`;

async function run(name: string, { timeout, json }: Options, io: Io): Promise<void> {
  const { name: pinned, commit, folder, files, downloaded } = await pullShown(name, io, timeout);
  if (json) printJson(io, { name: pinned, commit, folder, files, downloaded_bytes: downloaded });
  else io.out(folder);
}
