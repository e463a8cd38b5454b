/** Checks a config before a run: memory, checkpoints, precision, data, disk. */
import { readsPath } from '../../config/data-sources.js';
import type { ResolvedConfig } from '../../config/load.js';
import type { Config } from '../../config/schema.js';
import { resolveFiles } from '../../data/sources/files.js';
import { createTokenizer } from '../../data/tokenizer.js';
import { TrefoilError } from '../../errors.js';
import { estimateMemory, type MemoryEstimate } from '../../model/memory.js';
import { modelShape } from '../../model/shape.js';
import { listCheckpoints } from '../../run/checkpoint/read.js';
import { readLockOwner } from '../../run/lock.js';
import { runPaths } from '../../run/paths.js';
import { availableMemory, diskRow, gib } from './machine.js';
import { type DoctorRow, fail, fine, warn } from './row.js';

/** From this number of steps on a run counts as long. */
const LONG_STEPS = 1000;
const TIGHT = 0.85;
const MIB = 2 ** 20;
/** Bytes of logs per step: a heartbeat of about 700 bytes, and the rest. */
const LOG_BYTES_PER_STEP = 1000;

export interface ConfigFacts {
  readonly gpuMemoryMib: number | null;
}

export async function configRows(resolved: ResolvedConfig, facts: ConfigFacts): Promise<DoctorRow[]> {
  const { config, file } = resolved;
  const { train } = config;
  const plan = `${train.steps} steps, S ${train.seq_len}, batch ${train.batch_size} x ${train.accumulate_grad_batches}`;
  const estimate = tryEstimate(config, facts);
  return [
    fine('config', `${file ?? 'defaults'}: ${plan}`),
    deviceRow(config, facts),
    precisionRow(config, facts),
    fusedRow(resolved, facts),
    checkpointRow(config),
    checkpointingRow(config, facts),
    debugRow(config),
    folderRow(train.out_dir),
    await dataRow(config),
    ...('row' in estimate
      ? [estimate.row]
      : [
          memoryRow(estimate, facts, config),
          ...copyRow(estimate, config),
          diskRow(train.out_dir, diskBytes(estimate, config)),
        ]),
  ];
}

function usesGpu({ runtime }: Config, { gpuMemoryMib }: ConfigFacts): boolean {
  return runtime.device === 'cuda' || (runtime.device === 'auto' && gpuMemoryMib !== null);
}

function isLong({ train }: Config): boolean {
  return train.steps > LONG_STEPS;
}

function deviceRow({ runtime }: Config, { gpuMemoryMib }: ConfigFacts): DoctorRow {
  if (runtime.device === 'cuda' && gpuMemoryMib === null)
    return fail(
      'device',
      'the config requires cuda, which is not available',
      'use --device cpu, or a machine with a GPU',
    );
  return fine('device', runtime.device === 'auto' ? `auto: ${gpuMemoryMib === null ? 'cpu' : 'cuda'}` : runtime.device);
}

function precisionRow(config: Config, facts: ConfigFacts): DoctorRow {
  const { precision } = config.runtime;
  if (usesGpu(config, facts) && precision === 'fp32') {
    const remedy = 'set runtime.precision to bf16: half the memory and several times the speed';
    return isLong(config)
      ? fail('precision', 'fp32 on a GPU for a long run', remedy)
      : warn('precision', 'fp32 on a GPU', remedy);
  }
  return fine('precision', precision);
}

/** The fused attention kernels: on or off, and by whom. */
function fusedRow({ config, origins }: ResolvedConfig, facts: ConfigFacts): DoctorRow {
  const { fused, fused_min_len: from, reference_kernels: isReference, precision } = config.runtime;
  const name = 'fused kernels';
  const by = (key: string) => `runtime.${key} by ${origins.get(`runtime.${key}`)}`;
  const off = isReference
    ? by('reference_kernels')
    : !fused
      ? by('fused')
      : from < 0 || from > config.train.seq_len
        ? `${by('fused_min_len')}: ${from < 0 ? 'never' : `from ${from} tokens`}`
        : null;
  if (!usesGpu(config, facts))
    return fine(
      name,
      off === null ? 'on, for a GPU; the CPU has one kernel per branch' : `off (${off}); none on the CPU`,
    );
  if (off !== null) return warn(name, `off (${off})`, 'one kernel per branch is slower and takes more memory');
  if (precision === 'fp32') return warn(name, 'on, but not in fp32', 'set runtime.precision to bf16');
  return fine(name, `on (${by('fused')})`);
}

function checkpointRow(config: Config): DoctorRow {
  const { save_every: every, steps, keep_last: kept, async_save: isAside } = config.train;
  if (every === 0) {
    const remedy = 'set train.save_every: without it a crash loses everything';
    return isLong(config) ? fail('checkpoints', `none in ${steps} steps`, remedy) : warn('checkpoints', 'none', remedy);
  }
  if (every > steps)
    return warn('checkpoints', `every ${every} of ${steps} steps: only at the end`, 'lower train.save_every');
  return fine('checkpoints', `every ${every} steps, ${kept} kept${isAside ? '' : '; training waits for each'}`);
}

