"""Dense attention of one new token by what PyTorch's SDPA offers; prints one JSON object: milliseconds of each way and length.

Needs PyTorch with CUDA. 12 heads in 2 groups of keys and values, heads of 64, bf16. Each backend is tried with grouped heads
(enable_gqa) and with the heads of a group as rows of one query, which reads the keys once; a way that is refused is named.
"""

import argparse
import json

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from timing import median_ms

HEADS, GROUPS, SIZE = 12, 2, 64
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="65536")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    rows, refused = [], []
    batch = options.batch_size
    for length in (int(text) for text in options.lengths.split(",")):
        def random(*shape):
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        k, v = random(batch, GROUPS, length, SIZE), random(batch, GROUPS, length, SIZE)
        single, grouped = random(batch, HEADS, 1, SIZE), random(batch, GROUPS, HEADS // GROUPS, SIZE)
        ways = {
            "gqa": lambda: scaled_dot_product_attention(single, k, v, enable_gqa=True),
            "rows": lambda: scaled_dot_product_attention(grouped, k, v),
        }
        for backend, choice in BACKENDS.items():
            if backend == "math" and length > 16384:
                continue  # it makes copies of the keys for every head
            for way, attend in ways.items():
                try:
                    with sdpa_kernel(choice), torch.no_grad():
                        ms = median_ms(attend, options.repeats)
                    rows.append({"peer": f"{backend}, {way}", "S": length, "batch": batch, "ms": ms})
                except RuntimeError as error:
                    refused.append({"peer": f"{backend}, {way}", "S": length, "reason": str(error).splitlines()[0]})
        del k, v
    print(
        json.dumps(
            {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows, "refused": refused}
        )
    )


if __name__ == "__main__":
    main()
