/**
 * Finds the CUDA libraries: in the system's library path, a toolkit, packages of a distribution, or wheels of a Python
 * installation. The error for a missing library names the remedy.
 */
import { existsSync, readdirSync } from 'node:fs';
import { homedir } from 'node:os';
import { join } from 'node:path';
import type { Environment } from '../../environment.js';
import koffi from '../koffi.js';

export type Library = ReturnType<typeof koffi.load>;

export interface LibraryName {
  /** Name for messages. */
  readonly title: string;
  /** File names in order of preference. */
  readonly files: readonly string[];
  readonly remedy: string;
  /** Files in the same folder that it opens by name; Python wheels set no search path, so they are loaded first. */
  readonly companions?: RegExp;
}

export const DRIVER: LibraryName = {
  title: 'the NVIDIA driver (libcuda.so.1)',
  files: ['libcuda.so.1', 'libcuda.so'],
  remedy: 'install the NVIDIA driver; in a container, start it with GPU access (docker run --gpus all)',
};

export const NVRTC: LibraryName = {
  title: 'the CUDA run-time compiler (libnvrtc.so)',
  files: ['libnvrtc.so.13', 'libnvrtc.so.12', 'libnvrtc.so'],
  remedy:
    'install the CUDA toolkit 12.3 or newer, or its NVRTC package (pip install nvidia-cuda-nvrtc), or set CUDA_HOME to where it is',
  companions: /^libnvrtc-builtins\.so/,
};

export const CUBLASLT: LibraryName = {
  title: 'cuBLASLt (libcublasLt.so)',
  files: ['libcublasLt.so.13', 'libcublasLt.so.12', 'libcublasLt.so'],
  remedy:
    'install the CUDA toolkit, or its cuBLAS package (pip install nvidia-cublas), or set CUDA_HOME to where it is',
};

export const NCCL: LibraryName = {
  title: 'NCCL (libnccl.so.2)',
  files: ['libnccl.so.2', 'libnccl.so'],
  remedy:
    "several ranks on GPUs need it: install it (pip install nvidia-nccl-cu13, or libnccl2 of NVIDIA's packages), " +
    'or train on one GPU with --ddp 0',
};

/** A library was not found or cannot be loaded. */
export class LibraryMissing extends Error {
  /** The fault and the remedy; the message has both. */
  readonly found: string;
  readonly remedy: string;

  constructor(found: string, remedy: string) {
    super(`${found}: ${remedy}`);
    this.found = found;
    this.remedy = remedy;
  }
}

/** Opens a library: first by name (the system's search path), then in each known folder. */
export function openLibrary(name: LibraryName, environment: Environment = process.env): Library {
  const problems: string[] = [];
  const folders = ['', ...libraryFolders(environment)];
  for (const folder of folders)
    for (const file of name.files) {
      const path = folder === '' ? file : join(folder, file);
      if (folder !== '' && !existsSync(path)) continue;
      try {
        if (folder !== '' && name.companions)
          for (const companion of children(folder, name.companions)) koffi.load(companion, { global: true });
        return koffi.load(path);
      } catch (error) {
        // Why an existing file does not load is more informative than a missing one.
        if (folder !== '') problems.push((error as Error).message.split('\n')[0]);
      }
    }
  const tried = problems.length > 0 ? `could not be loaded (${problems[0]})` : 'was not found';
  throw new LibraryMissing(`${name.title} ${tried}`, name.remedy);
}

/** Existing folders of toolkits, distributions and Python wheels. */
export function libraryFolders(environment: Environment): string[] {
  const toolkits = [
    environment['CUDA_HOME'],
    environment['CUDA_PATH'],
    '/usr/local/cuda',
    ...children('/usr/local', /^cuda-\d/),
    '/opt/cuda',
    environment['CONDA_PREFIX'],
  ];
  const system = ['/usr/lib/x86_64-linux-gnu', '/usr/lib/aarch64-linux-gnu', '/usr/lib64', '/usr/lib/wsl/lib'];
  const folders = [
    ...toolkits.flatMap((root) =>
      root ? [join(root, 'lib64'), join(root, 'lib'), join(root, 'targets/x86_64-linux/lib')] : [],
    ),
    ...system,
    ...wheelFolders(environment),
  ];
  return [...new Set(folders)].filter((folder) => existsSync(folder));
}

/** `nvidia/<part>/lib` in each site-packages folder that can be found without running Python. */
function wheelFolders(environment: Environment): string[] {
  const prefixes = [
    environment['VIRTUAL_ENV'],
    environment['CONDA_PREFIX'],
    join(homedir(), '.local'),
    '/usr/local',
    '/usr',
    ...children('/opt', /./),
    ...children(join(homedir(), '.pyenv', 'versions'), /./),
  ];
  return prefixes
    .flatMap((prefix) => (prefix ? children(join(prefix, 'lib'), /^python3/) : []))
    .flatMap((python) => [join(python, 'site-packages'), join(python, 'dist-packages')])
    .flatMap((packages) => children(join(packages, 'nvidia'), /./))
    .map((part) => join(part, 'lib'));
}

/** Matching entries of a folder, newest version first; empty if it cannot be read. */
function children(folder: string, pattern: RegExp): string[] {
  if (!existsSync(folder)) return [];
  return readdirSync(folder)
    .filter((name) => pattern.test(name))
    .sort((a, b) => b.localeCompare(a, 'en', { numeric: true }))
    .map((name) => join(folder, name));
}
