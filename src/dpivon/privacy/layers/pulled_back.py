"""Gradients in standardised weights, pulled back to gradients in the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpivon.models.standardised import pull_back
from dpivon.privacy.layers.uses import Dense, Outer, Use, added_up_in_parts, measured_in_parts


def pulled_back(plain: Use, weight: Tensor) -> Use:
    """The use of weights of which ``plain`` is a use of the standardised ones."""
    if isinstance(plain, Outer):
        return PulledBack(plain, weight)
    return Dense(pull_back(weight, plain.materialise()))


@dataclass(frozen=True)
class PulledBack:
    """g_i = M(ĝ_i), with M linear and the same for all examples. Each is pulled back by itself, for the norm and for the sum: M
    takes away most of a gradient whose activations share an offset, and would leave the rounding of a sum of them.

    ``weight`` is a copy: by the time of the sum the layer's may be another sample of the posterior.
    """

    outer: Outer
    weight: Tensor

    def squared_norm(self) -> Tensor:
        return measured_in_parts(self._some, self._examples(), self._size())

    def weighted_sum(self, c: Tensor) -> Tensor:
        return added_up_in_parts(self._some, c, self._examples(), self._size()).reshape(self.outer.shape)

    def _examples(self) -> Tensor:
        return torch.arange(len(self.outer.a), device=self.outer.a.device)

    def _size(self) -> int:
        return 3 * self.outer.shape.numel()  # the gradient, the other one, and one more on the way

    def _some(self, i: Tensor) -> Tensor:
        o = self.outer
        plain = Outer(o.a[i], o.g[i], o.shape, o.transposed, o.order).materialise()
        return pull_back(self.weight, plain).flatten(1)

    def materialise(self) -> Tensor:
        return pull_back(self.weight, self.outer.materialise())

    def without(self, struck: Tensor) -> PulledBack:
        return PulledBack(self.outer.without(struck), self.weight)

    def grouped(self, rows: int) -> PulledBack:
        return PulledBack(self.outer.grouped(rows), self.weight)
