/** `trefoil import hf`: a folder of Hugging Face transformers as a model of this program. */
import type { Command } from 'commander';
import { importHf } from '../../exchange/import-hf.js';
import { byteProgress } from '../shared/byte-progress.js';
import { type Io, printJson } from '../shared/io.js';
import { addOptions, jsonOption, ModelArgument, type OptionValues, required } from '../shared/options.js';

const FOLDER = 'hf:owner/name, or a folder with config.json, *.safetensors and, for text, tokenizer.json';
const OPTIONS = {
  out: required('--out <folder>', 'new folder for the model'),
  json: jsonOption('{folder, architecture, parameters, bytes, seconds, companions}'),
};
type Options = OptionValues<typeof OPTIONS>;

export function configure(command: Command, io: Io): void {
  addOptions(command.addArgument(new ModelArgument('<folder>', FOLDER)), OPTIONS)
    .addHelpText('after', HELP)
    .action((folder: string, options: Options) => run(folder, options, io));
}

const HELP = `
Supported: LlamaForCausalLM (Llama 2 and 3, SmolLM2), MistralForCausalLM,
Qwen2ForCausalLM and Qwen3ForCausalLM; with sparse attention NSAForCausalLM
(fla) and LlamaNSAForCausalLM. Weights are F32, BF16 or F16, in one file or in
shards, and keep their type; files of the tokenizer are copied. Every --model
also takes such a folder directly.

Example:
  trefoil import hf ~/models/SmolLM2-135M --out models/smollm2
`;

function run(folder: string, { out, json }: Options, io: Io): void {
  const progress = byteProgress(io);
  const { architecture, parameters, bytes, companions } = importHf(folder, out, progress.show);
  const seconds = progress.end();
  if (json) printJson(io, { folder: out, architecture, parameters, bytes, seconds, companions });
  else {
    io.out(
      `${out}: ${architecture}, ${parameters.toLocaleString('en')} parameters, ${(bytes / 1e6).toFixed(1)} MB ` +
        `in ${seconds.toFixed(1)} s`,
    );
    if (!companions.includes('tokenizer.json'))
      io.warn(`${folder} has no tokenizer.json: the model reads token ids only`);
  }
}
