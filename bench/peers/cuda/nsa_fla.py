"""Native sparse attention by flash-linear-attention's Triton kernels on one GPU; prints one JSON object.

Needs PyTorch with CUDA, Triton and the package `fla` (pip install fla-core, or its folder in PYTHONPATH). 64 query heads
in 4 groups of 128, bf16. Its compressed blocks are its selected blocks: 64 tokens, and it selects 16 of them. Without
a window branch, for which it would need the package flash_attn.
"""

import argparse
import json

import torch
from fla.ops.nsa import parallel_nsa
from timing import median_ms

TOKENS, HEADS, GROUPS, SIZE, BLOCK, BLOCKS = 65536, 64, 4, 128, 64, 16


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="8192,65536")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for length in (int(text) for text in options.lengths.split(",")):
        batch = TOKENS // length
        q = random(batch, length, HEADS, SIZE)
        k, v = (random(batch, length, GROUPS, SIZE) for _ in range(2))
        g_cmp, g_slc = (random(batch, length, HEADS) for _ in range(2))
        inputs = (q, k, v, g_cmp, g_slc)

        def attend():
            return parallel_nsa(q, k, v, g_cmp=g_cmp, g_slc=g_slc, block_counts=BLOCKS, block_size=BLOCK)

        forward = median_ms(attend, options.repeats)
        out = attend()
        slope = torch.randn_like(out)
        backward = median_ms(lambda: torch.autograd.grad(out, inputs, slope, retain_graph=True), options.repeats)
        rows.append({"peer": "fla", "S": length, "forward_ms": forward, "backward_ms": backward})
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
