"""Compiles the attention kernels of two source trees and compares the machine code: registers, stack and bytes of every
kernel that differs. Needs nvcc, no GPU.

    python3 dev/cuda/machine-code.py BEFORE AFTER [only]     only: a part of the source's path
"""

import hashlib
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SHAPE = "HEADS=12 GROUPS=2 DK=64 DV=64 CMP_L=32 CMP_D=16 SEL_L=64 SEL_N=16 WINDOW=512"
FUSED = ["compressed", "select", "selected", "window", "combine", "dense", "joint", "scorer"]
BRANCHES = ["compressed", "select", "selected", "window", "dense"]
SOURCES = (
    [(f"fused/{name}.cu", SHAPE) for name in FUSED]
    + [(f"fused/{name}.cu", f"{SHAPE} MMA_SYNC=1") for name in FUSED[:4]]
    + [(f"{name}/cuda.cu", f"ELEMENT={element} FOURS=1") for name in BRANCHES for element in ("f32", "bf16")]
    + [("decode/paged/cuda.cu", "DTYPE=bf16"), ("decode/step/dense.cu", SHAPE)]
    + [("decode/step/attention.cu", f"{SHAPE} CLUSTER={cluster}") for cluster in (2, 8)]
    + [("decode/step/spread.cu", SHAPE), ("decode/step/token.cu", f"{SHAPE} DIM=768")]
)
STACK, REGISTERS = 0x12, 0x2F  # attributes of section .nv.info


def text(data, at):
    return data[at : data.index(b"\0", at)].decode()


def kernels(cubin):
    """{name: (registers, stack bytes, code bytes, hash)} from the ELF sections of a cubin."""
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    named = [(text(cubin, sections[names][4] + section[0]), section) for section in sections]
    symbols = next(section for section in sections if section[1] == 2)
    strings = sections[symbols[6]][4]
    attributes = {}
    for name, section in named:
        data, at = cubin[section[4] : section[4] + section[5]], 0
        while name == ".nv.info" and at < len(data):
            form, attribute, length = struct.unpack_from("<BBH", data, at)
            if form == 4 and attribute in (STACK, REGISTERS):
                symbol, value = struct.unpack_from("<II", data, at + 4)
                (name_at,) = struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)
                attributes[text(cubin, strings + name_at), attribute] = value
            at += 4 + (length if form == 4 else 0)
    found = {}
    for name, section in named:
        if name.startswith(".text."):
            kernel, code = name[6:], cubin[section[4] : section[4] + section[5]]
            figures = [attributes.get((kernel, attribute), 0) for attribute in (REGISTERS, STACK)]
            found[kernel] = (*figures, len(code), hashlib.sha256(code).hexdigest())
    return found


def compile_one(tree, source, macros):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        path = tree / "src/ops/attention" / source
        if not path.exists():
            return {}
        flags = ["-std=c++17", "-arch=sm_90a", f"-I{tree}/src/device/cuda", *(f"-D{macro}" for macro in macros.split())]
        subprocess.run(["nvcc", "-cubin", *flags, "-o", cubin.name, path], check=True)
        return kernels(Path(cubin.name).read_bytes())


def main():
    trees = [Path(argument).resolve() for argument in sys.argv[1:3]]
    only = sys.argv[3] if len(sys.argv) > 3 else ""
    wanted = [(source, macros) for source, macros in SOURCES if only in source]
    with ThreadPoolExecutor(2) as pool:
        before, after = (list(pool.map(lambda one, tree=tree: compile_one(tree, *one), wanted)) for tree in trees)
    same = 0
    for (source, macros), old, new in zip(wanted, before, after):
        build = " ".join(macro for macro in macros.split() if macro not in SHAPE.split())
        for kernel in sorted(old.keys() | new.keys()):
            a, b = old.get(kernel), new.get(kernel)
            same += a == b
            if a is None or b is None:
                print(f"{source} {build} {kernel}: only {'after' if a is None else 'before'}")
            elif a != b:
                figures = ", ".join(f"{name} {x} -> {y}" for name, x, y in zip(("registers", "stack", "bytes"), a, b))
                print(f"{source} {build} {kernel}: {figures}")
    print(f"{same} kernels have the same machine code")


if __name__ == "__main__":
    main()
