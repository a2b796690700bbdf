"""A convolution's weights on a GPU: norms and sums straight from its input and its output's gradient, nothing unfolded. Linear
layers are convolutions of one tap (:mod:`dpivon.privacy.layers.projected`).

The kernels are in :mod:`dpivon.privacy.kernels.convs`, with the formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from dpivon.models.standardised import directions, pull_back
from dpivon.privacy.kernels import conv_ops
from dpivon.privacy.kernels.conv_ops import Geometry
from dpivon.privacy.kernels.position_ops import position_sums
from dpivon.privacy.layers.pulled_back import pulled_back
from dpivon.privacy.layers.uses import Use
from dpivon.privacy.precision import capturing

_ROUNDING = 1e-5  # of S: more than its own rounding and that of q² can be, so that a norm is never too small
_LEAST = 1 / 16  # of S: a smaller rest is rounded off in the sum, so such an example is clipped as if it had this much


def takes(layer: _ConvNd, x: Tensor, g: Tensor) -> bool:
    """Whether kernels can be had for this convolution."""
    return g.dim() == 4 and layer.groups == 1 and layer.padding_mode == "zeros" and kernels_take(x, g)


def kernels_take(x: Tensor, g: Tensor) -> bool:
    """Whether the kernels are there, wanted, and made for tensors like these."""
    return (
        conv_ops.wanted()
        and g.dtype in (torch.bfloat16, torch.float32)
        and conv_ops.device_takes(g.device)
        and conv_ops.shapes_fit(x, g)
    )


def convolved(layer: _ConvNd, x: Tensor, g: Tensor, unfolded: Callable[[], Use]) -> Convolved:
    """The use of the layer's weight; ``unfolded`` makes the ordinary one."""
    left, _, top, _ = layer._reversed_padding_repeated_twice
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    geometry = Geometry((kh, kw), (sh, sw), (top, left), (dh, dw))
    # One rounding of both operands, before norms and sums; no copy of what is channels last already.
    x, g = (t.to(g.dtype).contiguous(memory_format=torch.channels_last) for t in (x, g))
    return Convolved(x, g, geometry, layer.weight.shape, unfolded)


@dataclass(frozen=True)
class Convolved:
    """g_i = Σ_t G_it ⊗ patch_it, of x [B · rows, in, H, W] and g [B · rows, out, H', W']; pulled back if ``weight`` is there, a
    copy of the weights that were standardised. What is struck counts for nothing, whatever it holds."""

    x: Tensor
    g: Tensor
    geometry: Geometry
    shape: torch.Size
    ordinary: Callable[[], Use]
    weight: Tensor | None = None
    rows: int = 1
    struck: Tensor | None = None

    @cached_property
    def _statistics(self) -> Tensor:
        unit = None
        if self.weight is not None:
            by_row = directions(self.weight.double())[0].float().view(self.shape)
            unit = by_row.permute(2, 3, 1, 0).reshape(-1, self.shape[0])
        found: Tensor = torch.ops.dpivon.conv_statistics(self.x, self.g, unit, self.geometry.flat(), self.rows)
        return found

    def squared_norm(self) -> Tensor:
        found = self._statistics.double()
        if self.weight is None:
            return found.sum((1, 2))
        spread, along = found[:, 1], found[:, 2]
        rest = torch.maximum(spread * (1 + _ROUNDING) - along.square(), spread * _LEAST)  # NaN stays NaN
        return (rest * directions(self.weight.double())[1].square().T).sum(1)

    def weighted_sum(self, c: Tensor) -> Tensor:
        c = c if self.struck is None else c.masked_fill(self.struck, 0.0)
        found = None if self.weight is None else self._statistics
        chunks = torch.ops.dpivon.conv_sums(self.x, self.g, c.float(), found, self.geometry.flat(), self.rows)
        (kh, kw), into, out = self.geometry.kernel, self.x.shape[1], self.g.shape[1]
        total = _added_up(chunks).view(kh, kw, into, out).permute(3, 2, 0, 1).reshape(self.shape)
        return total if self.weight is None else pull_back(self.weight, total)

    def materialise(self) -> Tensor:
        return self.unfolded().materialise()

    def unfolded(self) -> Use:
        """The ordinary use, for what the kernels cannot do."""
        plain = self.ordinary()
        plain = plain.grouped(self.rows) if self.rows > 1 else plain
        plain = plain if self.weight is None else pulled_back(plain, self.weight)
        return plain if self.struck is None else plain.without(self.struck)

    def without(self, struck: Tensor) -> Convolved:
        without = replace(self, struck=struck if self.struck is None else struck | self.struck)
        if "_statistics" in vars(self):  # they are the same, and cost as much as the sum
            vars(without)["_statistics"] = self._statistics
        return without

    def grouped(self, rows: int) -> Convolved:
        return replace(self, rows=self.rows * rows)

    def standardised(self, weight: Tensor) -> Convolved:
        """The same gradients in ŵ, as gradients in ``weight``."""
        return replace(self, weight=weight)


def _added_up(chunks: Tensor) -> Tensor:
    """Σ of the chunks in double. A compiler makes too few programs of so few numbers: recorded, they are ours to add."""
    if not capturing():
        return chunks.sum(0, dtype=torch.float64)
    total: Tensor = position_sums([chunks.flatten(1).unsqueeze(0)], True)
    return total
