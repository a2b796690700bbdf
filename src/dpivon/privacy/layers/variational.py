"""Gaussian layers: the spread's weights enter as their variances, so a gradient in r is one in σ² times dσ²/dr, elementwise.

The mean's part is an ordinary layer with an ordinary rule. Spread and mean are parameters alike: they are clipped together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpivon.privacy.layers.conv import conv
from dpivon.privacy.layers.linear import linear
from dpivon.privacy.layers.made import Mapped
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Dense, Outer, Use, unfolded
from dpivon.variational.layers import Spread, SpreadConv1d, SpreadConv2d, SpreadConv3d, SpreadLinear, variance_slope


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
            out[r] = Scaled(replace(use, a=a, g=g), factor.mul, 2, factor)
        else:
            out[r] = Dense(use.materialise() * factor)
    return out


def _balanced(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The same products from factors of moderate size: A is x², so G may be tiny, and G times a clip factor would vanish."""
    peak = a.abs().amax((1, 2), keepdim=True)
    peak = torch.where(torch.isfinite(peak) & (peak > 0.0), peak, torch.ones_like(peak))
    return a / peak, g * peak


@dataclass(frozen=True)
class Scaled(Mapped):
    """g_i = F ⊙ Σ_t G_it ⊗ A_it: a factor for every element of the parameter, the same for all examples.

    With one position the squared norm is Σ_pd G_p² F_pd² A_d², a product of matrices; with several the factor spoils the ghost
    norm, and gradients are materialised, some examples at a time.
    """

    factor: Tensor

    def squared_norm(self) -> Tensor:
        outer = self.outer
        if outer.a.shape[1] == 1 and outer.order is None and not outer.transposed:
            a, g, f = (t.double().square() for t in (outer.a[:, 0], outer.g[:, 0], self.factor.reshape(outer.shape)))
            return ((g @ f) * a).sum(1)
        return super().squared_norm()

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self.outer.weighted_sum(c) * self.factor if self.outer.a.shape[1] == 1 else super().weighted_sum(c)
