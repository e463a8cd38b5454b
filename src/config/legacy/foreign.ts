/** Variables of other systems that old runbooks export: doctor says that they mean nothing here, and what does. */
import type { Environment } from './environment.js';

export interface ForeignVariable {
  name: string;
  note: string;
}

const NOTES: readonly (readonly [pattern: RegExp, note: string])[] = [
  [/^PYTORCH_CUDA_ALLOC_CONF$/, 'PyTorch’s allocator; here memory comes from pools that do not fragment'],
  [/^TORCH_LOGS$/, 'PyTorch’s logs; NSA_SDPA_AUDIT=1 says which kernel served each branch'],
  [/^TORCH_(CUDNN_ALLOW_TF32|ALLOW_TF32_CUBLAS_OVERRIDE)$/, 'PyTorch’s TF32 switch; here runtime.precision decides'],
  [/^(PYTORCH|TORCH|TORCHINDUCTOR|TORCHELASTIC)_/, 'a variable of PyTorch, which is not here'],
  [/^TRITON_/, 'a variable of Triton, which is not here'],
  [/^FLASH_ATTENTION_/, 'a variable of flash-attn, which is not here; NSA_USE_FA2 chooses the fused kernels'],
  [/^PYTHONUNBUFFERED$/, 'a variable of Python; here every line is written at once'],
  [/^IB_DISABLE$/, 'read by nobody; NCCL reads NCCL_IB_DISABLE'],
];

/** Notes for doctor, sorted by name. Values are left out: an environment may hold secrets. */
export function foreignVariables(env: Environment): ForeignVariable[] {
  return Object.keys(env)
    .filter((name) => env[name] !== undefined)
    .sort()
    .flatMap((name) => {
      const note = NOTES.find(([pattern]) => pattern.test(name))?.[1];
      return note === undefined ? [] : [{ name, note }];
    });
}
