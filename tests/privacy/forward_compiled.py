"""The forward kernels of the paper's network compiled for a Hopper GPU, on a machine without one: `python forward_compiled.py`.

In bf16 and in fp32, with the tiles that are used: they must come out with tensor cores, without a
register spilled to memory, and so small that several programs fit on a processor. It is run by test_forward_kernels.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from dpivon.privacy.kernels.paper import kernels
from dpivon.privacy.kernels.paper.layout import Layout
from dpivon.privacy.kernels.paper.program import TUNING, tuned
from programs.hopper import SHORT, made

LAYOUT = Layout()


def main() -> None:
    for dtype, kernel in ((torch.bfloat16, "forward"), (torch.float32, "forward_fp32")):
        for i, (side, into, out) in enumerate(LAYOUT.convs):
            options = tuned(TUNING[kernel][i], side * side)
            shape = {"H": side, "W": side, "CIN": into, "COUT": out, "BM": options["BM"]}
            found = check(kernels.conv_forward, dtype, shape | {"SIGN": 1, "HAS_BIAS": True}, options)
            assert "mma" in found.ptx
            options = tuned(TUNING["pool_forward"][i], side * side // 4)
            shape = {"H": side, "W": side, "C": out, "CG": out // LAYOUT.groups, "BP": options["BP"]}
            check(kernels.norm_pool_forward, dtype, shape, options)


def check(kernel, dtype, constants, options):
    types = dict.fromkeys(kernel.arg_names, f"*{SHORT[dtype]}")
    types |= {"MODEL": "*i32", "WHICH": "*i8", "MEAN": "*fp32", "RSTD": "*fp32", "eps": "fp32"}
    aligned = [name for name in kernel.arg_names if name not in constants and name != "eps"]
    found = made(kernel, types, constants, aligned, warps=options["num_warps"])
    what = f"{kernel.__name__} {SHORT[dtype]} {options}: {found.registers} registers"
    print(f"{what}, {found.shared} bytes shared, {found.spilled} bytes spilled", flush=True)
    assert found.spilled == 0
    assert 4 * found.shared <= 228 * 1024
    assert 2 * 32 * options["num_warps"] * found.registers <= 65536
    return found


if __name__ == "__main__":
    main()
