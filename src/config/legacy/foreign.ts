/** Variables of other systems that old runbooks export. They have no effect; `doctor` names the replacement. */
import type { Environment } from '../../environment.js';

export interface ForeignVariable {
  name: string;
  note: string;
}

const NOTES: readonly (readonly [pattern: RegExp, note: string])[] = [
  [/^PYTORCH_CUDA_ALLOC_CONF$/, 'setting of PyTorch’s allocator; Trefoil has its own memory pools'],
  [/^TORCH_LOGS$/, 'setting of PyTorch’s logs; NSA_SDPA_AUDIT=1 prints the kernel of each branch'],
  [/^TORCH_(CUDNN_ALLOW_TF32|ALLOW_TF32_CUBLAS_OVERRIDE)$/, 'PyTorch’s TF32 switch; set runtime.precision'],
  [/^(PYTORCH|TORCH|TORCHINDUCTOR|TORCHELASTIC)_/, 'a variable of PyTorch, which is not used'],
  [/^TRITON_/, 'a variable of Triton, which is not used'],
  [/^FLASH_ATTENTION_/, 'a variable of flash-attn, which is not used; NSA_USE_FA2 selects the fused kernels'],
  [/^PYTHONUNBUFFERED$/, 'a variable of Python; output is never buffered'],
  [/^IB_DISABLE$/, 'not read by anything; NCCL reads NCCL_IB_DISABLE'],
];

/** Notes for `doctor`, sorted by name, without values: an environment may contain secrets. */
export function foreignVariables(env: Environment): ForeignVariable[] {
  return Object.keys(env)
    .filter((name) => env[name] !== undefined)
    .sort()
    .flatMap((name) => {
      const note = NOTES.find(([pattern]) => pattern.test(name))?.[1];
      return note === undefined ? [] : [{ name, note }];
    });
}
