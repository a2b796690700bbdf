"""Convolutions whose weights are standardised first: their gradients are an ordinary convolution's, pulled back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpivon.models.standardised import StandardisedConv2d
from dpivon.privacy.clipping import row_norms
from dpivon.privacy.layers.conv import conv
from dpivon.privacy.layers.registry import register_rule
from dpivon.privacy.layers.uses import Dense, Outer, Use, memory_cap


@register_rule(StandardisedConv2d, bf16=True)
def standardised_conv(layer: StandardisedConv2d, inputs: tuple[Any, ...], g: Tensor) -> Mapping[Tensor, Use]:
    uses = dict(conv(layer, inputs, g))
    plain = uses.get(layer.weight)
    if isinstance(plain, Outer):
        uses[layer.weight] = PulledBack(plain, layer)
    elif plain is not None:
        uses[layer.weight] = Dense(layer.pull_back(plain.materialise()))
    return uses


@dataclass(frozen=True)
class PulledBack:
    """g_i = M(ĝ_i), with M linear and the same for all examples: a sum is pulled back once, a norm example by example."""

    outer: Outer
    layer: StandardisedConv2d

    def squared_norm(self) -> Tensor:
        each = 12 * self.outer.shape.numel()  # the gradient, the other one, and one more on the way
        examples = torch.arange(len(self.outer.a), device=self.outer.a.device)
        parts = examples.split(max(1, memory_cap(self.outer.a) // each))
        return torch.cat([row_norms(self._some(i).flatten(1)) for i in parts]).square()

    def _some(self, i: Tensor) -> Tensor:
        o = self.outer
        return self.layer.pull_back(Outer(o.a[i], o.g[i], o.shape, o.transposed, o.order).materialise())

    def weighted_sum(self, c: Tensor) -> Tensor:
        return self.layer.pull_back(self.outer.weighted_sum(c).reshape(self.outer.shape))

    def materialise(self) -> Tensor:
        return self.layer.pull_back(self.outer.materialise())

    def without(self, struck: Tensor) -> PulledBack:
        return PulledBack(self.outer.without(struck), self.layer)

    def grouped(self, rows: int) -> PulledBack:
        return PulledBack(self.outer.grouped(rows), self.layer)
