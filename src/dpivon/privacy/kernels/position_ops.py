"""The kernel of :mod:`dpivon.privacy.kernels.positions` as a torch operator, which a tracer records, a compiler leaves alone
and a CUDA graph captures.

    torch.ops.dpivon.position_sums   Σ_t of several [rows, positions, out], side by side in fp32 or double, [rows, Σ out]

Left to itself a compiler joins such a sum with whatever makes its operand. A kernel that must also write the operand then walks
it in the order of the sum: on an H200 GELU's backward took two (64 positions) to six times (65) as long as its bytes do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LINE = 128  # bytes of a position that a program reads
_LINES = 128  # positions at a time, at most; a warp reads 16 of them


def launch(gs: Sequence[Tensor], double: bool) -> Tensor:
    """Every tensor is added up by a launch of its own, into its columns of the result."""
    import triton.language as tl

    from dpivon.privacy.kernels import positions

    result = gs[0].new_empty(_shape(gs), dtype=_dtype(double))
    with torch.cuda.device_of(result):
        for g, out in zip(gs, result.split([g.shape[2] for g in gs], 1), strict=True):
            (n, t, p), across = g.shape, _LINE // g.element_size()
            lines = min(_LINES, 1 << (t - 1).bit_length())
            positions.add_positions[(n * -(-p // across),)](
                g, out, *g.stride(), out.stride(0), p, t, BT=lines, BO=across,
                ACCUMULATOR=tl.float64 if double else tl.float32, num_warps=max(1, lines // 16),
            )  # fmt: skip
    return result


def _shape(gs: Sequence[Tensor]) -> tuple[int, int]:
    return gs[0].shape[0], sum(g.shape[2] for g in gs)


def _dtype(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


@torch.library.custom_op(
    "dpivon::position_sums", mutates_args=(), device_types="cuda", schema="(Tensor[] gs, bool double) -> Tensor"
)
def position_sums(gs: list[Tensor], double: bool) -> Tensor:
    return launch(gs, double)


@position_sums.register_fake
def _(gs: list[Tensor], double: bool) -> Tensor:
    return gs[0].new_empty(_shape(gs), dtype=_dtype(double))
