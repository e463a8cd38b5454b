/** `trefoil convert`: a dense model as a sparse one. */
import type { Command } from 'commander';
import { FlagSettings } from '../../config/flags.js';
import type { NsaConfig } from '../../config/schema.js';
import { UsageError } from '../../errors.js';
import { convertToSparse, TRAIN_CONFIG } from '../../exchange/convert.js';
import { locateModel } from '../../infer/load.js';
import { byteProgress } from '../shared/byte-progress.js';
import { type Io, printJson } from '../shared/io.js';
import {
  addOptions,
  jsonOption,
  MODEL_PATH,
  ModelArgument,
  type OptionValues,
  parsed,
  repeated,
  required,
  wholeNumber,
} from '../shared/options.js';

const OPTIONS = {
  sparse: required('--sparse', 'make its attention sparse'),
  out: required('--out <folder>', 'new folder for the model'),
  context: parsed(
    '--context <tokens>',
    'raise nsa.n_sel so that this many tokens have the logits of the dense model',
    wholeNumber(1),
  ),
  set: repeated('--set <key=value>', 'set a size of nsa, such as nsa.n_sel=32; may be repeated'),
  json: jsonOption('{folder, parameters, bytes, seconds, exact_tokens, nsa, companions}'),
};
type Options = OptionValues<typeof OPTIONS>;

export function configure(command: Command, io: Io): void {
  addOptions(command.addArgument(new ModelArgument('<model>', `dense model: ${MODEL_PATH}`)), OPTIONS)
    .addHelpText('after', HELP)
    .action((model: string, options: Options) => run(model, options, io));
}

const HELP = `
Keys and values are copied to the three branches (phi avg, cmp_rope before), and
the gate lets only the selected branch through. Up to n_sel * l_sel tokens the
model computes what the dense model computes; beyond, it reads the blocks that
the compressed keys choose, without training. Weights keep their type. Sizes are
those of the model's config, or the defaults; --set changes them.

Training opens the gate and lowers n_sel step by step: ${TRAIN_CONFIG} in the new
folder is a config that continues from it.

Example:
  trefoil convert --sparse models/smollm2 --out models/sparse --context 8192
  trefoil eval loss --model models/smollm2 --compare models/sparse \\
    --by-position --local-path book.txt --seq-len 8192
`;

function run(path: string, { out, context, set = [], json }: Options, io: Io): void {
  const { shape, config, weights, step, endTokens, origin, warnings } = locateModel(path);
  try {
    for (const warning of warnings) io.warn(warning);
    const progress = byteProgress(io);
    const nsa = askedSizes(set, context, config.nsa);
    const { parameters, bytes, exactTokens, companions, ...written } = convertToSparse(
      { path, shape, config, weights, step, endTokens, origin },
      out,
      { nsa, onProgress: progress.show },
    );
    const seconds = progress.end();
    if (json)
      printJson(io, {
        folder: out,
        parameters,
        bytes,
        seconds,
        exact_tokens: exactTokens,
        nsa: written.nsa,
        companions,
      });
    else {
      const { n_sel: count, l_sel: size } = written.nsa;
      io.out(
        `${out}: ${parameters.toLocaleString('en')} parameters, ${(bytes / 1e6).toFixed(1)} MB in ${seconds.toFixed(1)} s; ` +
          `equal to the dense model up to ${exactTokens.toLocaleString('en')} tokens (${count} blocks of ${size})`,
      );
    }
  } finally {
    weights.close();
  }
}

/** The keys of `--set`, and the number of blocks that covers the context. */
function askedSizes(set: readonly string[], context: number | undefined, own: NsaConfig): Partial<NsaConfig> {
  const { layer } = new FlagSettings().set(...set);
  for (const key of layer.keys())
    if (!key.startsWith('nsa.')) throw new UsageError(`--set ${key}: convert sets keys of nsa only`);
  const entries = [...layer].map(([key, { value }]) => [key.slice('nsa.'.length), value]);
  const asked = Object.fromEntries(entries) as Partial<NsaConfig>;
  if (context === undefined) return asked;
  if (asked.n_sel !== undefined) throw new UsageError('--context sets nsa.n_sel; leave out one of the two');
  const size = Number(asked.l_sel ?? own.l_sel);
  return { ...asked, n_sel: Math.max(3, Math.ceil(context / size)) };
}
