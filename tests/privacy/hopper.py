"""Triton kernels compiled for a Hopper GPU, on a machine without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int8: "i8"}


class Made(NamedTuple):
    ptx: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes


def made(kernel, types, constants, aligned, *, warps, stages=3) -> Made:
    """``types`` of the arguments that are not constants, by name; ``aligned`` names those that are multiples of 16."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    hints = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    options = {"num_warps": warps, "num_stages": stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = found.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ASSEMBLER, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.search(p, said).group(1)) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    return Made(ptx, registers, spilled, found.metadata.shared)
