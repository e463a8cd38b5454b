/** Preflight checks of machine, GPU, environment and config: green, yellow or red, with a remedy. */

import { type LoadOptions, loadConfig, type ResolvedConfig } from '../../config/load.js';
import type { Environment } from '../../environment.js';
import { UsageError } from '../../errors.js';
import { modelLayer } from '../../infer/model-layer.js';
import { configRows } from './config.js';
import { gpuMemoryMib, gpuRows } from './gpu.js';
import { environmentRows, machineRows, rankRows } from './machine.js';
import { type DoctorRow, fail } from './row.js';

export type { DoctorRow } from './row.js';

export interface Diagnosis {
  readonly ok: boolean;
  readonly rows: readonly DoctorRow[];
}

/** `asked` is the config to check too; null checks only the machine. */
export async function diagnose(env: Environment, asked: LoadOptions | null): Promise<Diagnosis> {
  const machine = [...machineRows(env), ...gpuRows(), ...rankRows(env), ...environmentRows(env)];
  const rows = [...machine, ...(asked ? await rowsOf(asked) : [])];
  return { ok: rows.every(({ level }) => level !== 'red'), rows };
}

async function rowsOf(asked: LoadOptions): Promise<DoctorRow[]> {
  let resolved: ResolvedConfig;
  try {
    resolved = loadConfig({ modelLayer, ...asked });
  } catch (error) {
    if (!(error instanceof UsageError)) throw error;
    return error.message.split('\n').map((line) => fail('config', 'does not hold', line));
  }
  return configRows(resolved, { gpuMemoryMib: gpuMemoryMib() });
}
