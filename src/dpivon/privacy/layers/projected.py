"""A linear layer's weights over several positions: from kernels where there are any, else as :func:`outer_or_dense` has it.

Σ_t G_t ⊗ A_t is the weight gradient of a convolution of one tap, so the kernels of convolutions take norms and sums of it too,
from A and G as they lie. Materialised, every example's gradient is written once and read twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.conv_ops import Geometry
from dpivon.privacy.layers.convolved import Convolved, kernels_take
from dpivon.privacy.layers.uses import Use, materialises, outer_or_dense

_ONE_TAP = Geometry((1, 1), (1, 1), (0, 0), (1, 1))
_FEW = 256  # positions up to which making a gradient a second time is faster than to write it and read it twice


def projected(a: Tensor, g: Tensor, shape: torch.Size, transposed: bool = False) -> Use:
    """The use of a weight of shape [p, d], or [d, p] if ``transposed``, of which g_i = Σ_t G_it ⊗ A_it; a is [B, T, d], g is
    [B, T, p]."""
    if not conv_ops.wanted():
        return outer_or_dense(a, g, shape, transposed)
    left, right = (g, a) if transposed else (a, g)
    x, out = left.mT.unsqueeze(3), right.mT.unsqueeze(3)  # pictures of one column, channels last
    if not kernels_take(x, out) or not _worth(a, g):
        return outer_or_dense(a, g, shape, transposed)
    return Convolved(x, out, _ONE_TAP, shape, lambda: outer_or_dense(a, g, shape, transposed))


def _worth(a: Tensor, g: Tensor) -> bool:
    """Whether reading A and G once more, and multiplying them again, costs less than gradients in memory."""
    _, t, d = a.shape
    p = g.shape[2]
    if not materialises(g, d, p):
        return True
    return t <= _FEW and g.element_size() * t * (p + d) < 3 * 4 * p * d
