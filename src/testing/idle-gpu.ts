/** The GPU that computes nothing (device/cuda/testing/idle-gpu.cpp), built for the processes of a test. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

const SOURCE = fileURLToPath(new URL('../device/cuda/testing/idle-gpu.cpp', import.meta.url));
/** Names under which the libraries are looked for; the first of each kind, so that no real one comes before. */
const NAMES = ['libnccl.so.2', 'libnvrtc.so.13', 'libcublasLt.so.13'];

/** Why it cannot be built here; null when it can. */
export function idleGpuAbsence(): string | null {
  if (process.platform !== 'linux') return `no idle GPU: CUDA's libraries are not looked for on ${process.platform}`;
  return spawnSync('g++', ['--version']).status === 0 ? null : 'no idle GPU: no g++';
}

export interface IdleGpu {
  /** Holds the libraries. */
  readonly folder: string;
  /** Variables with which a process finds it; kernels that are none stay out of the usual cache. */
  readonly env: Readonly<Record<string, string>>;
  remove(): void;
}

export function buildIdleGpu(): IdleGpu {
  const folder = mkdtempSync(join(tmpdir(), 'trefoil-idle-gpu-'));
  const file = join(folder, 'libcuda.so.1');
  const words = ['-std=c++17', '-O1', '-shared', '-fPIC', '-pthread', SOURCE, '-o', file];
  const { status, stderr } = spawnSync('g++', words, { encoding: 'utf8' });
  if (status !== 0) throw new Error(`the idle GPU could not be built: ${stderr}`);
  for (const name of NAMES) symlinkSync('libcuda.so.1', join(folder, name));
  return {
    folder,
    env: { LD_LIBRARY_PATH: folder, TREFOIL_CACHE: join(folder, 'cache'), IDLE_GPU_FOLDER: folder, VIRTUAL_ENV: '' },
    remove: () => rmSync(folder, { recursive: true, force: true }),
  };
}
