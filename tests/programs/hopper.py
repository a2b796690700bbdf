"""Triton kernels compiled for a Hopper GPU, on a machine without one: for tests, and to count and time what is compiled."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dpivon.privacy.kernels import conv_ops, convs

ASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int8: "i8"}
STRIDES = ("xn", "xh", "xw", "xc", "gn", "gh", "gw", "gc")


class Made(NamedTuple):
    ptx: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    seconds: float  # of one core, the assembler's included


def made(kernel, types, constants, aligned, *, warps, stages=3) -> Made:
    """``types`` of the arguments that are not constants, by name; ``aligned`` names those that are multiples of 16."""
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    hints = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    options = {"num_warps": warps, "num_stages": stages}
    start = sum(os.times()[:4])
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    seconds = sum(os.times()[:4]) - start
    ptx = found.asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ASSEMBLER, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.search(p, said).group(1)) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    return Made(ptx, registers, spilled, found.metadata.shared, seconds)


def conv_binary(kernel, x, g, geometry, rows, standardised) -> dict:
    """The arguments of :func:`made` for a kernel of convolutions as ``conv_ops`` launches it on tensors like these; equal ones
    are one binary."""
    tile = conv_ops._tile(x, g, geometry)
    if kernel is convs.combine_statistics:
        types = dict.fromkeys(("PARTIAL", "UNIT_SUMS", "OUT"), "*fp32")
        types |= dict.fromkeys(("PARTS", "D", "EACH", "COUT"), "i32")
        constants = {"BO": tile.bo}
        return _arguments(kernel, types, constants, {"COUT": g.shape[1]}, 1, 3)
    constants = conv_ops._constants(x, g, geometry, rows, tile) | {"STANDARDISED": standardised}
    constants |= {"FLATTEN": tile.flatten} if kernel is convs.gradient_sums else {"SPAN": tile.span}
    strides = dict(zip(STRIDES, conv_ops._strides(x) + conv_ops._strides(g), strict=True))
    types = {name: "i32" if name in (*STRIDES, "N", "EACH") else "*fp32" for name in kernel.arg_names}
    types |= {
        name: f"*{SHORT[x.dtype]}" for name in ("X", "G", "UNIT") if name in types and (name != "UNIT" or standardised)
    }
    return _arguments(kernel, types, constants, strides, tile.warps, tile.stages)


def _arguments(kernel, types, constants, numbers, warps, stages) -> dict:
    """Triton makes a constant of a number that is 1, and knows of tensors, and of numbers that are, multiples of 16."""
    constants = constants | {name: 1 for name, n in numbers.items() if n == 1}
    whole = [name for name, n in numbers.items() if n % 16 == 0]
    whole += [name for name, kind in types.items() if kind.startswith("*")]
    return {
        "types": types, "constants": constants, "aligned": [n for n in kernel.arg_names if n in whole and n not in constants],
        "warps": warps, "stages": stages,
    }  # fmt: skip
