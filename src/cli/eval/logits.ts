/** `trefoil eval logits`: the logits of given tokens, for comparisons with other programs. */
import { UsageError } from '../../errors.js';
import { sequenceLogits } from '../../evaluate/logits.js';
import { loadModel } from '../../infer/load.js';
import type { LanguageModel } from '../../model/language-model.js';
import { readSafetensors, writeSafetensors } from '../../run/safetensors.js';
import { toFloat64 } from '../../run/safetensors-format.js';
import { deviceOption, openDevice } from '../shared/device.js';
import { type Io, ProgressLine } from '../shared/io.js';
import {
  adapterOption,
  choice,
  configured,
  modelOption,
  type OptionValues,
  required,
  threadsOption,
  weightsOption,
} from '../shared/options.js';

const OPTIONS = {
  model: modelOption(),
  adapter: adapterOption(),
  in: required('--in <file>', 'safetensors with input_ids, I32 or I64, [S] or [B, S]'),
  out: required('--out <file>', 'safetensors to write: logits F32 [S, vocab] or [B, S, vocab]'),
  precision: choice('--precision <name>', 'type of activations; bf16 needs CUDA', ['fp32', 'bf16'], 'fp32'),
  device: deviceOption('where to compute'),
  weights: weightsOption(),
  threads: threadsOption(),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Positions start at 0 in every row. Nothing is padded or masked but by causality.
The model needs no tokenizer.

Example:
  trefoil eval logits --model llama --in ids.safetensors --out out.safetensors
`;

export const configure = configured(OPTIONS, run, HELP);

function run(options: Options, io: Io): void {
  const { shape, rows } = readIds(options.in);
  const loaded = loadModel(openDevice(options), options.model, options.precision === 'bf16' ? 'bf16' : 'f32', options);
  try {
    for (const warning of loaded.warnings) io.warn(warning);
    const line = new ProgressLine(io);
    const vocabulary = loaded.model.shape.vocabSize;
    const data = () => allLogits(loaded.model, rows, (done) => line.show(`${done} of ${rows.length} sequences`));
    const { bytes } = writeSafetensors(options.out, [
      { name: 'logits', dtype: 'F32', shape: [...shape, vocabulary], data },
    ]);
    line.clear();
    io.out(`${options.out}: logits [${[...shape, vocabulary].join(', ')}], ${bytes} bytes`);
  } finally {
    loaded.free();
  }
}

function* allLogits(
  model: LanguageModel,
  rows: readonly Float64Array[],
  onRow: (done: number) => void,
): Generator<Uint8Array> {
  for (const [i, row] of rows.entries()) {
    for (const chunk of sequenceLogits(model, row))
      yield new Uint8Array(chunk.buffer, chunk.byteOffset, chunk.byteLength);
    onRow(i + 1);
  }
}

function readIds(path: string): { shape: number[]; rows: Float64Array[] } {
  const ids = readSafetensors(path).tensors.get('input_ids');
  if (!ids) throw new UsageError(`${path}: has no tensor input_ids; write the tokens as I32 or I64 under this name`);
  const { dtype, shape } = ids;
  if ((dtype !== 'I32' && dtype !== 'I64') || shape.length < 1 || shape.length > 2)
    throw new UsageError(`${path}: input_ids is ${dtype} [${shape.join(', ')}]; it must be I32 or I64, [S] or [B, S]`);
  const values = toFloat64(ids);
  const [count, length] = shape.length === 2 ? shape : [1, shape[0]];
  const rows = Array.from({ length: count }, (_, i) => values.subarray(i * length, (i + 1) * length));
  return { shape, rows };
}
