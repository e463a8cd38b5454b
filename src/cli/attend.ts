/** `trefoil attend`: runs one attention case from a safetensors file and writes outputs and gradients to another. */
import { dirname, resolve } from 'node:path';
import { UsageError } from '../errors.js';
import { statOrUndefined } from '../files.js';
import { SELECTION_KERNELS } from '../ops/attention/selected/op.js';
import { writeSafetensors } from '../run/safetensors.js';
import { attend, attendReference } from '../verify/attend.js';
import { caseTensors, readCase } from '../verify/case-file.js';
import { runBlocking } from './shared/blocking.js';
import { deviceOption, openDevice } from './shared/device.js';
import { type Io, printJson } from './shared/io.js';
import { choice, configured, jsonOption, type OptionValues, required, threadsOption } from './shared/options.js';

const OPTIONS = {
  in: required('--in <file>', 'safetensors file with the inputs'),
  out: required('--out <file>', 'safetensors file to write'),
  device: deviceOption(),
  kernel: choice(
    '--kernel <name>',
    'kernel of the selected branch; reference = float64',
    SELECTION_KERNELS,
    'adaptive',
  ),
  threads: threadsOption(),
  json: jsonOption('{in, out, device, kernel, ms, tensors}'),
};
type Options = OptionValues<typeof OPTIONS>;

const HELP = `
Starts after projection, RoPE and compression: keys and queries are used as
given, also as rotated; gates are weights, after their softmax or sigmoid.
Input (F32, F64, BF16 or F16; metadata S H G d_k d_v l d l_sel n_sel w):
  q      [S, H, d_k]                gates  [S, H, 3]
  k_cmp  [Nc, G, d_k]               v_cmp  [Nc, G, d_v]
  k_sel, k_win  [S, G, d_k]         v_sel, v_win  [S, G, d_v]
  d_out  [S, H, d_v]   optional: gradient of out; without it no gradients
  cu_seqlens  [B+1]    optional: I32 offsets of packed sequences; Nc then counts
                       the compression blocks of all sequences
Output (F32; selected is I32, ascending, padded with -1 at the end of a row):
  out o_cmp o_sel o_win selected, and with d_out also
  dq dk_cmp dv_cmp dk_sel dv_sel dk_win dv_win d_gates
NaN in the input propagates to the output and is not an error.
`;

export const configure = configured(OPTIONS, run, HELP);

function run(options: Options, io: Io): void {
  const { in: from, out: to, kernel } = options;
  if (resolve(from) === resolve(to)) throw new UsageError(`--out: must differ from --in; both are ${from}`);
  const folder = dirname(resolve(to));
  if (!statOrUndefined(folder)?.isDirectory())
    throw new UsageError(`--out ${to}: no such folder: ${folder}; create it first`);
  const file = readCase(from);
  const device = kernel === 'reference' ? null : openDevice(options);
  const started = performance.now();
  const result = runBlocking(() =>
    kernel === 'reference' || !device ? attendReference(file) : attend(file, kernel, device),
  );
  const ms = performance.now() - started;
  const tensors = caseTensors(file, result);
  writeSafetensors(to, tensors, { ...file.metadata, kernel, device: device?.kind ?? 'float64 reference' });
  if (options.json) {
    const names = tensors.map(({ name }) => name);
    printJson(io, { in: from, out: to, device: device?.kind ?? 'reference', kernel, ms, tensors: names });
  } else {
    const what = result.gradients ? 'outputs and gradients' : 'outputs';
    io.out(
      `${to}: ${what} of ${file.metadata['S']} tokens, ${kernel} on ${device?.name ?? 'float64'}, ${ms.toFixed(0)} ms`,
    );
  }
}
