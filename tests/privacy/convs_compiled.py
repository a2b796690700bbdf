"""The kernels of convolutions compiled for a Hopper GPU, on a machine without one: `python convs_compiled.py`. They must come
out with tensor cores, with reads that are in flight while they compute, and with hardly a register spilled to memory.

It is run by test_conv_kernels.py, in a process of its own: this one must not be in Triton's interpreter.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[2]))
from dpivon.privacy.kernels import conv_ops, convs
from dpivon.privacy.kernels.conv_ops import Geometry
from programs.hopper import SHORT, conv_binary, made

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
    check_positions()


def check(kernel, dtype, geometry, into, out, side, standardised) -> None:
    x = torch.empty(8, into, side, side, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    after = side // geometry.stride[0]
    g = torch.empty(8, out, after, after, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    tile = conv_ops.tile_for(9 * into, out, after * after, dtype)
    found = made(kernel, **conv_binary(kernel, x, g, geometry, 1, standardised))
    what = f"{kernel.__name__} {SHORT[dtype]} {into}→{out} at {side} {'standardised' if standardised else 'plain'}"
    size = f"{tile.bt}×{tile.bd}×{tile.bo}, {tile.warps} warps, {found.registers} registers"
    print(f"{what}: {size}, {found.spilled} bytes spilled", flush=True)
    assert "wgmma.mma_async" in found.ptx, what
    assert "cp.async.cg" in found.ptx, what
    # 172 for 64→128, standardised: a tile twice as large spills less and was slower on an H200.
    assert found.spilled <= 192, what


def check_positions() -> None:
    """Sums over positions, of gradients in bf16 and of chunks in double: sixteen bytes at a time, nothing spilled."""
    numbers = ("gn", "gt", "outn", "P")
    for operand, result, accumulator, across in (("bf16", "fp32", tl.float32, 64), ("fp32", "fp64", tl.float64, 32)):
        types = dict.fromkeys((*numbers, "T"), "i32") | {"G": f"*{operand}", "OUT": f"*{result}"}
        constants = {"go": 1, "BT": 128, "BO": across, "ACCUMULATOR": accumulator}
        found = made(convs.add_positions, types, constants, ["G", "OUT", *numbers], warps=8)
        assert "ld.global.v4" in found.ptx, operand
        assert found.spilled == 0, operand
        assert found.registers <= 128, operand


if __name__ == "__main__":
    main()
