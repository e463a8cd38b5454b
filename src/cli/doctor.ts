/** `trefoil doctor`: checks that a machine, and optionally a config, is ready for a run. */
import { FlagSettings } from '../config/flags.js';
import { defaultCompilerOptions, KernelCompiler } from '../device/cpu/compile.js';
import { ExitCode } from '../errors.js';
import { type DoctorRow, diagnose } from '../watch/doctor/doctor.js';
import { CompileProgressLine } from './shared/compile-progress.js';
import { type Io, printJson } from './shared/io.js';
import { configured, flag, jsonOption, type OptionValues } from './shared/options.js';
import { formatTable, wrapped } from './shared/table.js';

const OPTIONS = {
  config: flag('--config <name|file>', 'also check this config (env CONFIG): memory, checkpoints, data'),
  from: flag('--from <model>', 'the model that the run starts from, as for train'),
  set: flag('--set <key=value...>', 'set keys of the config, as for train'),
  compile: flag('--compile', 'first compile all CPU kernels into the cache, for images without a compiler'),
  json: jsonOption('{ok, rows: [{check, level, found, remedy}]}'),
};
type Options = OptionValues<typeof OPTIONS>;

export const configure = configured(OPTIONS, doctor, '\nExit code: 0 no check is red, 1 at least one is.\n');

async function doctor({ config, from, set = [], compile, json }: Options, io: Io): Promise<void> {
  if (compile) {
    const options = { ...defaultCompilerOptions(io.env), progress: new CompileProgressLine(io.stderr) };
    io.err(`${await new KernelCompiler(options).compileAll()} kernels are compiled in ${options.cache}`);
  }
  const flags = new FlagSettings();
  if (from !== undefined) flags.add('from', from);
  flags.set(...set);
  const { layer } = flags;
  const isAsked = config !== undefined || layer.size > 0 || Boolean(io.env['CONFIG']?.trim());
  const asked = isAsked ? { env: io.env, flags: layer, config: config ?? null } : null;
  const diagnosis = await diagnose(io.env, asked);
  if (json) printJson(io, diagnosis);
  else {
    io.out(table(diagnosis.rows, io));
    const count = (level: DoctorRow['level']) => diagnosis.rows.filter((row) => row.level === level).length;
    io.out(
      `${count('green')} green, ${count('yellow')} yellow, ${count('red')} red` +
        (asked ? '' : '; check a config too with --config NAME'),
    );
  }
  if (!diagnosis.ok) io.exitCode = ExitCode.failed;
}

function table(rows: readonly DoctorRow[], { style, width }: Io): string {
  return formatTable(
    ['', 'check', wrapped('found')],
    rows.map(({ level, check, found, remedy }) => [
      style[level](level),
      check,
      remedy ? `${found} -> ${remedy}` : found,
    ]),
    width,
  ).trimEnd();
}
