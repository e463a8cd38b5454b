/** `trefoil export hf`: a model as a folder that transformers loads. */
import type { Command } from 'commander';
import { openDevice } from '../../device/open.js';
import { exportHf } from '../../exchange/export-hf.js';
import { locateModel, withAdapter } from '../../infer/load.js';
import { byteProgress } from '../shared/byte-progress.js';
import { type Io, printJson } from '../shared/io.js';
import {
  addOptions,
  choice,
  flag,
  jsonOption,
  MODEL_PATH,
  ModelArgument,
  type OptionValues,
  parsed,
  required,
  wholeNumber,
} from '../shared/options.js';

const OPTIONS = {
  out: required('--out <folder>', 'new folder for config.json, weights and tokenizer'),
  merge: flag('--merge <adapter>', "add this LoRA adapter (a folder in PEFT's format) to the weights"),
  dtype: choice('--dtype <name>', 'type of the weights (default: as stored)', ['f32', 'bf16']),
  maxPositions: parsed(
    '--max-positions <n>',
    'max_position_embeddings (default: as imported, else train.seq_len)',
    wholeNumber(1),
  ),
  shardMb: parsed('--shard-mb <n>', 'largest file of weights in MB (default: 5000)', wholeNumber(1)),
  json: jsonOption('{folder, architecture, bytes, files, seconds, companions}'),
};
type Options = OptionValues<typeof OPTIONS>;

export function configure(command: Command, io: Io): void {
  addOptions(command.addArgument(new ModelArgument('<model>', MODEL_PATH)), OPTIONS)
    .addHelpText('after', HELP)
    .action((model: string, options: Options) => run(model, options, io));
}

const HELP = `
Dense models with SwiGLU become LlamaForCausalLM, Qwen2ForCausalLM (bias on
queries, keys and values), Qwen3ForCausalLM (norms of heads) or
MistralForCausalLM. Sparse models become NSAForCausalLM (fla) if nsa.shared_kv
is true, nsa.phi avg, nsa.cmp_rope before, nsa.gate sigmoid, and nsa.l, d and
l_sel are equal; with nsa.init_blocks 0 and nsa.local_blocks 1
LlamaNSAForCausalLM.
What a format cannot express is refused by name. config.json has the rotary
settings in the old and the new style.

Examples:
  trefoil export hf artifacts/run --out exported --dtype bf16
  trefoil export hf SmolLM2-135M --merge artifacts/tuned --out merged
`;

function run(path: string, { out, merge, dtype: wanted, maxPositions, shardMb, json }: Options, io: Io): void {
  const located = locateModel(path);
  // Merged matrices are computed in fp32; the folder keeps the type of the model.
  const isBf16 = merge !== undefined && located.weights.entries.get('embedding')?.dtype === 'BF16';
  const dtype = wanted ?? (isBf16 ? 'bf16' : undefined);
  const { shape, config, weights, endTokens, origin, warnings } =
    merge === undefined ? located : withAdapter(openDevice('cpu'), located, merge);
  try {
    for (const warning of warnings) io.warn(warning);
    const progress = byteProgress(io);
    const { architecture, bytes, files, companions } = exportHf(
      { path, shape, config, weights, endTokens, origin },
      out,
      { dtype, maxPositions, shardBytes: shardMb === undefined ? undefined : shardMb * 1e6, onProgress: progress.show },
    );
    const seconds = progress.end();
    if (json) printJson(io, { folder: out, architecture, bytes, files, seconds, companions });
    else {
      const count = `${files} file${files === 1 ? '' : 's'}`;
      io.out(`${out}: ${architecture}, ${(bytes / 1e6).toFixed(1)} MB in ${count}, ${seconds.toFixed(1)} s`);
      if (!companions.includes('tokenizer.json')) io.warn('the model has no tokenizer.json; none was written');
    }
  } finally {
    weights.close();
  }
}
