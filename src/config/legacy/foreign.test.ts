import { describe, expect, it } from 'vitest';
import { foreignVariables } from './foreign.js';

/** Variables that the runbooks export besides NSA_*. */
const RUNBOOK = [
  'PYTORCH_CUDA_ALLOC_CONF',
  'TORCH_LOGS',
  'TORCH_CUDNN_ALLOW_TF32',
  'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE',
  'TRITON_CACHE_DIR',
  'PYTHONUNBUFFERED',
  'IB_DISABLE',
];

describe('foreignVariables', () => {
  it.each(RUNBOOK)('has a note about %s', (name) => {
    const [note, ...rest] = foreignVariables({ [name]: '1' });
    expect(note.name).toBe(name);
    expect(note.note.length).toBeGreaterThan(20);
    expect(rest).toEqual([]);
  });

  it('leaves alone what CUDA, NCCL and Trefoil read', () => {
    const env = { NCCL_P2P_DISABLE: '0', CUDA_VISIBLE_DEVICES: '0', CUDA_LAUNCH_BLOCKING: '0', NSA_LR: '1', PATH: '/' };
    expect(foreignVariables(env)).toEqual([]);
  });

  it('shows no values', () =>
    expect(JSON.stringify(foreignVariables({ TORCH_TOKEN: 'secret' }))).not.toContain('secret'));
});
