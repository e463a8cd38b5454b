"""Training steps of a dense GPT (12 layers, 768 wide) with torch.compile on one GPU; prints one JSON object.

Needs PyTorch with CUDA. bf16 by autocast with fp32 weights, fused AdamW, dense causal attention by the fastest SDPA
backend. `--tied` shares the embedding with the head.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from torch import nn

DIM, LAYERS, HEADS, SIZE = 768, 12, 12, 64


def rotate(x, cosines, sines):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x, cosines, sines):
        batch, length, _ = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        q, k = rotate(parts[0], cosines, sines).to(parts.dtype), rotate(parts[1], cosines, sines).to(parts.dtype)
        attended = F.scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.down(F.silu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary, length, tied):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, SIZE, 2) / SIZE))
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def measure(length, sequences, vocabulary, tied, steps):
    torch.manual_seed(1)
    model = Gpt(vocabulary, length, tied).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model)
    ids = torch.randint(vocabulary, (sequences, length + 1), device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = sorted(times)[len(times) // 2]
    peak = torch.cuda.max_memory_allocated() / 2**20
    return {"S": length, "batch": sequences, "tokens_per_s": sequences * length / seconds, "peak_mem_mib": peak}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="2048,8192,32768,65536")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tied", action="store_true")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = []
    for length in (int(text) for text in options.lengths.split(",")):
        for sequences in (options.tokens // length, max(1, options.tokens // length // 2), 1):
            try:
                rows.append(measure(length, sequences, options.vocabulary, options.tied, options.steps))
                break
            except torch.OutOfMemoryError:  # the logits of a dense step do not fit: fewer sequences, or none at all
                rows.append({"S": length, "batch": sequences, "tokens_per_s": None, "peak_mem_mib": None})
            finally:
                torch._dynamo.reset()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
