"""Gradients in standardised weights, pulled back to gradients in the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon.models.standardised import pull_back
from dpivon.privacy.clipping import row_norms
from dpivon.privacy.layers.uses import Dense, Outer, Use, memory_cap


def pulled_back(plain: Use, weight: Tensor) -> Use:
    """The use of weights of which ``plain`` is a use of the standardised ones."""
    if isinstance(plain, Outer):
        return PulledBack(plain, weight)
    return Dense(pull_back(weight, plain.materialise()))


@dataclass(frozen=True)
class PulledBack:
    """g_i = M(ĝ_i), with M linear and the same for all examples: a sum is pulled back once, a norm example by example.

    ``weight`` is a copy: by the time of the sum the layer's may be another sample of the posterior.
    """

    outer: Outer
    weight: Tensor

    def squared_norm(self) -> Tensor:
        each = 12 * self.outer.shape.numel()  # the gradient, the other one, and one more on the way
        examples = torch.arange(len(self.outer.a), device=self.outer.a.device)
        parts = examples.split(max(1, memory_cap(self.outer.a) // each))
        return torch.cat([row_norms(self._some(i).flatten(1)) for i in parts]).square()

    def _some(self, i: Tensor) -> Tensor:
        o = self.outer
        return pull_back(self.weight, Outer(o.a[i], o.g[i], o.shape, o.transposed, o.order).materialise())

    def weighted_sum(self, c: Tensor) -> Tensor:
        return pull_back(self.weight, self.outer.weighted_sum(c).reshape(self.outer.shape))

    def materialise(self) -> Tensor:
        return pull_back(self.weight, self.outer.materialise())

    def without(self, struck: Tensor) -> PulledBack:
        return PulledBack(self.outer.without(struck), self.weight)

    def grouped(self, rows: int) -> PulledBack:
        return PulledBack(self.outer.grouped(rows), self.weight)
