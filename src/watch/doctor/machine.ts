/** Checks the machine: compiler, kernels, memory, disk, environment. */
import { accessSync, constants, existsSync, statfsSync } from 'node:fs';
import { cpus, freemem, platform, release, totalmem } from 'node:os';
import { dirname, resolve } from 'node:path';
import { environmentWarnings, TRAINING_IGNORES, unreadVariables } from '../../config/legacy/environment.js';
import { foreignVariables } from '../../config/legacy/foreign.js';
import { defaultCompilerOptions, findCompiler, processorIdentity } from '../../device/cpu/compile.js';
import { CpuDevice } from '../../device/cpu/cpu.js';
import { chooseKernels } from '../../device/kernel-choice.js';
import { openMpiLibrary } from '../../device/mpi/abi.js';
import { openWasmDevice } from '../../device/wasm/node.js';
import type { Environment } from '../../environment.js';
import { TrefoilError, UsageError } from '../../errors.js';
import { collectEnvironment } from '../../run/environment.js';
import { fillNormal } from '../../tensor/random/op.js';
import { Tensor } from '../../tensor/tensor.js';
import { describeIdentity, resolveRank } from '../../train/ranks/identity.js';
import { type DoctorRow, fail, fine, warn } from './row.js';

const OLDEST_NODE = 20;
const GIB = 2 ** 30;
const LITTLE_DISK_BYTES = 5 * GIB;

export function machineRows(env: Environment): DoctorRow[] {
  return [
    nodeRow(),
    systemRow(),
    processorRow(),
    memoryRow(),
    compilerRow(env),
    kernelRow(env),
    cacheRow(env),
    codeRow(),
  ];
}

function nodeRow(): DoctorRow {
  const { node } = process.versions;
  const remedy = `install Node ${OLDEST_NODE} or newer`;
  return Number.parseInt(node, 10) >= OLDEST_NODE ? fine('node', node) : fail('node', node, remedy);
}

function systemRow(): DoctorRow {
  const found = `${platform()} ${release()} ${process.arch}`;
  if (platform() === 'linux' || platform() === 'darwin') return fine('system', found);
  return fail('system', found, 'use Linux or macOS');
}

function processorRow(): DoctorRow {
  const model = cpus()[0]?.model ?? 'unknown';
  const identity = processorIdentity();
  const vectors = ['avx512f', 'avx2', 'asimd'].find((name) => new RegExp(`\\b${name}\\b`).test(identity));
  const found = `${cpus().length} cores, ${model}${vectors ? `, ${vectors}` : ''}`;
  if (vectors !== undefined || process.arch === 'arm64') return fine('processor', found);
  return warn('processor', found, 'no AVX2 or NEON: kernels will be slow');
}

/** Memory available to this process: that of the machine, or the limit of a container. */
export function availableMemory(): number {
  const limit = process.constrainedMemory?.() ?? 0;
  return limit > 0 && limit < totalmem() ? Math.max(0, limit - process.memoryUsage().rss) : freemem();
}

function memoryRow(): DoctorRow {
  const available = availableMemory();
  const found = `${gib(available)} of ${gib(totalmem())} available`;
  return available > GIB ? fine('memory', found) : warn('memory', found, 'stop other programs before a run');
}

function compilerRow(env: Environment): DoctorRow {
  try {
    const { command, version } = findCompiler(defaultCompilerOptions(env).candidates);
    return fine('compiler', `${command}: ${version}`);
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    const remedy = `kernels that are not in the cache cannot be compiled: ${error.message}`;
    return warn('compiler', 'none', remedy);
  }
}

