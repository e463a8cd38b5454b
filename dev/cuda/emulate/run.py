"""Runs the forward pass of the compressed and window branches and their gradients on the CPU's thread emulator and compares them
with float64: the mma.sync build, with fused multiply-add as on a GPU. Needs g++, no GPU.

    python3 dev/cuda/emulate/run.py [-DWINDOW=70 ...]
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FUSED = ("common.cuh", "matrix.cuh", "forward.cuh", "gradient.cuh", "window.cuh", "compressed.cu", "window.cu")
JOINT = ["src/ops/attention/fused/" + name for name in ("backward.cuh", "query-sums.cuh", "joint.cu")]
SOURCES = ["src/device/cuda/elements.cuh", "src/ops/attention/shape.cuh"] + ["src/ops/attention/fused/" + name for name in FUSED]
# Many steps of 64 keys with few tokens, and rows that fill no tile.
MACROS = ["-DHEADS=6", "-DGROUPS=2", "-DCMP_L=4", "-DCMP_D=2", "-DSEL_L=64", "-DWINDOW=150", "-DMMA_SYNC", "-DEMULATED", "-DJOINT_CHUNK=128"]

# Functions written in PTX, and their replacements.
REPLACED = {
    "float exp2_approximate(float x)": "return exp2f(x);",
    "float reciprocal_approximate(float x)": "return 1.0f / x;",
    "float log2_approximate(float x)": "return log2f(x);",
    "u32 pack_bf16(float low, float high)": "return emulator::to_bf16(low) | (u32)emulator::to_bf16(high) << 16;",
    "void store_streaming(void* to, uint4 x)": "*(uint4*)to = x;",
    "void store16(void* to, uint4 x)": "*(uint4*)to = x;",
    "u32 shared_address(const void* p)": "return (u32)((const char*)p - emulator::self().block->memory());",
    "void copy16(u32 to, const void* from, bool present)": "present ? (void)memcpy(emulator::at(to), from, 16) : (void)memset(emulator::at(to), 0, 16);",
    "void copy16(u32 to, const void* from) {": "memcpy(emulator::at(to), from, 16);",
    "void copy4(u32 to, const void* from, bool present)": "memcpy(emulator::at(to), from, 4);",
    "void copies_commit()": "",
    "void copies_wait()": "",
    "void barrier_init(u32 at, int arrivals)": "emulator::phases_init(at, arrivals);",
    "void barrier_arrive(u32 at)": "emulator::phases_arrive(at);",
    "void barrier_arrive(u32 at, int count)": "for (int i = 0; i < count; i++) emulator::phases_arrive(at);",
    "void barrier_wait(u32 at, int parity)": "emulator::phases_wait(at, parity);",
    "void bulk_end(u32 full, int)": "emulator::phases_arrive(full);",
    "void barrier(int id, int threads)": "emulator::named_barrier(id, threads);",
    "void barrier_pass(int id, int threads)": "emulator::named_pass(id, threads);",
    "void load_fragment(u32 (&r)[4], u32 address)": "emulator::load_matrices(r, address, TRANSPOSE);",
    "void hold(float (&d)[32])": "",
    "void mma_bf16(float* d": "emulator::product(d, a0, a1, a2, a3, b0, b1);",
}


def replace_body(source, signature, body):
    start = source.index("{", source.index(signature))
    end, depth = start, 0
    while True:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
        if depth == 0:
            return source[:start] + "{ " + body + " }" + source[end:]


def without_backward(source):
    """Without the gradients of keys and values, which are the last kernels of their files."""
    kernel = re.search(r"^struct \w+Backward", source, re.M)
    if kernel:
        source = source[: kernel.start()]
    return re.sub(r"EXPORT\(\w*backward\w*,.*\)\n", "", source)


def main():
    source = "\n".join(without_backward((ROOT / name).read_text()) for name in SOURCES)
    source += "\n".join((ROOT / name).read_text() for name in JOINT)
    source = re.sub(r'#include ".*"|#pragma once', "", source)
    for signature, body in REPLACED.items():
        source = replace_body(source, signature, body)
    source = source.replace(
        "extern __shared__ unsigned char shared[];", "unsigned char* shared = (unsigned char*)emulator::self().block->memory();"
    )
    given = {argument.split("=")[0] for argument in sys.argv[1:]}
    macros = [macro for macro in MACROS if macro.split("=")[0] not in given] + sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        file, program = Path(folder) / "kernel.cpp", Path(folder) / "kernel"
        emulator = ROOT / "src/testing/cuda-emulator.h"
        file.write_text(f'#include "{emulator}"\n{source}\n{(HERE / "check.cpp").read_text()}')
        subprocess.run(["g++", "-O2", "-march=native", "-std=c++17", "-w", *macros, "-o", program, file], check=True)
        sys.exit(subprocess.run([program]).returncode)


if __name__ == "__main__":
    main()
