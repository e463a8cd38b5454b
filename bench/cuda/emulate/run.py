"""Runs a kernel of src/ops/step on the CPU's thread emulator and compares it with float64. Needs g++, no GPU.

    python3 bench/cuda/emulate/run.py [-DCLUSTER=4 ...]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]

# Functions written in PTX, and what stands for them.
REPLACED = {
    "float exp2_approximate(float x)": "return exp2f(x);",
    "u32 to_halves(float first, float second)": "return emulator::to_bf16(first) | (u32)emulator::to_bf16(second) << 16;",
    "uint4 load_early(const void* from)": "return *(const uint4*)from;",
    "void multiply_add(float (&d)[4]": "emulator::product(d, a0, a1, a2, a3, b0, b1);",
    "void cluster_sync()": "emulator::wait(emulator::state.cluster);",
    "int cluster_rank()": "return emulator::self().block->rank;",
    "X read_from(int rank, const X* own)": "return emulator::read_shared(rank, own);",
}


def replace_body(source, signature, body):
    start = source.index("{", source.index(signature))
    end, depth = start, 0
    while True:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
        if depth == 0:
            return source[:start] + "{ " + body + " }" + source[end:]


def main():
    names = ["src/device/cuda/elements.cuh", "src/device/cuda/decode.cuh", "src/ops/step/attend.cu"]
    source = "\n".join((ROOT / name).read_text() for name in names)
    for line in ('#include "elements.cuh"', '#include "decode.cuh"', "#pragma once"):
        source = source.replace(line, "")
    for signature, body in REPLACED.items():
        source = replace_body(source, signature, body)
    source = source.replace(
        "extern __shared__ float4 shared_memory[];", "float4* shared_memory = (float4*)emulator::self().block->memory();"
    )
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder) / "kernel.cpp", Path(folder) / "kernel"
        file.write_text(f'#include "{HERE / "emulator.h"}"\n{source}\n{(HERE / "attend.cpp").read_text()}')
        subprocess.run(["g++", "-O2", "-std=c++17", "-w", *sys.argv[1:], "-o", program, file], check=True)
        sys.exit(subprocess.run([program]).returncode)


if __name__ == "__main__":
    main()
