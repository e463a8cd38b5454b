"""Dense causal attention on the GPU by what PyTorch offers; prints one JSON object: milliseconds of each peer and length.

Needs PyTorch with CUDA. 65,536 tokens in all, 12 heads of 64, bf16. FlexAttention is compiled, with a causal block mask.
"""

import argparse
import json

import torch
import torch._functorch.config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from timing import median_ms

TOKENS, HEADS, SIZE = 65536, 12, 64
torch._functorch.config.donated_buffer = False  # FlexAttention's backward pass is timed several times over one graph


def causal(_batch, _head, query, key):
    return query >= key


def sdpa(backend):
    def attend(q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def flex(length):
    compiled = torch.compile(flex_attention)
    mask = create_block_mask(causal, None, None, length, length, device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="8192,65536")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = []
    for length in (int(text) for text in options.lengths.split(",")):
        shape = (TOKENS // length, HEADS, length, SIZE)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        peers = {
            "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
            "flash": sdpa(SDPBackend.FLASH_ATTENTION),
            "flex": flex(length),
        }
        for name, attend in peers.items():
            forward = median_ms(lambda: attend(q, k, v), options.repeats)
            out = attend(q, k, v)
            slope = torch.randn_like(out)
            backward = median_ms(
                lambda: torch.autograd.grad(out, (q, k, v), slope, retain_graph=True), options.repeats
            )
            rows.append({"peer": name, "S": length, "forward_ms": forward, "backward_ms": backward})
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
