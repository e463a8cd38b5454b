import { describe, expect, it } from 'vitest';
import { parseTrainFlags } from '../../cli/shared/train-flags.js';
import { loadConfig } from '../../config/load.js';
import { configRows } from './config.js';

const BASE = ['--dataset', 'synthetic', '--set', 'data.vocab_size=256'];

async function fusedRow(
  env: Record<string, string>,
  flags: readonly string[] = [],
  gpuMemoryMib: number | null = 80_000,
) {
  const resolved = loadConfig({ env, config: '125m_80g', flags: parseTrainFlags([...BASE, ...flags]).layer });
  const found = (await configRows(resolved, { gpuMemoryMib })).find(({ check }) => check === 'fused kernels')!;
  return `${found.level}: ${found.found}`;
}

describe('the row of the fused kernels', () => {
  it.each([
    [{}, [], 'green: on (runtime.fused by default)'],
    [{ NSA_USE_FA2: '1' }, [], 'green: on (runtime.fused by env NSA_USE_FA2)'],
    [{ NSA_USE_FA2: '0' }, [], 'yellow: off (runtime.fused by env NSA_USE_FA2)'],
    [{ NSA_USE_FA2: '1', NSA_USE_FA2_WIN: '0' }, [], 'yellow: off (runtime.fused by env NSA_USE_FA2_WIN)'],
    [{ NSA_FA2_MIN_LEN_WIN: '-1' }, [], 'yellow: off (runtime.fused_min_len by env NSA_FA2_MIN_LEN_WIN: never)'],
    [{ NSA_FORCE_PARITY: '1' }, [], 'yellow: off (runtime.reference_kernels by env NSA_FORCE_PARITY)'],
    [{}, ['--set', 'runtime.fused=false'], 'yellow: off (runtime.fused by flag --set)'],
    [{}, ['--precision', 'fp32'], 'yellow: on, but not in fp32'],
  ])('%j %j: %s', async (env, flags, row) => expect(await fusedRow(env, flags)).toBe(row));

  it('says what the CPU does', async () => {
    const flags = ['--device', 'cpu'];
    expect(await fusedRow({}, flags, null)).toBe('green: on, for a GPU; the CPU has one kernel per branch');
    expect(await fusedRow({ NSA_USE_FA2: '0' }, flags, null)).toContain('by env NSA_USE_FA2); none on the CPU');
  });
});

it('the profile of an RTX 4090 lets 125m_24g fit into 24 GB', async () => {
  const flags = [...BASE, '--set', 'runtime.profile=rtx4090', '--set', 'data.vocab_size=50257'];
  const resolved = loadConfig({ env: {}, config: '125m_24g', flags: parseTrainFlags(flags).layer });
  const rows = await configRows(resolved, { gpuMemoryMib: 24_080 });
  expect(rows.find(({ check }) => check === 'memory estimate')).toMatchObject({ level: 'green' });
});