/** Runs a kernel, which is compiled if the cache lacks it, and counts those that the cache has. */
function kernelRow(env: Environment): DoctorRow {
  try {
    const { kind, warning, compiler } = chooseKernels(env);
    const device = kind === 'wasm' ? openWasmDevice({ threads: 1 }) : new CpuDevice({ compiler });
    const tensor = Tensor.empty(device, [64]);
    fillNormal(tensor, { seed: 1, stream: 0 });
    const isSound = tensor.read().every(Number.isFinite);
    tensor.free();
    if (!isSound)
      return fail('kernels', 'a kernel gave numbers that are not finite', 'report it with your compiler and CPU');
    const { name, hash } = device.kernelSource;
    if (kind === 'wasm') {
      const found = `run in WebAssembly on ${device.name}: ${name}, sources ${hash}`;
      return warning === null ? fine('kernels', found) : warn('kernels', found, warning);
    }
    if (kind === 'prebuilt') return fine('kernels', `run on ${device.name}: prebuilt by ${name}, sources ${hash}`);
    const { cached, total } = compiler.stock;
    const found = `run on ${device.name} by ${name}, sources ${hash}; ${cached} of ${total} are in the cache`;
    if (cached === total) return fine('kernels', found);
    if (compiler.hasCompiler) return fine('kernels', `${found}, others are compiled on first use`);
    const remedy = 'install a compiler, or fill the cache with doctor --compile on a machine that has one';
    return warn('kernels', `${found}, and there is no compiler for the others`, remedy);
  } catch (error) {
    if (!(error instanceof TrefoilError)) throw error;
    return fail('kernels', 'cannot be compiled or run', error.message);
  }
}

function cacheRow(env: Environment): DoctorRow {
  const { cache } = defaultCompilerOptions(env);
  const folder = existingParent(cache);
  try {
    accessSync(folder, constants.W_OK);
    return fine('cache', `${cache}, ${gib(freeBytes(folder))} free`);
  } catch {
    return fail('cache', `${folder} is not writable`, 'set TREFOIL_CACHE to a folder that is');
  }
}

function codeRow(): DoctorRow {
  const { git, versions } = collectEnvironment();
  const version = `trefoil ${versions['trefoil']}`;
  if (git === null) return fine('code', `${version}, not in a git repository`);
  const found = `${version}, ${git.branch} ${git.commit.slice(0, 12)}`;
  return git.dirty ? warn('code', `${found} with changes`, 'commit before a run you will report') : fine('code', found);
}

/** The rank of a training run started here, and whether MPI is available for ranks on CPUs. */
export function rankRows(env: Environment): DoctorRow[] {
  try {
    const identity = resolveRank(env);
    return [fine('ranks', describeIdentity(identity)), mpiRow(identity.world !== 1)];
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return [fail('ranks', 'the variables of the launcher contradict each other', error.message)];
  }
}

function mpiRow(isNeeded: boolean): DoctorRow {
  try {
    return fine('mpi', openMpiLibrary().abi.name);
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    if (!isNeeded) return fine('mpi', 'not installed (only several ranks on CPUs need it)');
    return warn('mpi', 'not installed', error.message);
  }
}

/** Environment variables that are set and have no effect. */
export function environmentRows(env: Environment): DoctorRow[] {
  const rows = [
    ...foreignVariables(env).map(({ name, note }) => warn('environment', `${name} has no effect`, note)),
    ...environmentWarnings(env).map((line) => warn('environment', line, 'unset it')),
    ...unreadVariables(env, 'a training', TRAINING_IGNORES).map((line) =>
      warn('environment', line, 'trefoil generate, serve and bench prefill read it'),
    ),
  ];
  return rows.length > 0 ? rows : [fine('environment', 'no variable without effect')];
}

export function diskRow(outDir: string, neededBytes: number): DoctorRow {
  const folder = existingParent(resolve(outDir));
  const free = freeBytes(folder);
  const found = `${gib(free)} free in ${folder}, the run needs about ${gib(neededBytes)}`;
  if (!isWritable(folder)) return fail('disk', `${folder} is not writable`, 'choose another train.out_dir');
  if (free < neededBytes) return fail('disk', found, 'free some space, or lower train.keep_last');
  if (free - neededBytes < LITTLE_DISK_BYTES)
    return warn('disk', found, 'little will be left for logs and other programs');
  return fine('disk', found);
}

function isWritable(folder: string): boolean {
  try {
    accessSync(folder, constants.W_OK);
    return true;
  } catch {
    return false;
  }
}

function existingParent(path: string): string {
  return existsSync(path) || dirname(path) === path ? path : existingParent(dirname(path));
}

function freeBytes(folder: string): number {
  const { bavail, bsize } = statfsSync(folder);
  return bavail * bsize;
}

export function gib(bytes: number): string {
  if (bytes < GIB) return `${(bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0)} MiB`;
  return `${(bytes / GIB).toFixed(bytes < 10 * GIB ? 2 : 0)} GiB`;
}
