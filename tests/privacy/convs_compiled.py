"""The kernels of convolutions compiled for a Hopper GPU, on a machine without one: `python convs_compiled.py`. They must come
out with tensor cores, with reads that are in flight while they compute, and with hardly a register spilled to memory.

It is run by test_conv_kernels.py, in a process of its own: this one must not be in Triton's interpreter.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dpivon.privacy.kernels import conv_ops, convs
from dpivon.privacy.kernels.conv_ops import Geometry

ASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
THREE = Geometry((3, 3), (1, 1), (1, 1), (1, 1))
HALVED = Geometry((3, 3), (2, 2), (1, 1), (1, 1))
#: Layers of a WRN-16-4: geometry, in, out, side of the image.
LAYERS = [(THREE, 64, 64, 32), (HALVED, 64, 128, 32), (THREE, 256, 256, 8)]


def main() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for geometry, into, out, side in LAYERS:
            for standardised in (True, False):
                for kernel in (convs.gradient_statistics, convs.gradient_sums):
                    check(kernel, dtype, geometry, into, out, side, standardised)


def check(kernel, dtype, geometry, into, out, side, standardised) -> None:
    x = torch.empty(8, into, side, side, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    after = side // geometry.stride[0]
    g = torch.empty(8, out, after, after, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    tile = conv_ops.tile_for(9 * into, out, after * after, dtype)
    made = conv_ops._constants(x, g, geometry, 1, tile) | {"STANDARDISED": standardised}
    made |= {"FLATTEN": tile.flatten} if kernel is convs.gradient_sums else {"SPAN": tile.span}
    names = ("xn", "xh", "xw", "xc", "gn", "gh", "gw", "gc")
    strides = conv_ops._strides(x) + conv_ops._strides(g)
    made |= {name: 1 for name, s in zip(names, strides, strict=True) if s == 1}
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        number = "i32" if name in (*names, "N", "EACH") else "*fp32"
        signature[name] = "constexpr" if name in made else f"*{_short(dtype)}" if name in ("X", "G") else number
        if name not in made and name not in ("N", "EACH"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=made, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ASSEMBLER, "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (int(re.search(p, said).group(1)) for p in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    what = f"{kernel.__name__} {_short(dtype)} {into}→{out} at {side} {'standardised' if standardised else 'plain'}"
    print(
        f"{what}: {tile.bt}×{tile.bd}×{tile.bo}, {tile.warps} warps, {registers} registers, {spilled} bytes spilled",
        flush=True,
    )
    assert "wgmma.mma_async" in ptx, what
    assert "cp.async.cg" in ptx, what
    assert spilled <= 128, what


def _short(dtype):
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


if __name__ == "__main__":
    main()