/** The cost of saving while training goes on: a copy of weights and moments in memory. */
function copyRow({ copy }: MemoryEstimate, { train }: Config): DoctorRow[] {
  if (!train.async_save || train.save_every === 0 || train.zero === 1) return [];
  const free = availableMemory();
  const found = `a copy of ${(copy / MIB).toFixed(0)} MiB in memory while training goes on, of ${gib(free)}`;
  const remedy = 'without room training waits until a checkpoint is written; train.async_save: false asks for that';
  return [copy > TIGHT * free ? warn('saves', found, remedy) : fine('saves', found)];
}

function checkpointingRow(config: Config, facts: ConfigFacts): DoctorRow {
  const isOn = config.runtime.gradient_checkpointing;
  if (isOn || !usesGpu(config, facts) || !isLong(config)) return fine('gradient checkpointing', isOn ? 'on' : 'off');
  return warn('gradient checkpointing', 'off', 'runtime.gradient_checkpointing: true makes room for longer sequences');
}

function debugRow({ runtime, nsa }: Config): DoctorRow {
  const on = [
    ...(['strict_asserts', 'debug_compare', 'debug_timing', 'reference_kernels'] as const)
      .filter((name) => runtime[name])
      .map((name) => `runtime.${name}`),
    ...(nsa.force_branch === 'none' ? [] : ['nsa.force_branch']),
    ...(['force_uniform_gate', 'stopgrad_gates'] as const).filter((name) => nsa[name]).map((name) => `nsa.${name}`),
  ];
  if (on.length === 0) return fine('debugging', 'off');
  return warn('debugging', `${on.join(', ')} on`, 'turn off for a real run: slow, or another model');
}

function folderRow(outDir: string): DoctorRow {
  const paths = runPaths(outDir);
  const owner = readLockOwner(paths.lock);
  if (owner?.alive !== false && owner)
    return fail(
      'out_dir',
      `${outDir} is in use by process ${owner.pid} on ${owner.host}`,
      'choose another train.out_dir',
    );
  const [newest] = listCheckpoints(paths.checkpoints);
  if (newest)
    return warn(
      'out_dir',
      `${outDir} holds a run at step ${newest.step}`,
      'continue with --resume auto, or choose another',
    );
  return fine('out_dir', outDir);
}

async function dataRow({ data }: Config): Promise<DoctorRow> {
  try {
    createTokenizer(data.tokenizer);
    if (data.source === 'synthetic')
      return warn('data', 'synthetic: random tokens', 'nothing can be learned from them');
    if (data.source === 'hub') return warn('data', 'hub: streamed', 'needs the network during the run');
    if (data.sources !== null) return await mixtureRow(data.sources, data.tokenizer);
    if (!readsPath(data.source)) return fine('data', `${data.source}: generated, tokenizer ${data.tokenizer}`);
    if (data.path === null) return fail('data', `${data.source} without data.path`, 'give --local-path');
    const { files } = await resolveFiles(data.path);
    const bytes = files.reduce((total, { size }) => total + size, 0);
    return fine(
      'data',
      `${data.source}: ${files.length} files, ${(bytes / MIB).toFixed(1)} MiB, tokenizer ${data.tokenizer}`,
    );
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return fail('data', 'cannot be opened', error.message);
  }
}

async function mixtureRow(sources: NonNullable<Config['data']['sources']>, tokenizer: string): Promise<DoctorRow> {
  const found = await Promise.all(
    sources.map(async ({ name, path, weight }) => {
      const share = `${name} ${Number((100 * weight).toFixed(1))} %`;
      if (path === null) return `${share}: generated`;
      const { files } = await resolveFiles(path);
      return `${share}: ${(files.reduce((total, { size }) => total + size, 0) / MIB).toFixed(1)} MiB`;
    }),
  );
  return fine('data', `mixture of ${found.join(', ')}; tokenizer ${tokenizer}`);
}

function tryEstimate(config: Config, facts: ConfigFacts): MemoryEstimate | { readonly row: DoctorRow } {
  try {
    const synthetic = config.data.source === 'synthetic' ? config.data.vocab_size : null;
    const shape = modelShape(config, synthetic ?? createTokenizer(config.data.tokenizer).vocabSize);
    return estimateMemory(shape, config, usesGpu(config, facts) ? 'cuda' : 'cpu');
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return { row: fail('model', 'cannot be built', error.message) };
  }
}

function memoryRow({ state, activations, total }: MemoryEstimate, facts: ConfigFacts, config: Config): DoctorRow {
  const onGpu = usesGpu(config, facts) && facts.gpuMemoryMib !== null;
  const available = onGpu ? facts.gpuMemoryMib! * MIB : availableMemory();
  const parts = `${gib(state)} weights, gradients and moments, ${gib(activations)} activations`;
  const found = `about ${(total / MIB).toFixed(0)} MiB (${parts}) of ${gib(available)} ${onGpu ? 'on the GPU' : 'in memory'}`;
  const remedy = 'a smaller train.batch_size with more accumulate_grad_batches, then runtime.gradient_checkpointing';
  if (total > available) return fail('memory estimate', found, remedy);
  return total > TIGHT * available ? warn('memory estimate', found, remedy) : fine('memory estimate', found);
}

/** Weights and two moments of every checkpoint kept and the one being written, the final model, and logs. */
function diskBytes({ weights, copy }: MemoryEstimate, { train }: Config): number {
  const checkpoints = train.save_every > 0 ? (train.keep_last + 1) * copy : 0;
  return checkpoints + weights + train.steps * LOG_BYTES_PER_STEP;
}
