"""Dense attention through PyTorch SDPA on the same machine, same shapes: what the NSA kernels must beat."""
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def timed(f, repeats=5):
    for _ in range(2):
        f()
    times = []
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b))
    return sorted(times)[len(times) // 2]


for sequences in (1, 8):
    length = 65536 // sequences
    q, k, v = (torch.randn(sequences, 12, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        if name == "flash" and sequences == 1:
            continue
        with sdpa_kernel(backend):
            run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            forward = timed(run)
            out = run()
            grad = torch.randn_like(out)
            backward = timed(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
        print(f"peer {name} S={length} forward {forward:.2f} ms backward {backward:.2f} ms", flush=True)
