"""Training steps of the dense GPT of compare.mjs with PyTorch on the CPU; prints one JSON object.

Needs: pip install torch (the CPU build) and numpy. Eager mode, fused attention and fused AdamW: what PyTorch users get
without a compiler. `--compile` adds torch.compile, which needs a C++ compiler.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, heads, groups, size):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, size
        self.qkv = nn.Linear(dim, (heads + 2 * groups) * size, bias=False)
        self.out = nn.Linear(heads * size, dim, bias=False)

    def forward(self, x, cosines, sines):
        batch, length, _ = x.shape
        widths = [self.heads * self.size, self.groups * self.size, self.groups * self.size]
        q, k, v = (part.view(batch, length, -1, self.size).transpose(1, 2) for part in self.qkv(x).split(widths, dim=-1))
        q, k = rotate(q, cosines, sines), rotate(k, cosines, sines)
        if self.groups != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))


def rotate(x, cosines, sines):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)


class Block(nn.Module):
    def __init__(self, dim, heads, groups, size):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.attention = Attention(dim, heads, groups, size)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x, cosines, sines):
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    def __init__(self, dim, layers, heads, groups, vocabulary, length, size=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, groups, size) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    for name in ("dim", "layers", "heads", "groups", "vocabulary", "length", "batch", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    shape = (options.dim, options.layers, options.heads, options.groups, options.vocabulary, options.length)
    model = Gpt(*shape)
    run = torch.compile(model) if options.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    tokens = torch.randint(options.vocabulary, (options.batch, options.length + 1))
    times, loss = [], None
    for _ in range(2 + options.steps):  # two to warm up
        start = time.perf_counter()
        loss = run(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(1000 * (time.perf_counter() - start))
    print(
        json.dumps(
            {
                "version": torch.__version__,
                "ms_step": statistics.median(times[2:]),
                "params": sum(parameter.numel() for parameter in model.parameters()),
                "loss": loss.item(),
            }
        )
    )


main()
