"""Gaussian layers: the spread's weights enter as their variances, so a gradient in r is one in σ² times dσ²/dr, elementwise.

The mean's part is an ordinary layer with an ordinary rule. Spread and mean are parameters alike: they are clipped together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.privacy.layers.conv import conv
from dpivon.privacy.layers.linear import linear
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Dense, Order, Outer, Use, added_up_in_parts, measured_in_parts, unfolded
from dpivon.variational.layers import Spread, SpreadConv1d, SpreadConv2d, SpreadConv3d, SpreadLinear
from dpivon.variational.spread import variance_slope


@register_rule(SpreadLinear)
def spread_linear(layer: SpreadLinear, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _in_r(layer, linear(layer, (inputs[0].to(g.dtype).square(),), g), g.dtype)


@register_rule(SpreadConv1d, SpreadConv2d, SpreadConv3d)
def spread_conv(layer: Any, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    return _in_r(layer, conv(layer, (inputs[0].to(g.dtype).square(),), g), g.dtype)


def _in_r(layer: Spread, uses: Mapping[Tensor, Use], dtype: torch.dtype) -> Mapping[Tensor, Use]:
    """From gradients in σ² to gradients in r."""
    out: dict[Tensor, Use] = {}
    for r, use in uses.items():
        factor = variance_slope(r.detach().to(dtype), layer.initial_std)
        use = unfolded(use)
        if isinstance(use, Outer):
            a, g = _balanced(use.a, use.g)
            out[r] = Scaled(a, g, factor, use.shape, use.transposed, use.order)
        else:
            out[r] = Dense(use.materialise() * factor)
    return out


def _balanced(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The same products from factors of moderate size: A is x², so G may be tiny, and G times a clip factor would vanish."""
    peak = a.abs().amax((1, 2), keepdim=True)
    peak = torch.where(torch.isfinite(peak) & (peak > 0.0), peak, torch.ones_like(peak))
    return a / peak, g * peak


@dataclass(frozen=True)
class Scaled:
    """g_i = F ⊙ Σ_t G_it ⊗ A_it: an :class:`Outer` with a factor for every element of the parameter, the same for all examples.

    With one position the squared norm is Σ_pd G_p² F_pd² A_d², a product of matrices; with several the factor spoils the ghost
    norm, and the gradient is materialised, some examples at a time, for the norm and for the sum.
    """

    a: Tensor
    g: Tensor
    factor: Tensor
    shape: torch.Size
    transposed: bool = False
    order: Order | None = None

    @property
    def _outer(self) -> Outer:
        return Outer(self.a, self.g, self.shape, self.transposed, self.order)

    def squared_norm(self) -> Tensor:
        if self.a.shape[1] == 1 and self.order is None and not self.transposed:
            a, g, f = (t.double().square() for t in (self.a[:, 0], self.g[:, 0], self.factor.reshape(self.shape)))
            return ((g @ f) * a).sum(1)
        return measured_in_parts(self._some, *self._each())

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self.a.shape[1] == 1:
            return self._outer.weighted_sum(c) * self.factor
        return added_up_in_parts(self._some, c, *self._each()).reshape(self.factor.shape)

    def _each(self) -> tuple[Tensor, int]:
        """All examples, and the memory one of them needs: the gradient and its product with F."""
        return torch.arange(len(self.a), device=self.a.device), 2 * self.shape.numel()

    def _some(self, i: Tensor) -> Tensor:
        some = Outer(self.a[i], self.g[i], self.shape, self.transposed, self.order)
        return (some.materialise() * self.factor).flatten(1)

    def materialise(self) -> Tensor:
        return self._outer.materialise() * self.factor

    def without(self, struck: Tensor) -> Scaled:
        return self._of(self._outer.without(struck))

    def grouped(self, rows: int) -> Scaled:
        return self._of(self._outer.grouped(rows))

    def _of(self, outer: Outer) -> Scaled:
        return Scaled(outer.a, outer.g, self.factor, self.shape, self.transposed, self.order)
